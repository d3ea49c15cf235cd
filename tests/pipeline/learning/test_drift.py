"""The drift monitor: the changes of the acceptance rate that it detects, and the response that it chooses."""

from collections.abc import Iterable, Sequence
from random import Random
from statistics import fmean

import pytest
from constants import constants
from event_making import make_completed

from pipeline.config.sections import DriftSettings
from pipeline.learning.drift import DriftMonitor, Signal, change_point
from pipeline.learning.rank_detector import RankDetector
from store.events import Drifted

JUDGED = 60  # tokens of a prompt
BEFORE, AFTER = 150, 60  # prompts; ADWIN is slow to believe in a change


def monitor_of(*, signal: Signal = "judged", detector: str = "page-hinkley", **values: object) -> DriftMonitor:
    """A monitor with these settings, or constants of `drift`."""
    settings = {name: value for name, value in values.items() if name in DriftSettings.model_fields}
    with constants(**{f"drift_{name}": value for name, value in values.items() if name not in settings}):
        return DriftMonitor(DriftSettings(detector=detector, **settings), signal)


def noisy(rates: Iterable[float], seed: int = 0) -> list[int]:
    """Accepted tokens of prompts with these acceptance rates, each off by as much as the draws make it."""
    random = Random(seed)
    return [sum(random.random() < rate for _ in range(JUDGED)) for rate in rates]


def alarms(monitor: DriftMonitor, accepted: Sequence[int], begin: int = 0) -> list[Drifted]:
    prompts = (make_completed(begin + number, judged=JUDGED, accepted=one) for number, one in enumerate(accepted))
    return [event for event in map(monitor.observe, prompts) if event]


@pytest.mark.parametrize(("answer", "acted_upon"), [("recall", True), ("reset", True), ("none", False)])
def test_a_fall_is_answered_as_configured(answer: str, acted_upon: bool):
    (alarm,) = alarms(monitor_of(response=answer), noisy([0.8] * BEFORE + [0.3] * AFTER))
    assert (alarm.action, alarm.acted_upon) == (answer, acted_upon)


def test_the_change_is_placed_at_the_prompt_with_which_it_began():
    """Far enough in that the alarm comes later; prompts with nothing judged have no rate, and offsets may have gaps."""
    monitor, accepted = monitor_of(), noisy([0.8] * BEFORE + [0.3] * AFTER)
    prompts = [make_completed(3 * n, judged=JUDGED, accepted=one, target="small") for n, one in enumerate(accepted)]
    prompts.insert(BEFORE, make_completed(3 * BEFORE - 1, judged=0, accepted=0))
    (alarm,) = [event for event in map(monitor.observe, prompts) if event]
    assert alarm.changed_at == 3 * BEFORE < alarm.offset
    assert alarm.target == "small"


def test_when_prompts_finish_out_of_order_the_change_is_at_the_lowest_offset_after_it():
    monitor, accepted = monitor_of(), noisy([0.9] * BEFORE + [0.2] * AFTER)
    offsets = [*range(BEFORE), *(n ^ 1 for n in range(BEFORE, BEFORE + AFTER))]  # in pairs, the later one first
    prompts = [
        make_completed(offset, judged=JUDGED, accepted=one) for offset, one in zip(offsets, accepted, strict=True)
    ]
    (alarm,) = [event for event in map(monitor.observe, prompts) if event]
    assert alarm.changed_at == BEFORE


@pytest.mark.parametrize("detector", ["adwin", "page-hinkley", "ranks"])
def test_a_fall_is_acted_upon_soon_after_it_happened(detector: str):
    (alarm,) = alarms(monitor_of(detector=detector), noisy([0.8] * BEFORE + [0.3] * AFTER))
    assert (alarm.direction, alarm.action, alarm.detector, alarm.dataset) == ("fall", "recall", detector, "docs")
    assert BEFORE <= alarm.offset < BEFORE + 45


def test_a_rise_is_reported_and_ignored():
    (alarm,) = alarms(monitor_of(detector="adwin"), noisy([0.3] * BEFORE + [0.8] * AFTER))
    assert (alarm.direction, alarm.action) == ("rise", "ignored")
    assert alarm.rate_before < alarm.rate_after


def test_a_second_fall_within_the_cooldown_is_not_acted_upon():
    accepted = noisy([0.9] * BEFORE + [0.5] * AFTER + [0.1] * AFTER)
    first, *others = alarms(monitor_of(cooldown=150), accepted)
    assert first.action == "recall"
    assert [event.action for event in others] == ["cooldown"]


def test_prompts_with_nothing_judged_are_skipped_and_do_no_harm():
    """A NaN or a zero in their place would blind the detector or alarm it."""
    monitor = monitor_of()
    assert alarms(monitor, noisy([0.8] * BEFORE)) == []
    assert all(monitor.observe(make_completed(BEFORE + number, judged=0, accepted=0)) is None for number in range(50))
    assert alarms(monitor, noisy([0.8] * 30, seed=1), begin=BEFORE + 50) == []
    (alarm,) = alarms(monitor, noisy([0.3] * AFTER, seed=2), begin=BEFORE + 80)
    assert (alarm.direction, alarm.action) == ("fall", "recall")


