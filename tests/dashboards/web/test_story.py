"""The sentences on top of the stream page, compared with the numbers of the log; two runs compared in sentences."""

import json
from pathlib import Path

import pytest
from event_making import make_completed, make_drifted, make_updated
from stream_making import blocks, prompt, stream, write

from dashboards.web.queries.charts import read_stream
from dashboards.web.queries.story import compare_runs, read_story
from store.events import Action, BlockDone, DraftSource, Event
from store.query.log_reader import LogReader
from store.query.summary import summarize


def describe(tmp_path: Path, events: list[Event]) -> list[str]:
    with LogReader([write(tmp_path / "run", events)]) as log:
        (found,) = read_story(log)
    sentences: list[str] = found["sentences"]
    return sentences


def make_copied(offset: int, source: DraftSource) -> list[Event]:
    """Make a prompt of ten tokens in four target forwards: six from a source of copies, two from the model."""
    drafts = [
        BlockDone(offset, "docs", 0, 1, 8, 8, 6, 6, 7, 0.0, 0.0, 0.5, source),
        BlockDone(offset, "docs", 1, 1, 2, 2, 2, 2, 3, 0.0, 0.0, 0.5),
    ]
    counts = {"emitted": 10, "blocks": 4, "judged": 2, "accepted": 2, "lookup_blocks": 1, "lookup_accepted": 6}
    counts["own_accepted"] = 6 if source is DraftSource.LOOKUP else 0
    return [*drafts, make_completed(offset, **counts)]


def test_tokens_are_divided_by_their_source(tmp_path: Path):
    events = [*make_copied(0, DraftSource.LOOKUP), *make_copied(1, DraftSource.MEMORY)]
    assert describe(tmp_path / "a", events)[0] == (
        "Drafting: speed without drafts unknown, since draft.exploration is 0; own text 30%, memory 30%, drafter 20% "
        "of 20 tokens."
    )


@pytest.mark.parametrize(("gained", "verdict"), [(40.0, "a gain of "), (2.0, "a loss of ")])
def test_cost_and_gain_of_learning_are_those_of_the_ledger(tmp_path: Path, gained: float, verdict: str):
    events: list[Event] = [*blocks(0), prompt(0)]
    events += [make_updated(seconds=2.5, waited=0.5, tokens_gained=gained), make_updated(part="head", seconds=0.25)]
    sentence = describe(tmp_path, events)[1]
    ledger = summarize(tmp_path / "run")["totals"]["ledger"]
    assert sentence == (
        f"Learning: 1 of 1 drafter updates served; cost {ledger['update_seconds']:.1f} s "
        f"({ledger['waited_seconds']:.1f} s waited for), gained {ledger['seconds_saved']:.1f} s "
        f"({gained:.0f} accepted tokens more than as loaded): "
        f"{verdict}{abs(ledger['net_seconds']):.1f} s."
    )
    assert sentence == f"Learning: {summarize(tmp_path / 'run')['findings']['learning']}.", "as the end of the run"


@pytest.mark.parametrize("steps", [1, 3])
def test_a_drafter_that_was_never_updated_is_reported_as_loaded(tmp_path: Path, steps: int):
    events: list[Event] = [*blocks(0), prompt(0), make_updated(part="head")]
    only_head = describe(tmp_path / "a", events)[1]
    assert only_head.startswith("Learning: only the acceptance head, 1 times; drafter unchanged; cost ")
    events += [make_updated(served=False)] * steps
    refused = describe(tmp_path / "b", events)[1]
    assert refused.startswith(f"Learning: the gate refused all {steps} drafter updates; drafter unchanged; cost ")


def test_the_speed_is_compared_with_the_speed_without_drafts(tmp_path: Path):
    drawn: list[Event] = []
    for offset in range(32):  # the first block of a prompt reads it and does not count
        action, emitted = (Action.NOTHING, 1) if offset % 2 else (Action.COPIES, 3)
        counts = (1, 4, 4, 4, emitted - 1, emitted, 0.0, 0.0, 0.5)
        drawn += [BlockDone(offset, "docs", block, *counts, action=action, propensity=0.5) for block in range(2)]
        drawn.append(make_completed(offset, emitted=2 * emitted, blocks=2, started=1.0 + offset, finished=2.0 + offset))
    assert describe(tmp_path / "a", drawn)[0].startswith("Drafting: 2.00 times as fast (1.68 to 2.38) as without; ")
    totals = summarize(tmp_path / "a" / "run")["totals"]
    assert [round(totals[f"times_without_drafts{end}"], 2) for end in ("", "_low", "_high")] == [2.0, 1.68, 2.38]
    few = [event for event in drawn if event.offset < 16]
    too_few = "Drafting: too few prompts to say how much faster than without; "
    assert describe(tmp_path / "b", few)[0].startswith(too_few)


