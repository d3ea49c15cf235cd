"""What users see, frozen: each test computes it again and compares it with the JSON file of its name in `frozen/`.

A difference is a change that somebody who uses a release notices. Where it is meant, write the files anew with

    pytest tests/golden --rewrite-golden

look at `git diff tests/golden`, and write a line in CHANGELOG.md.
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
from typing_commands import FROZEN, UNFINISHED, type_command

LEARNING = ("learn.interval=1", "learn.spacing=fixed", "learn.gate_share=0.34", "publish.interval=2")
DRIFTING = (
    "drift.detector=page-hinkley",
    "drift.signal=first",
    "drift.threshold=0.1",
    "drift.grace=1",
    "drift.tolerance=0.0",
    "drift.cooldown=1",
)
DRAFTING = ("draft.relative_cost=0.05", "draft.only_where_paying=false", "threads=1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write the golden data as it is now")


@pytest.fixture(scope="session")
def rewriting(pytestconfig: pytest.Config) -> bool:
    """Whether golden data are to be written. Not known in runs that found this file too late to have the option."""
    return bool(pytestconfig.getoption("--rewrite-golden", default=False))


@pytest.fixture
def golden(rewriting: bool) -> Callable[[str, Any], None]:
    """Compares a JSON value with the frozen one of this name."""

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
    """The folder of a whole run that learned, drifted, rejected a row and published into a store beside it."""
    run = tmp_path_factory.mktemp("small") / "run"
    words = ["replay", "sums.jsonl", "strange.jsonl", "--target", "models/target", "--drafter", "models/drafter"]
    words += ["--temperature", 1, "--max-new-tokens", 16, "--batch", 2, "--device", "cpu", "--limit", 4]
    words += [word for setting in (*LEARNING, *DRIFTING, *DRAFTING) for word in ("--set", setting)]
    with chdir(UNFINISHED):  # names in the log do not depend on where the project lies
        assert type_command([*words, "--run", run]) == 0
    return run


class FirstCheckpoint:
    """Keeps a copy of the first checkpoint that is committed after the stored one."""

    def __init__(self, copies: Path) -> None:
        self.folder: Path | None = None
        self._copies, self._replace = copies, os.replace

    def __call__(self, source: Any, destination: Any, **named: Any) -> None:
        """In place of `os.replace`, by which a commit counts."""
        self._replace(source, destination, **named)
        manifest = Path(destination)
        if self.folder is None and manifest.name == "manifest.json" and manifest.parent.name == "log":
            named_there = json.loads(manifest.read_bytes())["checkpoint"]
            if named_there and not (UNFINISHED / "run" / named_there["folder"]).exists():
                committed = manifest.parents[1] / named_there["folder"]
                self.folder = Path(shutil.copytree(committed, self._copies / "checkpoint"))


@pytest.fixture(scope="session")
def resumed(tmp_path_factory: pytest.TempPathFactory, small_run: Path) -> tuple[Path, Path]:
    """The finished copy of the stored run, and what it committed before its first block. Its messages to a server that
    was not there go into the other run's store."""
    store = f"sqlite:///{small_run.parent}/mlflow.db"
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copytree(UNFINISHED, folder, dirs_exist_ok=True)
    kept = FirstCheckpoint(tmp_path_factory.mktemp("kept"))
    with chdir(folder), patch.object(os, "replace", kept):  # models and prompts are named relative to it
        assert type_command(["replay", "--resume", "run", "--mlflow-uri", store]) == 0
    assert kept.folder
    return folder / "run", kept.folder