def test_the_first_position_alone_can_be_monitored():
    """Later positions fall, as they do when drafts get longer; the first one stays: no drift."""
    random = Random(3)
    prompts = [
        make_completed(
            number,
            judged=JUDGED,
            accepted=48 if number < BEFORE else 20,
            first_judged=20,
            first_accepted=random.randint(13, 17),
        )
        for number in range(BEFORE + AFTER)
    ]
    assert [event for event in map(monitor_of(signal="first").observe, prompts) if event] == []
    assert [event.action for event in map(monitor_of().observe, prompts) if event] == ["recall"]


def test_no_detector_sees_nothing():
    assert alarms(monitor_of(detector="none"), [JUDGED] * 100 + [0] * 100) == []


@pytest.mark.parametrize("signal", ["judged", "first"])
@pytest.mark.parametrize("seed", range(3))
def test_a_stationary_stream_of_unlike_prompts_is_no_drift(seed: int, signal: Signal):
    """Prompts differ in difficulty and length, as they do in real streams; the mixture does not change."""
    random = Random(seed)
    prompts = []
    for number in range(600):
        rate, judged = random.betavariate(6, 4), random.choice([8, 20, 60])
        accepted = sum(random.random() < rate for _ in range(judged))
        prompts.append(make_completed(number, judged=judged, accepted=accepted))
    assert fmean(prompt.accepted / prompt.judged for prompt in prompts) == pytest.approx(0.6, abs=0.03)
    monitor = monitor_of(signal=signal)
    assert [event for event in map(monitor.observe, prompts) if event] == []


@pytest.mark.parametrize("detector", ["adwin", "page-hinkley"])
def test_the_grace_period_is_kept(detector: str):
    falling = [JUDGED] * 40 + [0] * 60
    (early,) = alarms(monitor_of(detector=detector, grace=5), falling)
    (late,) = alarms(monitor_of(detector=detector, grace=90), falling)
    assert 40 <= early.offset < 89 <= late.offset


@pytest.mark.parametrize(
    ("rates", "place"),
    [
        ([0.9, 0.1], 1),
        ([0.1, 0.9], 1),
        ([0.8, 0.7, 0.9, 0.2, 0.3], 3),
        ([0.2] * 30 + [0.6] * 10, 30),
        ([0.8] * 10 + [0.1] + [0.8] * 10 + [0.3] * 10, 21),  # one bad prompt is no change
        ([0.5] * 4, 1),
    ],
)
def test_the_change_is_where_the_sides_differ_most(rates: list[float], place: int):
    assert change_point(rates) == place


def test_a_fall_is_found_after_a_larger_rise():
    assert change_point([0.1, 0.8, 0.9, 0.8, 0.9, 0.3, 0.4], falls_only=True) == 5


def test_a_fall_after_a_long_rise_is_a_fall():
    """While the drafter learns the rate climbs for hundreds of prompts; the last of them decide, not the first."""
    climbing = [0.2 + 0.3 * number / 300 for number in range(300)]
    found = alarms(monitor_of(), noisy([*climbing, *[0.15] * 20]))
    assert [event.action for event in found] == ["recall"]
    assert 300 <= found[0].offset < 320


def test_one_alarm_per_change():
    """What came before a change is forgotten with it, so that it cannot raise the alarm again."""
    levels = [0.9, 0.5, 0.9, 0.5]
    found = alarms(monitor_of(detector="adwin", cooldown=0), noisy(level for level in levels for _ in range(100)))
    assert [event.direction for event in found] == ["fall", "rise", "fall"]
    for event, before, after in zip(found, levels[:-1], levels[1:], strict=True):
        assert (event.rate_before, event.rate_after) == (pytest.approx(before, abs=0.06), pytest.approx(after, abs=0.1))


# The detector with a stated time between false alarms.


@pytest.mark.parametrize("interval", [30, 100])
def test_false_alarms_of_ranks_are_as_rare_as_stated(interval: int):
    """Whatever the distribution, equal values included: prompts of eight tokens have few different shares."""
    for draw in (lambda random: random.gauss(0, 1), lambda random: float(random.randint(0, 8)), Random.random):
        random, found, detector = Random(5), 0, RankDetector(interval, grace=10)
        for _ in range(6000):
            detector.update(draw(random))
            if detector.drift_detected:
                found, detector = found + 1, RankDetector(interval, grace=10)
        assert found <= 6000 / interval


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("before", [36, 150])
def test_other_tokens_raise_an_alarm_within_ten_prompts_by_ranks(seed: int, before: int):
    """As measured on SmolLM2: frequencies climb over word problems, fall with the first code and climb at once."""
    random, monitor, found = Random(seed), monitor_of(detector="ranks", signal="frequency"), []
    for number in range(before + 20):
        since = number - before
        mean = -5.7 - 1.2 * 0.9**number if since < 0 else -6.3 - 1.1 * 0.95**since
        prompt = make_completed(number, judged=0, emitted=48, frequency=random.gauss(mean, 0.35))
        found += [event for event in [monitor.observe(prompt)] if event]
    assert [(event.direction, event.action, event.signal) for event in found] == [("fall", "recall", "frequency")]
    assert before <= found[0].offset < before + 10
    assert abs(found[0].changed_at - before) <= 2