@pytest.mark.parametrize(("tries", "said"), [(12, True), (9, False)])
def test_why_drafts_rested_is_said_where_they_did(tmp_path: Path, tries: int, said: bool):
    """A prompt has three passes without a draft, the first of which reads it, and one with a draft of the model."""
    events: list[Event] = []
    for offset in range(tries):
        plain = [
            BlockDone(offset, "docs", block, 1, 0, 0, 0, 0, 1, 0.0, 0.0, 0.5 if block else 9.0) for block in range(3)
        ]
        draft = BlockDone(offset, "docs", 3, 1, 4, 4, 2, 1 + offset % 2, 3, 0.25, 0.05, 0.7)
        events += [*plain, draft, make_completed(offset, emitted=5, blocks=4, judged=2, accepted=1)]
    sentence = describe(tmp_path, events)[0]
    why = (
        "; nothing was drafted in 75% of the passes, since a draft of the drafter added 1.50 tokens and took the time "
    )
    assert sentence.endswith(f"{why}of 0.60 passes.") == said
    assert ("nothing was drafted" in sentence) == said


def test_contradictions_that_the_check_found_are_reported(tmp_path: Path):
    folder = write(tmp_path / "run", [*blocks(0), prompt(0)])
    for mismatches in (0, 3):
        check = {"decisions": 4818, "judged": 2611, "mismatches": mismatches}
        (folder / "summary.json").write_text(json.dumps({"check": check}))
        with LogReader([folder]) as log:
            (found,) = read_story(log, folders={folder.name: folder})
        said = "3 of 2,611 judged decisions do not follow from their row in the log." in found["sentences"]
        assert said == bool(mismatches)


def test_a_drift_has_its_response_and_its_effect(tmp_path: Path):
    assert describe(tmp_path, stream())[2:] == [
        f"Drift was acted upon once: {make_drifted().description}.",
        "An earlier version was restored once.",
        "Tokens per target forward were 2.50 in the 20 prompts before the change, at prompt 30, 2.50 from there until "
        "the drift was detected, and 2.50 in the last 20.",
    ]


def test_the_last_of_several_drifts_is_described(tmp_path: Path):
    events: list[Event] = [prompt(offset, emitted=4 if offset < 30 else 2) for offset in range(60)]
    events += [make_drifted(offset=offset, changed_at=offset - 3, action="reset") for offset in (5, 12, 20, 33)]
    events.append(make_drifted(offset=40, changed_at=38, action="cooldown"))
    assert describe(tmp_path, events)[2:] == [
        f"Drift was acted upon 4 times, the last was: {make_drifted().description}.",
        "Tokens per target forward were 2.00 in the 20 prompts before the last change, at prompt 30, 1.00 from there "
        "until the drift was detected, and 1.00 in the last 20.",
    ]


def write_run(folder: Path, seconds: list[float], blocks: int = 5, text: str = "a text", first: int = 0) -> Path:
    """A run whose prompts have ten tokens and take these seconds."""
    events = [
        make_completed(
            number,
            prompt_id=f"p{first + number}",
            emitted=10,
            blocks=blocks,
            started=100.0 * number,
            finished=100.0 * number + took,
            completion_text=text if number else "the first text",
        )
        for number, took in enumerate(seconds)
    ]
    return write(folder, events)


def compare(*folders: Path) -> list[str]:
    with LogReader(folders) as log:
        return compare_runs(log, [folder.name for folder in folders])


def test_a_run_that_is_faster_on_every_prompt_is_reported_as_faster(tmp_path: Path):
    quick = write_run(tmp_path / "quick", [1.0, 2.0] * 6, blocks=4, text="another")
    slow = write_run(tmp_path / "slow", [*[2.0, 4.0] * 5, 2.0, 5.0])
    assert compare(quick, slow) == [
        "On the 12 prompts in common, quick was faster: 2.04 times as fast as slow (1.96 to 2.11, by prompts).",
        "Tokens per target forward there: 2.50 and 2.00; 1 of the 12 completions are the same text.",
    ]
    assert "slow was slower: 0.49 times as fast as quick (0.47 to 0.51" in compare(slow, quick)[0]


def test_a_difference_within_the_noise_is_reported_as_none(tmp_path: Path):
    one = write_run(tmp_path / "one", [1.0, 2.0] * 6)
    other = write_run(tmp_path / "other", [2.0, 1.0] * 6)
    assert compare(one, other)[0].startswith(
        "On the 12 prompts in common, neither run was clearly faster: one was 1.00 times as fast as other (0.66 to 1.5"
    )


def test_the_stream_compares_the_first_run_with_the_others(tmp_path: Path):
    folders = {name: write_run(tmp_path / name, [1.0] * 12) for name in ("b", "a", "c")}
    with LogReader(list(folders.values())) as log:
        found = read_stream(log, folders=folders)["compared"]
        alone = read_stream(log, folders={"a": folders["a"]})["compared"]
    assert [sentence.split("as fast as ")[1][0] for sentence in found[::2]] == ["a", "c"]
    assert alone == []
