"""The drift monitor: the changes of the acceptance rate that it detects, and the response that it chooses."""

from collections.abc import Iterable, Sequence
from random import Random
from statistics import fmean

import pytest
from constants import constants
from event_making import make_completed

from pipeline.config.sections import DriftSettings
from pipeline.learning.drift import DriftMonitor, change_point
from stages.drafting.sources import TRIED_PROMPTS
from stages.sampling.random_source import is_sampled
from store.events import Drifted

JUDGED = 60  # tokens of a prompt
BEFORE, AFTER = 150, 60  # prompts


def monitor_of(**values: object) -> DriftMonitor:
    """A monitor with these settings, or constants of `drift`."""
    settings = {name: value for name, value in values.items() if name in DriftSettings.model_fields}
    with constants(**{f"drift_{name}": value for name, value in values.items() if name not in settings}):
        return DriftMonitor(DriftSettings(**settings))


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


@pytest.mark.parametrize("seed", range(10))
def test_a_fall_is_acted_upon_within_twelve_prompts(seed: int):
    (alarm,) = alarms(monitor_of(), noisy([0.7] * BEFORE + [0.3] * AFTER, seed))
    assert (alarm.action, alarm.detector, alarm.dataset) == ("recall", "page-hinkley", "docs")
    assert BEFORE <= alarm.offset < BEFORE + 12


def test_the_description_says_what_happened_and_what_follows():
    (alarm,) = alarms(monitor_of(response="reset"), [48] * BEFORE + [12] * AFTER)
    fall = f"acceptance fell from 0.80 to 0.20 at prompt {BEFORE}"
    assert alarm.description == f"drift at prompt {alarm.offset} (docs): {fall}; the acceptance head is reset"


def test_a_rise_is_no_drift():
    assert alarms(monitor_of(), noisy([0.3] * BEFORE + [0.8] * AFTER)) == []


def test_a_second_fall_within_the_cooldown_is_not_acted_upon():
    accepted = noisy([0.9] * BEFORE + [0.5] * AFTER + [0.1] * AFTER)
    first, *others = alarms(monitor_of(cooldown=150), accepted)
    assert first.action == "recall"
    assert [event.action for event in others] == ["cooldown"]
    assert others[0].rate_before == pytest.approx(0.5, abs=0.05), "of the rates since the first fall"


def test_prompts_with_nothing_judged_are_skipped_and_do_no_harm():
    """A NaN or a zero in their place would blind the detector or alarm it."""
    monitor = monitor_of()
    assert alarms(monitor, noisy([0.8] * BEFORE)) == []
    assert all(monitor.observe(make_completed(BEFORE + number, judged=0, accepted=0)) is None for number in range(50))
    assert alarms(monitor, noisy([0.8] * 30, seed=1), begin=BEFORE + 50) == []
    (alarm,) = alarms(monitor, noisy([0.3] * AFTER, seed=2), begin=BEFORE + 80)
    assert alarm.action == "recall"


def test_rates_of_few_tokens_hardly_count():
    """One token of a prompt says less than thirty."""
    monitor = monitor_of()
    assert alarms(monitor, noisy([0.7] * BEFORE)) == []
    single = [make_completed(BEFORE + number, judged=1, accepted=0) for number in range(4)]
    assert [event for event in map(monitor.observe, single) if event] == []
    (alarm,) = alarms(monitor, [2, 2], begin=BEFORE + 4)
    assert (alarm.rate_before, alarm.rate_after) == (pytest.approx(0.7, abs=0.03), pytest.approx(0.03, abs=0.01))


@pytest.mark.parametrize("seed", range(10))
def test_a_fall_is_noticed_where_the_model_drafts_in_trials_alone(seed: int):
    """Four trials in every second prompt, of some ten tokens in a text that the drafter knows and five in another."""
    random, monitor, found = Random(seed), monitor_of(), []
    for offset in range(60):
        rate, judged = (0.7, 10) if offset < 48 else (0.1, 5)
        if is_sampled(offset + seed, TRIED_PROMPTS):
            accepted = sum(random.random() < rate for _ in range(judged))
            found.append(monitor.observe(make_completed(offset, judged=judged, accepted=accepted)))
    alarm, *_ = filter(None, found)
    assert 48 <= alarm.offset < 60


def test_no_detector_sees_nothing():
    assert alarms(monitor_of(detector="none"), [JUDGED] * 100 + [0] * 100) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_stationary_stream_of_unlike_prompts_is_no_drift(seed: int):
    """Prompts differ in difficulty and length, as they do in real streams; the mixture does not change."""
    random = Random(seed)
    prompts = []
    for number in range(600):
        rate, judged = random.betavariate(6, 4), random.choice([8, 20, 60])
        accepted = sum(random.random() < rate for _ in range(judged))
        prompts.append(make_completed(number, judged=judged, accepted=accepted))
    assert fmean(prompt.accepted / prompt.judged for prompt in prompts) == pytest.approx(0.6, abs=0.03)
    monitor = monitor_of()
    assert [event for event in map(monitor.observe, prompts) if event] == []


def test_the_grace_period_is_kept():
    falling = [JUDGED] * 40 + [0] * 60
    (early,) = alarms(monitor_of(grace=5), falling)
    (late,) = alarms(monitor_of(grace=90), falling)
    assert 40 <= early.offset < 89 <= late.offset


@pytest.mark.parametrize(
    ("rates", "place"),
    [
        ([0.9, 0.1], 1),
        ([0.1, 0.9], 1),  # no fall
        ([0.8, 0.7, 0.9, 0.2, 0.3], 3),
        ([0.2] * 30 + [0.6] * 10, 39),
        ([0.8] * 10 + [0.1] + [0.8] * 10 + [0.3] * 10, 21),  # one bad prompt is no change
        ([0.5] * 4, 3),
    ],
)
def test_the_change_is_where_the_sides_differ_most_and_the_second_is_lower(rates: list[float], place: int):
    assert change_point(rates) == place


def test_a_fall_is_found_after_a_larger_rise():
    assert change_point([0.1, 0.8, 0.9, 0.8, 0.9, 0.3, 0.4]) == 5


def test_a_fall_after_a_long_rise_is_a_fall():
    """While the drafter learns the rate climbs for hundreds of prompts; the last of them decide, not the first."""
    climbing = [0.2 + 0.4 * number / 300 for number in range(300)]
    found = alarms(monitor_of(), noisy([*climbing, *[0.1] * 20]))
    assert [event.action for event in found] == ["recall"]
    assert 300 <= found[0].offset < 320


def test_one_alarm_per_change():
    """What came before a change is forgotten with it, so that it cannot raise the alarm again."""
    levels = [0.9, 0.5, 0.9, 0.5]
    found = alarms(monitor_of(cooldown=0), noisy(level for level in levels for _ in range(100)))
    assert [event.offset // 100 for event in found] == [1, 3]
    for event in found:
        assert (event.rate_before, event.rate_after) == (pytest.approx(0.9, abs=0.3), pytest.approx(0.5, abs=0.1))
