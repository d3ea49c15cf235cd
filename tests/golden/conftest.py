"""Frozen user-visible interfaces: each test computes one and compares it with the JSON file of its name in `frozen/`.

A difference is a change that users of a release see. If it is intended, rewrite the files with

    pytest tests/golden --rewrite-golden

check `git diff tests/golden`, and add a line to CHANGELOG.md.
"""

import difflib
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from constants import constants
from typing_commands import FROZEN, UNFINISHED, type_command

LEARNING = ("learn.interval=1", "learn.spacing=fixed", "publish.interval=2")
CONSTANTS = {
    "gate_every": 3,
    "drift_threshold": 0.1,
    "drift_grace": 1,
    "drift_tolerance": 0.0,
    "drift_cooldown": 1,
}
STORED = CONSTANTS | {  # with which the stored run was made
    "update_lag": 2,
    "replay_prompts": 2,
    "gate_window": 2,
    "drift_cooldown": 3,
    "recall_margin": 0.0,
}
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
    words += [word for setting in (*LEARNING, "drift.detector=page-hinkley", *DRAFTING) for word in ("--set", setting)]
    with constants(**CONSTANTS), chdir(UNFINISHED):  # names in the log do not depend on the location of the project
        assert type_command([*words, "--run", run]) == 0
    return run


class FirstCheckpoint:
    """Keeps a copy of the first checkpoint that is committed after the stored one."""

    def __init__(self, copies: Path) -> None:
        self.folder: Path | None = None
        self._copies, self._replace = copies, os.replace

    def __call__(self, source: Any, destination: Any, **named: Any) -> None:
        """Replace `os.replace`, the call that makes a commit valid."""
        self._replace(source, destination, **named)
        manifest = Path(destination)
        if self.folder is None and manifest.name == "manifest.json" and manifest.parent.name == "log":
            checkpoint = json.loads(manifest.read_bytes())["checkpoint"]
            if checkpoint and not (UNFINISHED / "run" / checkpoint["folder"]).exists():
                committed = manifest.parents[1] / checkpoint["folder"]
                self.folder = Path(shutil.copytree(committed, self._copies / "checkpoint"))


@pytest.fixture(scope="session")
def resumed(tmp_path_factory: pytest.TempPathFactory, small_run: Path) -> tuple[Path, Path]:
    """The finished copy of the stored run, and the checkpoint that it committed before its first block.

    Its queued messages, for a server that did not exist, go into the store of `small_run`.
    """
    store = f"sqlite:///{small_run.parent}/mlflow.db"
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copytree(UNFINISHED, folder, dirs_exist_ok=True)
    first = FirstCheckpoint(tmp_path_factory.mktemp("first"))
    with (
        constants(**STORED),
        chdir(folder),
        patch.object(os, "replace", first),
    ):  # models and prompts are named relative to it
        assert type_command(["replay", "--resume", "run", "--mlflow-uri", store]) == 0
    assert first.folder
    return folder / "run", first.folder
