"""The two displays: messages of the log, and the panel in a terminal."""

import logging
import re
from dataclasses import replace
from io import StringIO

import pytest
from event_making import make_completed
from rich.console import Console

from pipeline.reports.progress import BUCKET, LiveDisplay, PlainDisplay, make_display
from store.events import (
    Drifted,
    Event,
    Origin,
    Outcome,
    PromptRejected,
    Recalled,
    TokenDecision,
    Translation,
    VersionPublished,
)
from store.log_records import collect_messages
from store.query.acceptance import Acceptance

DRIFT = Drifted(
    offset=30,
    target="big",
    dataset="code",
    detector="adwin",
    direction="fall",
    changed_at=27,
    rate_before=0.75,
    rate_after=0.25,
    action="reset",
)
RECALL = Recalled(
    offset=30,
    target="big",
    version=1,
    candidates=3,
    prompts=4,
    acceptance_present=0.3,
    acceptance_best=0.6,
    seconds=0.5,
)
VERSION = VersionPublished(
    offset=31,
    version=2,
    target="big",
    parent=1,
    reason="drift",
    drafter_version=3,
    head_version=4,
    cache_version=5,
    cache_entries=60,
    acceptance=0.7,
    folder="versions/000002",
    digest="ab",
)
DECISION = TokenDecision(
    offset=0,
    prompt_id="p0",
    dataset="docs",
    target="big",
    block=0,
    position=0,
    index=0,
    pieces=(7,),
    translation=Translation.DIRECT,
    proposed_id=70,
    proposed_bytes=b" once",
    outcome=Outcome.ACCEPTED,
    emitted_id=70,
    emitted_bytes=b" once",
    origin=Origin.ACCEPTED,
    drafter_levels=(0.5,),
    target_levels=(0.5,),
    uniform=0.5,
    head_estimate=None,
    entropy=1.0,
    drafter_version=0,
    head_version=0,
    cache_version=0,
)


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


def test_a_line_in_a_long_prompt_too():
    lines = log_lines(*[DECISION] * 12, *prompts(1), step=1.0, total=3)
    assert lines[0] == "0/3 prompts"
    assert lines[1].startswith("1/3 prompts, ")
    assert lines[1].endswith(", 26 s left")


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


def test_the_time_before_the_first_prompt_does_not_count_as_speed():
    baseline = replace(VERSION, version=0, reason="floor")
    for before in ([], [baseline]):
        displayed = log_lines(*before, *prompts(4), step=10.0, total=10)
        assert displayed[-1].startswith("4/10 prompts, ")
        assert displayed[-1].endswith(", 60 s left")


def test_the_line_has_the_acceptance_now_and_at_the_start():
    line = log_lines(*prompts(31, accepted=4), *prompts(20, begin=31, accepted=16), step=10.0)[-1]
    assert "acceptance 0.800 (0.76 to 0.84, 400 judged), first 20 prompts 0.200" in line


def test_a_line_has_its_numbers_as_fields(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "omnidraft")
    PlainDisplay(Clock(), 9).show(prompts(1)[0])
    (record,) = caplog.records
    assert (record.name, vars(record)["prompts"], vars(record)["total"]) == ("omnidraft.progress", 1, 9)
    assert (vars(record)["acceptance"], vars(record)["seconds_left"]) == (0.5, 0.0)
    assert (vars(record)["acceptance_judged"], vars(record)["acceptance_interval"]) == (20, Acceptance(10, 20).interval)


def test_drifts_and_versions_have_lines_of_their_own_and_are_counted():
    lines = log_lines(DRIFT, VERSION, replace(DRIFT, action="ignored", direction="rise"), *prompts(1))
    assert lines[0] == "prompt 30 (code): drift, acceptance 0.750 -> 0.250, reset"
    assert lines[1] == "version 2, up to prompt 31 (drift)"
    assert lines[2].endswith("ignored")
    assert lines[3].endswith("version 2, drifts 1"), "a rise that was ignored is none"


def test_a_recall_is_reported_with_its_rates():
    recalled, stayed = log_lines(RECALL, replace(RECALL, version=None, acceptance_best=0.2))
    assert recalled == "prompt 30: expected acceptance 0.300, best of 3 earlier ones 0.600, version 1 is restored"
    assert stayed.endswith("best of 3 earlier ones 0.200, the present drafter stays")
    assert "version 1 is restored" in draw_panel(RECALL)


def test_rejected_rows_are_reported_if_there_are_any():
    lines = log_lines(PromptRejected("docs", 3, "empty"), *prompts(1))
    assert lines[-1].endswith("rejected rows 1")


