"""`omnidraft plot` on the command line: the newest run by default, and refusals."""

import os
from pathlib import Path

import pytest
from replaying import Command
from synthetic_runs import small_run_events, write_run

from store.log.manifest import MANIFEST


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs, the working folder's `runs`."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("older", "newer")):
        write_run(tmp_path / "runs" / name, small_run_events())
        os.utime(tmp_path / "runs" / name / MANIFEST, (number, number))
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["curve", "nowhere"], "nowhere"),
        (["curve", "--output", "curve.html"], "must end in .png or .svg or .pdf"),
        (["curve", "--prompts", "3"], "--prompts is for plots of kind tokens"),
        (["curve", "--runs", "none"], "omnidraft replay"),
    ],
)
def test_what_cannot_be_plotted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, omnidraft: Command, words: list[str], reason: str
):
    monkeypatch.chdir(tmp_path)
    typed = omnidraft("plot", *words)
    assert typed.status == 2
    assert reason in typed.err
    assert list(tmp_path.iterdir()) == []
