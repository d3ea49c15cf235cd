"""The two displays: messages of the log, and the panel in a terminal."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from event_making import make_completed, make_drifted, make_published
from rich.console import Console
from synthetic_runs import decision

from benchmarks.studies.messages import collect_messages
from pipeline.reports.progress import BUCKET, LiveDisplay, PlainDisplay, make_display
from store.events import Event

DRIFT = make_drifted(offset=30, dataset="code", rate_before=0.75, action="reset")
VERSION = make_published(offset=31, version=2, parent=1, reason="drift", changes="drafter unchanged; n-grams +53")
DECISION = decision(emitted_bytes=b" once")


class Clock:
    """A clock by which two seconds pass when the display is made, and `step` seconds with each event."""

    def __init__(self, step: float = 0.0) -> None:
        self.time, self.step = 10.0, step

    def __call__(self) -> float:
        return self.time

    def count(self) -> None:
        """Let the time of an event pass."""
        self.time += self.step


def make_console(width: int = 100, *, terminal: bool = False) -> Console:
    return Console(file=StringIO(), width=width, height=40, force_terminal=terminal, record=True, color_system=None)


def log_lines(*events: Event, step: float = 2.0, total: int | None = None) -> list[str]:
    """The messages about these events, with `step` seconds before each."""
    clock = Clock(step)
    with collect_messages() as lines, PlainDisplay(clock, total) as display:
        for event in events:
            clock.count()
            display.show(event)
    return lines


def draw_panel(*events: Event, width: int = 100) -> str:
    """Draw the panel after these events."""
    clock = Clock(2.0)
    display = LiveDisplay(make_console(terminal=True), clock, total=50)
    for event in events:
        clock.count()
        display.show(event)
    console = make_console(width)
    console.print(display._draw_panel())
    return console.export_text()


def prompts(number: int, begin: int = 0, accepted: int = 10) -> list[Event]:
    return [make_completed(begin + offset, accepted=accepted, drafter_version=7) for offset in range(number)]


def test_a_line_at_the_first_prompt_and_every_ten_seconds():
    lines = log_lines(*prompts(12), step=2.0)
    assert [line.split(",")[0] for line in lines] == ["1 prompts", "6 prompts", "11 prompts"]
    assert lines[1] == (
        "6 prompts, 10 tokens/s, acceptance 0.500 (0.41 to 0.59, 120 judged), first 20 prompts 0.500, drafter 7, "
        "version -, drifts 0"
    )


def test_the_time_left_is_that_of_the_other_prompts_at_the_speed_so_far():
    lines = log_lines(*prompts(40), step=30.0, total=50)
    assert lines[-1].startswith("40/50 prompts")
    assert lines[-1].endswith("5 min left")
    assert "left" not in log_lines(*prompts(1))[-1]


def test_prompts_of_an_earlier_process_do_not_count_as_speed():
    clock = Clock(10.0)
    with collect_messages() as lines:
        display = PlainDisplay(clock, 30)
        for earlier in prompts(20):
            display.remember(earlier)
        for event in prompts(5, begin=20):
            clock.count()
            display.show(event)
    assert lines[0].startswith("21/30 prompts")
    assert lines[-1].startswith("25/30 prompts")
    assert lines[-1].endswith("50 s left")


def test_drifts_and_versions_have_lines_of_their_own_and_are_counted():
    lines = log_lines(DRIFT, VERSION, replace(DRIFT, action="cooldown"), *prompts(1))
    assert lines[0] == DRIFT.description
    assert lines[1] == "version 2, up to prompt 31 (drift): drafter unchanged; n-grams +53"
    assert lines[3].endswith("version 2, drifts 1"), "one without a response is not counted"


def test_the_panel_shows_progress_metrics_and_text():
    panel = draw_panel(*prompts(10), VERSION, DECISION)
    assert "10/50" in panel
    assert re.search(r"\d+ s left", panel)
    assert "docs" in panel
    assert "acceptance 0.500" in panel
    assert "version 2" in panel
    assert " once" in panel
    assert "▼" not in panel


@pytest.mark.parametrize("width", [20, 40, 200])
def test_the_panel_fits_its_terminal(width: int):
    panel = draw_panel(*[DECISION] * 100, *prompts(40 * BUCKET), DRIFT, width=width)
    assert max(map(len, panel.splitlines())) <= width


def test_text_of_a_model_cannot_control_the_terminal():
    panel = draw_panel(replace(DECISION, emitted_bytes=b"a\x1b[2Jb\tc\xff"))
    assert "\x1b" not in panel
    assert "a·[2Jb c\N{REPLACEMENT CHARACTER}" in panel


def test_a_pipe_gets_lines_and_a_terminal_the_panel():
    assert isinstance(make_display(make_console(), Clock(), 5), PlainDisplay)
    assert isinstance(make_display(make_console(terminal=True), Clock(), 5), LiveDisplay)
