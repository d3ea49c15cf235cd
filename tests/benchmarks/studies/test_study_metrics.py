"""The metrics of a study against hand-computed ones."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.studies.metrics import (
    Estimate,
    back_again,
    estimate,
    last_fifth,
    rates,
    ratio,
    segment_rates,
    switch,
    whole,
)
from benchmarks.studies.records import Alarm, Key, PromptCounts, Record


def make_passed(offset: int, *, judged: int = 20, accepted: int = 10, emitted: int | None = None) -> PromptCounts:
    """A prompt of ten blocks that ends a second after the one before it and takes half a second of the processor."""
    emitted = accepted + 10 if emitted is None else emitted
    return PromptCounts(offset, emitted, 10, judged + 5, judged, accepted, at=offset + 1.0, cpu=(offset + 1) / 2)


def record(accepted: Sequence[int], *, seed: int = 0, **others: Any) -> Record:
    """A run of one prompt per number: so many of its 20 judged tokens were accepted. Learning takes a last second."""
    fields: dict[str, Any] = {
        "key": Key("big", seed, "hybrid"),
        "passed": tuple(make_passed(offset, accepted=number) for offset, number in enumerate(accepted)),
        "alarms": (),
        "recalls": (),
        "segments": (0, len(accepted)),
        "seconds": len(accepted) + 1.0,
        "cpu_seconds": len(accepted) / 2 + 0.5,
        "learning": 1.0,
        "cache_bytes": 2048,
        "cache_entries": 7,
        "rejected": 0,
        "prompts": f"prompts of seed {seed}",
        "same_vocabulary": False,
        "machine": {"device": "a processor", "cores": 2, "threads": 1, "load": 0.5, "torch": "2.13"},
    }
    return Record(**{**fields, **others})


def fall(offset: int, action: str = "reset") -> Alarm:
    return Alarm(offset, action)


def test_the_rates_of_a_stream_are_those_of_its_counts():
    found = whole(record([10, 12, 14]))
    assert found.acceptance == 36 / 60
    assert found.block_efficiency == (36 + 30) / 30
    assert found.accepted_length == 36 / 30
    assert found.tokens_per_second == 66 / 4.0  # three prompts, and a second of learning after the last
    assert found.tokens_per_cpu_second == 66 / 2.0


def test_the_last_fifth_begins_when_the_prompt_before_it_was_completed():
    found = last_fifth(record([0] * 5 + [10, 20]))  # seven prompts: the last two
    assert found.acceptance == 30 / 40
    assert found.tokens_per_second == 50 / 3.0
    assert found.tokens_per_cpu_second == 50 / 1.5


def test_the_last_fifth_is_in_the_order_of_completion():
    one = record([0, 0, 0, 0, 20])
    turned = record([0, 0, 0, 0, 20], passed=one.passed[::-1])
    assert last_fifth(one).acceptance == 1.0
    assert last_fifth(turned).acceptance == 0.0


def test_a_single_prompt_is_its_own_last_fifth():
    assert last_fifth(record([5])) == whole(record([5]))


def test_what_was_not_measured_is_none():
    found = rates([], 0.0, 0.0)
    assert found.acceptance is found.block_efficiency is found.accepted_length is found.tokens_per_second is None
    assert whole(record([])).acceptance is None
    assert rates([make_passed(0, judged=0, accepted=0)], 1.0, 1.0).acceptance is None


def test_an_estimate_leaves_out_what_is_not_there():
    assert estimate([None, 0.5]) == Estimate(0.5, None, 1)
    assert estimate([None, None]) is None
    found = estimate([1.0, None, 2.0, 3.0])
    assert found == Estimate(2.0, pytest.approx(1 / 3**0.5), 3)


def test_a_ratio_is_paired_by_seed():
    own = [record([20], seed=0), record([10], seed=1), record([15], seed=2)]
    reference = [record([5], seed=1), record([10], seed=0)]  # in another order, and without the third
    found = ratio(own, reference, lambda one: whole(one).acceptance)
    assert found == Estimate(2.0, 0.0, 2)
    assert ratio(own, [], lambda one: whole(one).acceptance) is None
    assert ratio(own, [record([0], seed=0)], lambda one: whole(one).acceptance) is None  # nothing to divide by


#           before the switch        after it: a fall to .1, then a climb to .9
STREAM = [*[12] * 4, *[16] * 4, *[2, 2, 6, 6, 10, 10, 14, 14, 18, 18]]
SEGMENTS = (0, 8, 18)


def test_a_switch_is_described_by_windows():
    found = switch(record(STREAM, segments=SEGMENTS), window=2)
    assert found.before == 0.8
    assert found.deepest == 0.1
    assert found.drop == pytest.approx(0.7)
    assert found.relative_drop == pytest.approx(7 / 8)
    assert found.end == 0.9
    assert found.to_end == 10  # only the last window has .9 * .9 = .81
    assert found.to_before == 9  # (14 + 18) / 40 = .8, at least .72; (14 + 14) / 40 = .7 is not


def test_a_window_is_no_longer_than_the_segment():
    found = switch(record(STREAM, segments=SEGMENTS), window=50)
    assert found.before == sum(STREAM[:8]) / 160
    assert found.deepest == 0.5
    assert found.to_end is None
    assert found.to_before is None


def test_a_switch_is_measured_in_stream_order():
    one = record(STREAM, segments=SEGMENTS)
    turned = record(STREAM, segments=SEGMENTS, passed=one.passed[::-1])
    assert switch(one, window=3) == switch(turned, window=3)


def test_alarms_are_counted_before_and_after_the_switch():
    alarms = (fall(3), fall(12), fall(15, "cooldown"))
    found = switch(record(STREAM, segments=SEGMENTS, alarms=alarms, recalls=(3, 12)))
    assert (found.false_alarms, found.delay, found.alarms, found.recalls) == (1, 4, 2, 1)
    quiet = switch(record(STREAM, segments=SEGMENTS))
    assert (quiet.false_alarms, quiet.delay, quiet.alarms, quiet.recalls) == (0, None, 0, 0)


def test_an_alarm_on_the_first_prompt_of_the_other_source_is_not_false():
    assert switch(record(STREAM, segments=SEGMENTS, alarms=(fall(8),))).delay == 0


def test_the_third_segment_is_compared_with_the_end_of_the_first():
    levels = [[4] * 4 + [16], [2] * 4 + [10], [12] * 5, [8] * 4 + [14]]
    stream = [number for level in levels for number in level]
    alternating = record(stream, segments=(0, 5, 10, 15, 20))
    assert [segment_rates(alternating, number) for number in range(4)] == [
        (0.2, 0.8),
        (0.1, 0.5),
        (0.6, 0.6),
        (0.4, 0.7),
    ]
    assert back_again(alternating) == pytest.approx(0.6 / 0.8)
    assert back_again(record(STREAM, segments=SEGMENTS)) is None


def test_segments_share_no_prompt():
    from benchmarks.studies.metrics import segment

    one = record(STREAM, segments=SEGMENTS)
    parts = [[found.offset for found in segment(one, number)] for number in range(2)]
    assert [len(part) for part in parts] == [8, 10]
    assert all(second == first + 1 for first, second in pairwise([*parts[0], *parts[1]]))
