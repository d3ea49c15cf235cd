"""The acceptance curve of a synthetic run, and what commands that draw plots share."""

import subprocess
import sys
from pathlib import Path

import pytest
from event_making import make_drifted

from dashboards.commands import run_command
from dashboards.curve import PARSER, Curve, draw, read_curve
from store.errors import CorruptError, RunError, UsageError
from store.events import PromptCompleted
from store.log.run_log import RunLog
from store.query.rates import Acceptance

ROOT = Path(__file__).resolve().parents[2]


def prompt(offset: int, dataset: str, judged: int, accepted: int) -> PromptCompleted:
    return PromptCompleted(
        offset, f"p{offset}", dataset, "target", "in", "out", "length", 3, 12, 6, 10, judged, accepted, 6, 3,
        float(offset), offset + 1.0, 0,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunLog(tmp_path / "run") as log:
        for offset in range(5):
            log.append(prompt(offset, "docs", judged=10, accepted=offset))
        for offset, action in enumerate(("recall", "cooldown", "none", "reset")):
            log.append(make_drifted(offset=offset, action=action))
        log.append(prompt(5, "code", judged=0, accepted=0))
    return tmp_path / "run"


def test_a_run_has_windows_of_one_dataset_and_marks_of_what_was_acted_upon(run: Path):
    curve = read_curve(run)
    assert list(curve.offsets) == [4, 5]
    assert [(one.accepted, one.judged) for one in curve.acceptance] == [(10, 50), (0, 0)]
    assert list(curve.efficiency) == [2.0] * 2
    assert curve.datasets == [("docs", 0), ("code", 5)]
    assert list(curve.drifts) == [0, 3]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_written(tmp_path: Path, suffix: str):
    plot = tmp_path / f"curve.{suffix}"
    rates = [Acceptance(2, 10), Acceptance(), Acceptance(4, 10)]
    draw(Curve([1, 3, 5], rates, [1.1, 1.2, 1.5], [("docs", 0)], [2], [(0, 0), (3, 1)]), plot, "a run")
    assert plot.stat().st_size > 1000


def test_a_folder_that_is_not_a_run_is_refused_with_a_clear_error(tmp_path: Path):
    command = [sys.executable, "-m", "dashboards.curve", str(tmp_path), str(tmp_path / "curve.png")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"omnidraft: {tmp_path} must be a run's folder")


@pytest.mark.parametrize("misuse", [1, 2])
@pytest.mark.parametrize("error", [RunError("no"), UsageError("no"), CorruptError("no"), OSError("no")])
def test_a_command_that_fails_reports_the_reason_in_one_line(
    error: Exception, misuse: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["curve", "run", "curve.png"])
    with pytest.raises(SystemExit) as ended:
        run_command(PARSER, fail, misuse)
    status = misuse if isinstance(error, UsageError) else 1
    assert (ended.value.code, capsys.readouterr().err) == (status, "omnidraft: no\n")
