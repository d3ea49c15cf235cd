"""The loop alone: in which order things happen, and that every stage sees the same rows in the same order."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from loop_doubles import OVERLONG, StubPublisher, prompts_of, stub_loop

from pipeline.loop import Loop
from pipeline.publish import NoPublisher
from store.events import (
    BlockDone,
    Event,
    PromptCompleted,
    PromptReceived,
    PromptRejected,
    TokenDecision,
    Updated,
    VersionPublished,
)


def kinds(events: Iterable[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def of_kind(events: Iterable[Event], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def stages_of(loop: Loop) -> Any:
    return loop._stages


def test_the_path_of_a_prompt():
    events = list(stub_loop(drifts={0: "reset"}).run(prompts_of("ab")))
    assert kinds(events) == [
        "VersionPublished",
        "PromptReceived",
        "TokenDecision",
        "BlockDone",
        "TokenDecision",
        "BlockDone",
        "PromptCompleted",
        "Drifted",
        "Updated",
        "VersionPublished",
        "VersionPublished",
    ]
    assert [event.reason for event in of_kind(events, VersionPublished)] == ["floor", "drift", "end"]


def test_an_empty_stream_is_a_floor_and_an_end():
    loop = stub_loop()
    assert kinds(loop.run(prompts_of())) == ["VersionPublished"] * 2
    assert stages_of(loop).decode.calls == []


def test_a_publisher_that_publishes_nothing_leaves_no_trace():
    events = list(stub_loop(publisher=NoPublisher()).run(prompts_of("a")))
    assert of_kind(events, VersionPublished) == []
    assert kinds(events)[0] == "PromptReceived"


def test_as_one_prompt_finishes_the_next_enters():
    """Offsets 0 to 4 need 1, 3, 2, 1 and 2 blocks."""
    loop = stub_loop(batch=3)
    list(loop.run(prompts_of("a", "abc", "ab", "a", "ab")))
    # Row 2 takes the place of row 0, and row 3 enters behind; then rows 2 and 3 finish together, and so on.
    assert stages_of(loop).decode.calls == [(0, 1, 2), (2, 1, 3), (1, 4), (4,)]


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
def test_every_stage_sees_the_same_rows_in_the_same_order(batch: int):
    lengths = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    loop = stub_loop(batch=batch)
    events = list(loop.run(prompts_of(*("x" * length for length in lengths))))
    stages = stages_of(loop)  # each of them compared every call's rows with those it had been given
    for stage in stages.all():
        assert stage.admitted == list(range(len(lengths))), "once each, in stream order"
        assert sorted(stage.released) == list(range(len(lengths))), "once each"
        assert stage.released == stages.decode.released
        assert stage.order == []
    assert stages.verify.calls == stages.decode.calls
    assert stages.translate.calls == [call for call in stages.decode.calls for _ in ("call", "observe")]
    assert max(map(len, stages.decode.calls)) == min(batch, len(lengths))
    completed = {event.offset: event for event in of_kind(events, PromptCompleted)}
    assert [completed[offset].blocks for offset in range(len(lengths))] == lengths


@pytest.mark.parametrize("batch", [1, 3])
def test_decisions_come_before_their_block_and_all_of_them_before_the_completion(batch: int):
    events = list(stub_loop(batch=batch).run(prompts_of("ab", "a", "abc")))
    for offset, blocks in enumerate((2, 1, 3)):
        mine = [event for event in events if getattr(event, "offset", None) == offset]
        mine = [event for event in mine if isinstance(event, TokenDecision | BlockDone | PromptCompleted)]
        assert kinds(mine) == ["TokenDecision", "BlockDone"] * blocks + ["PromptCompleted"]
        assert [event.block for event in mine[:-1]] == [number for number in range(blocks) for _ in "dB"]
        assert [event.position for event in of_kind(mine, TokenDecision)] == list(range(blocks))


def test_a_block_carries_the_versions_that_were_in_service_when_it_began():
    """The cache changes with every block and the drafter with every prompt, but no decision knows of it too early."""
    events = list(stub_loop().run(prompts_of("ab", "ab")))
    decisions = of_kind(events, TokenDecision)
    assert [decision.cache_version for decision in decisions] == [0, 1, 2, 3]
    assert [decision.drafter_version for decision in decisions] == [0, 0, 1, 1]
    assert [event.drafter_version for event in of_kind(events, PromptCompleted)] == [0, 1]
    assert [event.drafter_version for event in of_kind(events, Updated)] == [1, 2]


def test_rows_of_one_block_share_its_versions_and_its_time():
    events = list(stub_loop(batch=2).run(prompts_of("a", "a")))
    first, second = of_kind(events, BlockDone)
    assert (first.rows, second.rows) == (2, 2)
    assert {first.seconds_decode, first.seconds_translate, first.seconds_verify} == {0.5}  # the clock ticks seconds
    assert {decision.cache_version for decision in of_kind(events, TokenDecision)} == {0}


@pytest.mark.parametrize(("action", "resets"), [("reset", [1]), ("ignored", []), ("cooldown", [])])
def test_only_a_reset_resets_the_head_and_does_so_before_learning(action: str, resets: list[int]):
    loop = stub_loop(drifts={1: action})
    events = list(loop.run(prompts_of("a", "a", "a")))
    assert stages_of(loop).distill.resets == resets, "the drafter had learned from prompt 0 alone"
    assert [event.head_version for event in of_kind(events, Updated)] == [0, len(resets), len(resets)]


def test_prompts_that_cannot_be_taken_pass_by():
    loop = stub_loop(batch=2)
    events = list(loop.run(prompts_of(None, "a", OVERLONG, "ab", None)))
    rejected = of_kind(events, PromptRejected)
    assert sorted((event.line, event.reason) for event in rejected) == [
        (1, "no text"),
        (3, "it is too long"),
        (5, "no text"),
    ]
    assert [event.offset for event in of_kind(events, PromptCompleted)] == [0, 2]
    assert stages_of(loop).decode.admitted == [0, 2]


def test_prompts_are_asked_for_only_when_there_is_room():
    asked: list[int] = []

    def watched() -> Iterator[PromptReceived | PromptRejected]:
        for prompt in prompts_of(*["ab"] * 5):
            asked.append(prompt.offset)  # type: ignore[union-attr]
            yield prompt

    events = stub_loop(batch=2).run(watched())
    next(event for event in events if isinstance(event, BlockDone))
    assert asked == [0, 1]
    next(event for event in events if isinstance(event, PromptCompleted))
    assert asked == [0, 1], "the finished row's decision to learn comes first"


def test_what_happened_is_told_before_anything_learns_from_it():
    loop = stub_loop(drifts={0: "reset"})
    events = loop.run(prompts_of("a"))
    next(event for event in events if isinstance(event, PromptCompleted))
    distill = stages_of(loop).distill
    assert (distill.drafter_version, distill.resets) == (0, [])
    assert kinds([next(events)]) == ["Drifted"]
    assert (distill.drafter_version, distill.resets) == (0, [])


@pytest.mark.parametrize("stop", range(1, 12))
def test_a_run_broken_off_anywhere_can_still_publish_its_end(stop: int):
    loop = stub_loop(batch=2)
    events = loop.run(prompts_of("ab", "a", "abc"))
    seen = [next(events) for _ in range(stop)]
    events.close()
    last = list(loop.end())
    assert [event.reason for event in of_kind(last, VersionPublished)] == ["end"]
    completed = {event.offset for event in of_kind(seen, PromptCompleted)}
    distill = stages_of(loop).distill
    assert distill.drafter_version <= len(completed), "nothing was learned from a prompt that was not told"
    assert {*stages_of(loop).verify.released} == completed


def test_times_count_from_the_loop_s_making():
    (completed,) = of_kind(stub_loop(publisher=StubPublisher()).run(prompts_of("a")), PromptCompleted)
    assert 0 < completed.started < completed.finished < 20  # the clock began at a hundred
