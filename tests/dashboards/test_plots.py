"""The common functions of the commands that draw plots."""

import sys
from pathlib import Path

import pytest

from dashboards.curve import PARSER
from dashboards.plots import panels, run_command
from store.errors import CorruptError, RunError, UsageError


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


def test_an_unfinished_plot_is_not_written(tmp_path: Path):
    with pytest.raises(ValueError, match="half"), panels(tmp_path / "half.png"):
        raise ValueError("half")
    assert list(tmp_path.iterdir()) == []
