"""Frozen user-visible interfaces: each test computes one and compares it with the JSON file of its name in `frozen/`.

A difference is a change that users of a release see. If it is intended, rewrite the files with

    pytest tests/golden --rewrite-golden

check `git diff tests/golden`, and add a line to CHANGELOG.md.
"""

import difflib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import warm_python
from constants import constants, with_constants
from faulty_runs import CONSTANTS as FAULTY
from faulty_runs import NOBODY, PROGRAM, SETTINGS
from product import VARIABLE
from typing_commands import FROZEN, PAIR, type_command

LEARNING = ("learn.method=gradient", "learn.interval=1", "learn.spacing=fixed", "publish.interval=2")
CONSTANTS = {
    "gate_every": 3,
    "drift_threshold": 0.1,
    "drift_grace": 1,
    "drift_tolerance": 0.0,
    "drift_cooldown": 1,
}
# Of the unfinished run: examples fill most of its checkpoint.
STORED = FAULTY | {"replay_prompts": 2, "gate_window": 2}
CHOSEN = SETTINGS | {
    "learn.method": "gradient",
    "draft.exploration": 0,
    "draft.pause": "false",
    "publish.interval": 9,
    "threads": 1,
}
KILLED_AT = 36  # blocks of three prompts
KILLED = f"""
import sys
from itertools import count
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from constants import apply_inherited
from pipeline.run.committer import Committer
apply_inherited()
blocks = count()
Committer.is_due = lambda self: next(blocks) == {KILLED_AT}
{PROGRAM}
"""
DRAFTING = ("draft.costs=0.05", "draft.pause=false", "threads=1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write the golden data as it is now")


@pytest.fixture(scope="session")
def rewriting(pytestconfig: pytest.Config) -> bool:
    """Whether to write the golden data. False where pytest loads this file too late to add the option."""
    return bool(pytestconfig.getoption("--rewrite-golden", default=False))


@pytest.fixture
def golden(rewriting: bool) -> Callable[[str, Any], None]:
    """A function that compares a JSON value with the frozen one of a name."""

    def compare(name: str, value: Any) -> None:
        path, text = FROZEN / f"{name}.json", json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        if rewriting:
            FROZEN.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        frozen = path.read_text(encoding="utf-8")
        lines = difflib.unified_diff(frozen.splitlines(), text.splitlines(), f"frozen/{path.name}", "now", lineterm="")
        if frozen != text:
            pytest.fail("\n".join([*lines, "", str(sys.modules[__name__].__doc__)]), pytrace=False)

    return compare


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run that learned, drifted, rejected a row and published into a store next to it."""
    run = tmp_path_factory.mktemp("small") / "run"
    words = ["replay", "sums.jsonl", "strange.jsonl", "--target", "models/target", "--drafter", "models/drafter"]
    words += ["--temperature", 1, "--max-new-tokens", 16, "--batch", 2, "--device", "cpu", "--limit", 4]
    words += [word for setting in (*LEARNING, *DRAFTING) for word in ("--set", setting)]
    with constants(**CONSTANTS), chdir(PAIR):  # names in the log do not depend on the location of the project
        assert type_command([*words, "--run", run]) == 0
    return run


@pytest.fixture(scope="session")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed between two blocks, with sequences in flight, examples, n-grams and versions."""
    folder = Path(shutil.copytree(PAIR, tmp_path_factory.mktemp("unfinished") / "pair"))
    words = ["replay", "sums.jsonl", "strange.jsonl", "--target", "models/target", "--drafter", "models/drafter"]
    words += ["--temperature", "1", "--max-new-tokens", "16", "--batch", "3", "--device", "cpu", "--mlflow-uri", NOBODY]
    words += [word for key, value in CHOSEN.items() for word in ("--set", f"{key}={value}")]
    killed = {"OMP_NUM_THREADS": "1", VARIABLE: "commit: after the manifest=1"}
    environment = {**os.environ, **with_constants(**STORED), **killed}
    command = [sys.executable, "-c", KILLED, *words, "--run", "run"]
    ended = warm_python.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return folder / "run"


@pytest.fixture(scope="session")
def resumed(tmp_path_factory: pytest.TempPathFactory, small_run: Path, unfinished: Path) -> Path:
    """The finished copy of the unfinished run. Its queued messages go into the store of `small_run`."""
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copytree(unfinished.parent, folder, dirs_exist_ok=True)
    store = f"sqlite:///{small_run.parent}/mlflow.db"
    with constants(**STORED), chdir(folder):  # models and prompts are named relative to it
        assert type_command(["replay", "--resume", "run", "--mlflow-uri", store]) == 0
    return folder / "run"
