"""The two displays: what a log file gets to read, and what the panel in a terminal shows."""

from dataclasses import replace
from io import StringIO

import pytest
from event_making import completed
from rich.console import Console

from pipeline.progress import BUCKET, LINE_EVERY, LiveDisplay, PlainDisplay, make_display
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
    """Two seconds have passed since the display was made."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return 10.0 if self.looks == 1 else 12.0


def console_of(width: int = 100, *, terminal: bool = False) -> Console:
    return Console(file=StringIO(), width=width, height=40, force_terminal=terminal, record=True, color_system=None)


def lines_of(*events: Event, width: int = 100) -> list[str]:
    console = console_of(width)
    with PlainDisplay(console, Clock()) as display:
        for event in events:
            display.show(event)
    return console.export_text().splitlines()


def panel_of(*events: Event, width: int = 100) -> str:
    """The panel as it is drawn after these events."""
    display = LiveDisplay(console_of(terminal=True), Clock(), total=50)
    for event in events:
        display.show(event)
    console = console_of(width)
    console.print(display._panel())
    return console.export_text()


def prompts(number: int, begin: int = 0, accepted: int = 10) -> list[Event]:
    return [completed(begin + offset, accepted=accepted, drafter_version=7) for offset in range(number)]


def test_a_line_every_so_many_prompts():
    assert lines_of(*prompts(LINE_EVERY - 1)) == []
    (line,) = lines_of(*prompts(2 * LINE_EVERY - 1))
    assert line == (
        "25 prompts, 250 tokens/s, acceptance 0.500 (first 20 prompts 0.500), drafter 7, version -, drifts 0"
    )


def test_the_line_tells_the_acceptance_now_and_at_the_start():
    line = lines_of(*prompts(30, accepted=4), *prompts(20, begin=30, accepted=16))[-1]
    assert "acceptance 0.800 (first 20 prompts 0.200)" in line


def test_a_line_is_not_broken_however_narrow_the_output():
    assert len(lines_of(*prompts(LINE_EVERY), width=30)) == 1


def test_drifts_and_versions_have_lines_of_their_own_and_are_counted():
    lines = lines_of(DRIFT, VERSION, replace(DRIFT, action="ignored", direction="rise"), *prompts(LINE_EVERY))
    assert lines[0] == "prompt 30 (code): drift, acceptance 0.750 -> 0.250, reset"
    assert lines[1] == "prompt 31: version 2 (drift)"
    assert lines[2].endswith("ignored")
    assert lines[3].endswith("version 2, drifts 1"), "a rise that was ignored is none"


def test_a_recall_says_what_was_taken_back_and_why():
    taken, stayed = lines_of(RECALL, replace(RECALL, version=None, acceptance_best=0.2))
    assert taken == "prompt 30: expected acceptance 0.300, best of 3 earlier ones 0.600, version 1 is taken back"
    assert stayed.endswith("best of 3 earlier ones 0.200, the present drafter stays")
    assert "version 1 is taken back" in panel_of(RECALL)


def test_rejected_rows_are_told_once_there_are_any():
    lines = lines_of(PromptRejected("docs", 3, "empty"), *prompts(LINE_EVERY))
    assert lines[-1].endswith("rejected rows 1")


def test_a_stream_with_nothing_judged_is_shown_too():
    (line,) = lines_of(*[completed(offset, judged=0, accepted=0) for offset in range(LINE_EVERY)])
    assert "acceptance 0.000" in line


@pytest.mark.parametrize("kind", [PlainDisplay, LiveDisplay])
def test_a_note_is_printed_as_it_is(kind: type):
    console = console_of(terminal=kind is LiveDisplay)
    display = kind(console, Clock()) if kind is PlainDisplay else kind(console, Clock(), None)
    display.note("[red]run[/red] in /runs/[a]")
    assert "[red]run[/red] in /runs/[a]" in console.export_text()


def test_the_panel_shows_progress_figures_and_text():
    panel = panel_of(*prompts(10), VERSION, DECISION)
    assert "10/50" in panel
    assert "docs" in panel
    assert "acceptance 0.500" in panel
    assert "version 2" in panel
    assert " once" in panel
    assert "▼" not in panel


def test_the_panel_marks_a_drift_in_the_curve_and_says_what_it_was():
    panel = panel_of(*prompts(2 * BUCKET, accepted=19), DRIFT, *prompts(2 * BUCKET, begin=10, accepted=1))
    (curve,) = (line for line in panel.splitlines() if "acceptance  " in line)
    assert "██▼▁" in curve
    assert "▼ prompt 30 (code): drift, acceptance 0.750 -> 0.250, reset" in panel


def test_a_drift_that_was_not_acted_upon_is_no_mark_in_the_curve():
    panel = panel_of(replace(DRIFT, action="ignored"), *prompts(BUCKET))
    (curve,) = (line for line in panel.splitlines() if "acceptance  " in line)
    assert "▼" not in curve


@pytest.mark.parametrize("width", [20, 40, 200])
def test_the_panel_fits_its_terminal(width: int):
    panel = panel_of(*[DECISION] * 100, *prompts(40 * BUCKET), DRIFT, width=width)
    assert max(map(len, panel.splitlines())) <= width


def test_what_a_model_writes_cannot_steer_the_terminal():
    panel = panel_of(replace(DECISION, emitted_bytes=b"a\x1b[2Jb\tc\xff"))
    assert "\x1b" not in panel
    assert "a·[2Jb c\N{REPLACEMENT CHARACTER}" in panel


def test_a_character_that_is_split_over_tokens_is_shown_whole():
    parts = [b"caf\xc3", b"\xa9 \xf0\x9f", b"\x98\x80!", b"\xe2"]
    events = [replace(DECISION, emitted_bytes=part, position=place) for place, part in enumerate(parts)]
    assert "café 😀!" in panel_of(*events)
    assert "\N{REPLACEMENT CHARACTER}" not in panel_of(*events)
    assert "café 😀!\N{REPLACEMENT CHARACTER}" in panel_of(*events, completed(0))


def test_of_a_batch_one_text_after_the_other_is_shown():
    def token(offset: int, position: int, text: bytes) -> TokenDecision:
        return replace(DECISION, offset=offset, position=position, emitted_bytes=text)

    begun = [token(0, 0, b"one"), token(1, 0, b"two"), token(0, 1, b"-three"), token(1, 1, b"-four")]
    later = [completed(0), token(1, 2, b"-five"), token(2, 0, b"six"), token(1, 3, b"-seven"), token(2, 1, b"-eight")]
    panel = panel_of(*begun, *later)
    assert "one-three" in panel
    assert "six-eight" in panel
    assert "four" not in panel
    assert "seven" not in panel


def test_the_drafter_s_tokens_are_marked_apart_from_the_target_s_own():
    display = LiveDisplay(console_of(terminal=True), Clock(), total=None)
    display.show(DECISION)
    display.show(replace(DECISION, position=1, emitted_bytes=b" upon", origin=Origin.RESIDUAL))
    tail = display._tail()
    styles = {tail.plain[span.start : span.end].strip(): span.style for span in tail.spans}
    assert styles == {"once": "green", "upon": "yellow"}


def test_the_live_display_draws_while_it_is_open():
    console = console_of(terminal=True)
    with LiveDisplay(console, Clock(), total=None) as display:
        for event in (DECISION, *prompts(BUCKET), DRIFT, VERSION):
            display.show(event)
    text = console.export_text()
    assert "omnidraft replay" in text
    assert "drift, acceptance 0.750 -> 0.250, reset" in text


def test_a_pipe_gets_lines_and_a_terminal_the_panel():
    assert isinstance(make_display(console_of(), Clock(), 5), PlainDisplay)
    assert isinstance(make_display(console_of(terminal=True), Clock(), 5), LiveDisplay)