def test_a_stream_with_nothing_judged_is_shown_too():
    (line,) = log_lines(make_completed(0, judged=0, accepted=0))
    assert "acceptance - (none judged), first 20 prompts -" in line
    (curve,) = (
        line
        for line in draw_panel(*[make_completed(offset, judged=0, accepted=0) for offset in range(BUCKET)]).splitlines()
        if "acceptance  " in line
    )
    assert "·" in curve


def test_the_panel_shows_progress_metrics_and_text():
    panel = draw_panel(*prompts(10), VERSION, DECISION)
    assert "10/50" in panel
    assert re.search(r"\d+ s left", panel)
    assert "docs" in panel
    assert "acceptance 0.500" in panel
    assert "version 2" in panel
    assert " once" in panel
    assert "▼" not in panel


def test_the_panel_marks_and_describes_a_drift():
    panel = draw_panel(*prompts(2 * BUCKET, accepted=19), DRIFT, *prompts(2 * BUCKET, begin=10, accepted=1))
    (curve,) = (line for line in panel.splitlines() if "acceptance  " in line)
    assert "██▼▁" in curve
    assert "▼ prompt 30 (code): drift, acceptance 0.750 -> 0.250, reset" in panel


def test_a_drift_that_was_not_acted_upon_is_no_mark_in_the_curve():
    panel = draw_panel(replace(DRIFT, action="ignored"), *prompts(BUCKET))
    (curve,) = (line for line in panel.splitlines() if "acceptance  " in line)
    assert "▼" not in curve


@pytest.mark.parametrize("width", [20, 40, 200])
def test_the_panel_fits_its_terminal(width: int):
    panel = draw_panel(*[DECISION] * 100, *prompts(40 * BUCKET), DRIFT, width=width)
    assert max(map(len, panel.splitlines())) <= width


def test_text_of_a_model_cannot_control_the_terminal():
    panel = draw_panel(replace(DECISION, emitted_bytes=b"a\x1b[2Jb\tc\xff"))
    assert "\x1b" not in panel
    assert "a·[2Jb c\N{REPLACEMENT CHARACTER}" in panel


def test_a_character_that_is_split_over_tokens_is_shown_whole():
    parts = [b"caf\xc3", b"\xa9 \xf0\x9f", b"\x98\x80!", b"\xe2"]
    events = [replace(DECISION, emitted_bytes=part, position=place) for place, part in enumerate(parts)]
    assert "café 😀!" in draw_panel(*events)
    assert "\N{REPLACEMENT CHARACTER}" not in draw_panel(*events)
    assert "café 😀!\N{REPLACEMENT CHARACTER}" in draw_panel(*events, make_completed(0))


def test_of_a_batch_one_text_after_the_other_is_shown():
    def token(offset: int, position: int, text: bytes) -> TokenDecision:
        return replace(DECISION, offset=offset, position=position, emitted_bytes=text)

    begun = [token(0, 0, b"one"), token(1, 0, b"two"), token(0, 1, b"-three"), token(1, 1, b"-four")]
    later = [
        make_completed(0),
        token(1, 2, b"-five"),
        token(2, 0, b"six"),
        token(1, 3, b"-seven"),
        token(2, 1, b"-eight"),
    ]
    panel = draw_panel(*begun, *later)
    assert "one-three" in panel
    assert "six-eight" in panel
    assert "four" not in panel
    assert "seven" not in panel


def test_the_drafter_s_tokens_are_marked_apart_from_the_target_s_own():
    display = LiveDisplay(make_console(terminal=True), Clock(), total=None)
    display.show(DECISION)
    display.show(replace(DECISION, position=1, emitted_bytes=b" upon", origin=Origin.RESIDUAL))
    tail = display._draw_text()
    styles = {tail.plain[span.start : span.end].strip(): span.style for span in tail.spans}
    assert styles == {"once": "green", "upon": "yellow"}


def test_the_live_display_draws_while_it_is_open():
    console = make_console(terminal=True)
    with LiveDisplay(console, Clock(), total=None) as display:
        for event in (DECISION, *prompts(BUCKET), DRIFT, VERSION):
            display.show(event)
    text = console.export_text()
    assert "omnidraft replay" in text
    assert "drift, acceptance 0.750 -> 0.250, reset" in text


def test_a_pipe_gets_lines_and_a_terminal_the_panel():
    assert isinstance(make_display(make_console(), Clock(), 5), PlainDisplay)
    assert isinstance(make_display(make_console(terminal=True), Clock(), 5), LiveDisplay)
