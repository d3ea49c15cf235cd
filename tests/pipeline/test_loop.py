"""The loop alone: in which order things happen, and that every stage sees the same rows in the same order."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest
from loop_doubles import Clock, prepare, prompts_of, runner_of, stub_loop, stub_runner

from pipeline.loop import Clock as RunClock
from pipeline.loop import Loop
from store.events import (
    BlockDone,
    Event,
    PromptCompleted,
    PromptReceived,
    PromptRejected,
    Recalled,
    TokenDecision,
    Updated,
    VersionPublished,
)


def kinds(events: Iterable[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def of_kind(events: Iterable[Event], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def stages_of(loop: Loop, name: str = "big") -> Any:
    return runner_of(loop, name).stages


def test_the_path_of_a_prompt():
    events = list(stub_loop(drifts={0: "recall"}).run(prompts_of("ab")))
    assert kinds(events) == [
        "VersionPublished",
        "PromptReceived",
        "TokenDecision",
        "BlockDone",
        "TokenDecision",
        "BlockDone",
        "PromptCompleted",
        "Drifted",
        "VersionPublished",
        "Recalled",
        "Updated",
        "VersionPublished",
        "VersionPublished",
    ]
    assert [event.reason for event in of_kind(events, VersionPublished)] == ["baseline", "drift", "interval", "end"]


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


@pytest.mark.parametrize(
    ("action", "answered"), [("reset", 1), ("recall", 1), ("none", 0), ("ignored", 0), ("cooldown", 0)]
)
def test_a_fall_that_is_acted_upon_is_answered_before_anything_learns_from_its_prompt(action: str, answered: int):
    loop = stub_loop(drifts={1: action})
    events = list(loop.run(prompts_of("a", "a", "a")))
    answer = runner_of(loop).learner._response
    assert answer.given == [(1, 1)] * answered, "the drafter had learned from prompt 0 alone"
    assert answer.noted == [(0, 0), (1, 1), (2, 2)], "every prompt, before it is learned from"
    assert [event.head_version for event in of_kind(events, Updated)] == [0, answered, answered]
    assert [event.reason for event in of_kind(events, VersionPublished)].count("drift") == answered


def test_a_block_begins_once_one_row_has_what_its_transforms_need():
    runner, futures = runner_of(stub_loop()), [Future[None](), Future[None]()]
    for offset, future in enumerate(futures):
        row = prepare(PromptReceived(offset, "", "", offset, "abc"))
        row.transforms = (Mock(is_slow=True, prepare=Mock(return_value=future)),)
        runner.admit_sequence(row)
    assert list(runner.step()) == []
    assert runner.stages.decode.calls == []
    futures[1].set_result(None)
    assert list(runner.step()) != []
    assert [row.sits_out for row in runner.stages.decode.order] == [True, False]


def test_prompts_are_read_only_when_a_row_is_free():
    read_offsets: list[int] = []

    def record_reads() -> Iterator[PromptReceived | PromptRejected]:
        for prompt in prompts_of(*["ab"] * 5):
            read_offsets.append(prompt.offset)  # type: ignore[union-attr]
            yield prompt

    events = stub_loop(batch=2).run(record_reads())
    next(event for event in events if isinstance(event, BlockDone))
    assert read_offsets == [0, 1]
    next(event for event in events if isinstance(event, PromptCompleted))
    assert read_offsets == [0, 1], "the finished row's decision to learn comes first"


def test_events_are_emitted_before_anything_learns_from_them():
    loop = stub_loop(drifts={0: "reset"})
    events = loop.run(prompts_of("a"))
    next(event for event in events if isinstance(event, PromptCompleted))
    distill, answer = runner_of(loop).learner.distill, runner_of(loop).learner._response
    assert (distill.drafter_version, answer.noted, answer.given) == (0, [], [])
    assert kinds([next(events), next(events)]) == ["Drifted", "VersionPublished"]
    assert (distill.drafter_version, answer.given) == (0, []), "the version is of what was in service before"


@pytest.mark.parametrize("stop", range(1, 12))
def test_a_run_broken_off_anywhere_can_still_publish_its_end(stop: int):
    loop = stub_loop(batch=2)
    events = loop.run(prompts_of("ab", "a", "abc"))
    seen = [next(events) for _ in range(stop)]
    events.close()
    last = list(loop.end())
    assert [event.reason for event in of_kind(last, VersionPublished)] == ["end"]
    completed = {event.offset for event in of_kind(seen, PromptCompleted)}
    distill = runner_of(loop).learner.distill
    assert distill.drafter_version <= len(completed), "nothing was learned from a prompt before its event"
    assert {*stages_of(loop).verify.released} == completed


def test_a_prompt_s_time_is_from_its_admission_to_its_end():
    """The clock ticks at every reading: at admission, before a block, after each of its stages and its records, and at
    the end.
    """
    (completed,) = of_kind(stub_loop().run(prompts_of("a")), PromptCompleted)
    assert (completed.started, completed.finished) == (1.0, 1.0 + 5 + 1)


def two_runners(batch: int, drifts: dict[str, dict[int, str]] | None = None) -> Loop:
    """Two targets that get prompts in turn."""
    clock = RunClock(Clock())
    runners = {name: stub_runner(clock, name, (drifts or {}).get(name)) for name in ("big", "small")}
    return Loop(runners, lambda offset: ("big", "small")[offset % 2], batch, clock)


def test_prompts_that_name_no_target_are_routed_in_turn_and_the_others_by_name():
    loop = two_runners(batch=3)
    prompts = [*prompts_of("a", "ab", "abc", "ab"), PromptReceived(4, "last", "lengths", 9, "a", "small")]
    events = list(loop.run(iter(prompts)))
    assert stages_of(loop, "big").decode.admitted == [0, 2]
    assert stages_of(loop, "small").decode.admitted == [1, 3, 4]
    targets = {event.offset: event.target for event in of_kind(events, PromptCompleted)}
    assert targets == {0: "big", 1: "small", 2: "big", 3: "small", 4: "small"}
    assert {(event.offset, event.target) for event in of_kind(events, TokenDecision)} == set(targets.items())
    assert {(event.offset, event.target) for event in of_kind(events, Updated)} == set(targets.items())


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
def test_the_batch_bounds_the_prompts_in_flight_of_all_runners_together(batch: int):
    lengths = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    loop = two_runners(batch)
    in_flight: set[int] = set()
    for event in loop.run(prompts_of(*("x" * length for length in lengths))):
        if isinstance(event, PromptReceived):
            in_flight.add(event.offset)
        if isinstance(event, PromptCompleted):
            in_flight.remove(event.offset)
        assert len(in_flight) <= batch
    for place, name in enumerate(("big", "small")):  # whose stages compared every call's rows with their own
        assert stages_of(loop, name).decode.admitted == list(range(place, len(lengths), 2))
        assert stages_of(loop, name).verify.order == []


def test_each_runner_has_a_baseline_first_and_an_end_last_and_its_own_versions_between():
    events = list(two_runners(batch=1).run(prompts_of("a", "a", "a")))
    versions = [(event.target, event.reason) for event in of_kind(events, VersionPublished)]
    assert versions[:2] == [("big", "baseline"), ("small", "baseline")]
    assert versions[2:5] == [("big", "interval"), ("small", "interval"), ("big", "interval")]
    assert versions[5:] == [("big", "end"), ("small", "end")]
    assert kinds(events)[:3] == ["VersionPublished", "VersionPublished", "PromptReceived"]


def test_a_drift_of_one_target_is_answered_there_alone():
    loop = two_runners(batch=1, drifts={"small": {1: "recall"}})
    events = list(loop.run(prompts_of("a", "a", "a", "a")))
    assert runner_of(loop, "big").learner._response.given == []
    assert runner_of(loop, "small").learner._response.given == [(1, 0)]
    assert [event.target for event in of_kind(events, Recalled)] == ["small"]
