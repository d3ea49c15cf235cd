"""Log output of commands: text or JSON lines on standard error, from a level on; a library writes nothing."""

import json
import logging
from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest
from rich.console import Console
from rich.live import Live

from pipeline.reports import terminal
from pipeline.reports.log_output import LogLevel, write_log

LOG = logging.getLogger("omnidraft.test")


def read_lines(capsys: pytest.CaptureFixture[str], level: LogLevel = LogLevel.INFO, *, as_json: bool) -> list[str]:
    """Return the lines on standard error for a record of each level; standard output stays empty."""
    with write_log(level, as_json=as_json):
        LOG.debug("costs measured")
        LOG.info("[red]serving[/red] on %s :smile: %s", "http://[::1]:80/v1", "x" * 200)
        LOG.warning("drafts ended early", extra={"drafts": 4, "rate": float("nan"), "level": "no", "_stamp": 1})
        LOG.error("lost")
    output = capsys.readouterr()
    assert output.out == ""
    return output.err.splitlines()


def test_text_is_the_message_as_it_is_however_long(capsys: pytest.CaptureFixture[str]):
    served = f"[red]serving[/red] on http://[::1]:80/v1 :smile: {'x' * 200}"
    assert read_lines(capsys, as_json=False) == [served, "drafts ended early", "lost"]


@pytest.mark.parametrize(("level", "lines"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_level_leaves_out_what_is_below_it(level: str, lines: int, as_json: bool, capsys: pytest.CaptureFixture[str]):
    assert len(read_lines(capsys, LogLevel(level), as_json=as_json)) == lines


def test_json_has_the_time_the_level_the_logger_and_fields(capsys: pytest.CaptureFixture[str]):
    _, warning, error = map(json.loads, read_lines(capsys, as_json=True))
    assert warning | {"time": ""} == {
        "time": "",
        "level": "warning",
        "logger": "omnidraft.test",
        "message": "drafts ended early",
        "drafts": 4,
        "rate": "nan",
    }
    assert abs(datetime.fromisoformat(warning["time"]) - datetime.now(UTC)) < timedelta(minutes=1)
    assert warning["time"].endswith("Z")
    assert list(error) == ["time", "level", "logger", "message"]


def console() -> Console:
    return terminal.stderr_console()


def test_a_line_goes_above_what_is_live(monkeypatch: pytest.MonkeyPatch):
    """The panel is taken away, the line printed in its place, and the panel drawn again below it."""
    out = StringIO()
    terminal_of_test = Console(file=out, force_terminal=True, width=40, height=10, color_system=None)
    with write_log(LogLevel.INFO, as_json=False):
        monkeypatch.setattr(terminal, "_STDERR", [terminal_of_test])
        with Live("the panel", console=terminal_of_test, auto_refresh=False) as live:
            live.refresh()
            LOG.info("resumed")
            live.refresh()
    lines = out.getvalue().split("resumed\n")
    assert len(lines) == 2
    assert lines[0].endswith("\x1b[2K"), "the line of the panel is erased before"
    assert lines[1].startswith("the panel")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_status_shows_how_far_a_model_is_loaded(is_terminal: bool, monkeypatch: pytest.MonkeyPatch):
    out, loading = StringIO(), logging.getLogger("omnidraft.loading")
    with write_log(LogLevel.INFO, as_json=False):
        monkeypatch.setattr(terminal, "_STDERR", [Console(file=out, force_terminal=is_terminal, width=80)])
        with terminal.status("loading models"):
            loading.info("loading %s: 43%%, 4 s left", "[a]")
            LOG.info("loaded [a] in 7 s")
        loading.info("later")
    assert ("loading [a]: 43%, 4 s left" in out.getvalue()) == is_terminal
    assert out.getvalue().count("loaded [a] in 7 s\n") == 1
    assert "later" not in out.getvalue(), "only a status shows the records"
