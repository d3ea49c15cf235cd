"""The plugin inside vLLM on the CPU: greedy text is that of vLLM alone.

The environment of vLLM is that of `vllm_environment.py`. Requests arrive while others run, and leave when they end.
"""

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from vllm_environment import find_interpreter, prepare_second_runner, variables_of

from benchmarks.vllm.arms import PROPOSER
from benchmarks.vllm.engine import EngineSpec, RoundRequest, RoundResult
from benchmarks.vllm.worker import EngineWorker
from pipeline.sources.corpus import stream
from stages.engine.models.huggingface import load_tokenizer
from store.query.log_reader import LogReader

PROMPTS, TOKENS, DRAFTS = 100, 32, 6
FEWER = 12  # prompts of the second runner, whose kernels are interpreted: all 100 take it five minutes
STEPS_BETWEEN = 2  # arrivals
MODEL = ROOT / "pipeline" / "models" / "target-7m"
OPTIONS = {"dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 512, "enforce_eager": True}
Options = dict[str, Any]

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(3600)]


@pytest.fixture(scope="session")
def interpreter() -> Path:
    return find_interpreter(install=True)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(str(MODEL))
    return [list(tokenizer(passage.prompt)["input_ids"]) for passage in stream("docs")[:PROMPTS]]


class Vllm:
    """Engines of this environment that complete the prompts."""

    def __init__(self, python: Path, prompts: list[list[int]], folder: Path, paths: Sequence[Path] = ()) -> None:
        self._python, self._folder, self._paths = python, folder, paths
        self.prompts = prompts[:FEWER] if paths else prompts

    def start(self, batch: int, drafts: bool, options: Options, **chosen: str) -> EngineWorker:
        settings = {"pass_costs": "[[1, 1.0], [200, 2.0]]"} | chosen
        named = {f"OMNIDRAFT_VLLM_{name.upper()}": value for name, value in settings.items()}
        speculative = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": DRAFTS}
        spec = EngineSpec(str(MODEL), batch, speculative if drafts else None, OPTIONS | options)
        messages = self._folder / f"messages-{batch}-{drafts}"
        return EngineWorker(spec, variables_of(self._python, *self._paths) | named, messages, str(self._python))

    def complete(self, batch: int, *, drafts: bool, options: Options | None = None, **chosen: str) -> RoundResult:
        with self.start(batch, drafts, options or {}, **chosen) as worker:
            assert worker.wait_until_ready() == bool(self._paths), "the model runner that was chosen"
            return worker.complete(self.make_round())

    def make_round(self, count: int = PROMPTS) -> RoundRequest:
        prompts = self.prompts[:count]
        return RoundRequest(prompts, TOKENS, arrivals=[STEPS_BETWEEN * place for place in range(len(prompts))])


@pytest.fixture(params=["first runner", "second runner"])
def vllm(request: pytest.FixtureRequest, interpreter: Path, prompts: list[list[int]], tmp_path: Path) -> Vllm:
    """Engines with one of vLLM's model runners. Without a backend of Triton for processors, vLLM takes the first."""
    paths = prepare_second_runner(make_folder(tmp_path)) if request.param == "second runner" else ()
    return Vllm(interpreter, prompts, tmp_path, paths)


def make_folder(place: Path) -> Path:
    (place / "installed").mkdir()
    return place / "installed"


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_greedy_text_is_that_of_vllm_alone_while_a_model_learns(vllm: Vllm, batch: int, tmp_path: Path):
    plain = vllm.complete(batch, drafts=False)
    chosen = {"run": str(tmp_path / "run"), "sources": '["own", "memory", "model"]', "drafter": "builtin:drafter-1.6m"}
    ours = vllm.complete(batch, drafts=True, learn="true", **chosen)
    assert [place for place, text in enumerate(plain.texts) if text != ours.texts[place]] == []
    assert ours.emitted > len(vllm.prompts) * TOKENS / 2
    assert ours.emitted / ours.passes > 1.3, "tokens per pass"
    assert plain.emitted == plain.passes
    check_log(tmp_path / "run", ours)


def check_log(run: Path, result: RoundResult) -> None:
    """The log has every text, its order and positions hold, and a version was published."""
    with LogReader([run]) as log:
        assert log.check().mismatches.num_rows == 0
        logged = log.select('SELECT list(token_id ORDER BY position) AS ids FROM tokens GROUP BY "offset"').to_pylist()
        sources = log.select("SELECT DISTINCT drafter FROM decisions WHERE outcome = 'accepted'").to_pylist()
        levels = log.select("SELECT * FROM decisions WHERE outcome = 'accepted' AND len(target_levels) = 0").to_pylist()
    assert sorted(row["ids"][:TOKENS] for row in logged) == sorted(result.texts)
    assert {row["drafter"] for row in sources} == {"lookup", "memory", "model"}
    assert levels == [], "the greedy target's token is among the likeliest, and no draft was cut"
    assert (run / "versions" / "000000" / "model.safetensors").is_file()


def test_texts_are_equal_after_preemption_and_requests_stay_what_they_are(vllm: Vllm, tmp_path: Path):
    little = {"max_model_len": 256, "num_gpu_blocks_override": 12, "block_size": 32, "enable_prefix_caching": False}
    plain = vllm.complete(8, drafts=False)
    ours = vllm.complete(8, drafts=True, options=little, run=str(tmp_path / "run"))
    assert ours.texts == plain.texts
    logged = read_texts(tmp_path / "run")
    assert len(logged) == len(vllm.prompts)
    assert sorted(logged.values()) == sorted(ours.texts), "one row per request, whose tokens are those of the client"
    assert {name.split("-")[1] for name in logged} == set(map(str, range(len(vllm.prompts)))), "ids of the client"


def read_texts(run: Path) -> dict[str, list[int]]:
    """The logged completions by the requests' ids, after the log was checked."""
    ids = 'SELECT "offset", list(token_id ORDER BY position) AS ids FROM tokens GROUP BY ALL'
    query = f'SELECT prompt_id, ids FROM ({ids}) JOIN prompts USING ("offset")'
    with LogReader([run]) as log:
        assert log.check().mismatches.num_rows == 0
        return {row["prompt_id"]: row["ids"] for row in log.select(query).to_pylist()}


@pytest.mark.parametrize("vllm", ["first runner"], indirect=True)
def test_a_killed_learner_changes_no_text(vllm: Vllm, tmp_path: Path):
    plain = vllm.complete(4, drafts=False)
    chosen = {"run": str(tmp_path / "run"), "sources": '["own", "memory", "model"]', "drafter": "builtin:drafter-1.6m"}
    with vllm.start(4, True, {}, learn="true", **chosen) as worker:
        worker.wait_until_ready()
        first = worker.complete(vllm.make_round(20))
        killed = kill_children(worker.process_id)
        second = worker.complete(vllm.make_round())
    assert killed > 0
    assert first.texts == plain.texts[:20]
    assert second.texts == plain.texts


def kill_children(process: int) -> int:
    """Kill the processes that a process started, and return their number."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children = [int(child) for child, parent in map(str.split, listed.splitlines()) if int(parent) == process]
    for child in children:
        os.kill(child, signal.SIGKILL)
    return len(children)
