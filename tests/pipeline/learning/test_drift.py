"""The drift monitor: the changes of the acceptance rate that it detects, and the response that it chooses."""

from collections.abc import Iterable, Sequence
from random import Random
from statistics import fmean

import pytest
from constants import constants
from event_making import make_completed

from pipeline.config.sections import DriftSettings
from pipeline.learning.drift import DriftMonitor, Rates, Signal, change_point, make_detector
from pipeline.learning.rank_detector import RankDetector
from store.events import Drifted, PromptCompleted

JUDGED = 60  # tokens of a prompt
BEFORE, AFTER = 150, 60  # prompts; ADWIN is slow to believe in a change


def monitor_of(*, signal: Signal = "judged", **values: object) -> DriftMonitor:
    """A monitor with these settings, or constants of `drift`."""
    settings = {name: value for name, value in values.items() if name in DriftSettings.model_fields}
    with constants(**{f"drift_{name}": value for name, value in values.items() if name not in settings}):
        return DriftMonitor(DriftSettings(**settings), (signal,))


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


@pytest.mark.parametrize("detector", ["adwin", "page-hinkley", "fall", "ranks"])
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


def make_prompts(shares: Iterable[float], seed: int) -> list[PromptCompleted]:
    """Prompts of 64 tokens with these shares of drafted tokens and nothing judged of the model."""
    random = Random(seed)
    blocks = [sum(random.random() >= share for _ in range(64)) for share in shares]
    return [make_completed(n, judged=0, accepted=0, emitted=64, blocks=max(1, one)) for n, one in enumerate(blocks)]


@pytest.mark.parametrize("seed", range(5))
def test_a_fall_of_the_drafted_share_is_seen_within_ten_prompts_without_drafts_of_the_model(seed: int):
    """Shares as measured on SmolLM2: they climb with the memory over word problems, and fall where code begins."""
    climbing = [0.30 + 0.15 * min(1, number / 40) for number in range(60)]
    found = [
        event
        for event in map(monitor_of(signal="drafted").observe, make_prompts([*climbing, *[0.28] * 15], seed))
        if event
    ]
    assert [(event.direction, event.action) for event in found] == [("fall", "recall")]
    assert 60 <= found[0].offset < 70
    assert found[0].rate_before > 0.35 > found[0].rate_after


def test_a_thousand_prompts_of_one_kind_raise_no_alarm():
    prompts = make_prompts([0.4] * 1000, seed=7)
    assert [event for event in map(monitor_of(signal="drafted").observe, prompts) if event] == []


@pytest.mark.parametrize("seed", range(5))
def test_a_change_of_what_the_memory_predicts_is_seen_though_drafts_are_accepted_as_before(seed: int):
    """Shares as measured on SmolLM2: questions, then code."""
    random, found = Random(seed), []
    monitor = DriftMonitor(DriftSettings(), ("drafted", "predicted"))
    for number in range(60):
        share = 0.2 + 0.1 * min(1, number / 10) if number < 36 else 0.1
        predicted = sum(random.random() < share for _ in range(48))
        prompt = make_completed(number, judged=0, emitted=48, blocks=random.randint(20, 26), predicted=predicted)
        found += [event for event in [monitor.observe(prompt)] if event]
    assert [(event.direction, event.signal) for event in found[:1]] == [("fall", "predicted")]
    assert 34 <= found[0].changed_at <= found[0].offset < 46


def code_after_questions(seed: int) -> list[PromptCompleted]:
    """Prompts of 48 tokens as measured on SmolLM2: in the code, text of its own makes up for what was learned."""
    random = Random(seed)
    shares = [(0.20, 0.25 * min(1, number / 8)) for number in range(36)] + [(0.33, 0.07)] * 10
    found = []
    for number, (own, learned) in enumerate(shares):
        copied = sum(random.random() < own for _ in range(48))
        blocks = sum(random.random() >= learned for _ in range(48 - copied))
        found.append(make_completed(number, judged=0, emitted=48, blocks=max(1, blocks), own_accepted=copied))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_change_of_what_was_learned_is_seen_despite_copies_of_own_text(seed: int):
    monitor = DriftMonitor(DriftSettings(), ("drafted", "learned"))
    found = [event for event in map(monitor.observe, code_after_questions(seed)) if event]
    assert [(event.direction, event.signal) for event in found] == [("fall", "learned")]
    assert 36 <= found[0].changed_at <= found[0].offset < 46


def test_one_alarm_restarts_every_signal():
    """Tokens fall in both signals: one event, and the later prompts of the same kind raise no other."""
    prompts = [make_completed(n, judged=0, emitted=64, blocks=32 + n % 3) for n in range(40)]
    prompts += [make_completed(n, judged=0, emitted=64, blocks=60 + n % 3) for n in range(40, 80)]
    monitor = DriftMonitor(DriftSettings(), ("drafted", "learned"))
    assert [event.changed_at for event in map(monitor.observe, prompts) if event] == [40]


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


@pytest.mark.parametrize("detector", ["adwin", "page-hinkley", "fall"])
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


@pytest.mark.constants(drift_alarm_interval=100)
def test_several_signals_share_the_false_alarms():
    settings = DriftSettings(detector="ranks")
    one, three = make_detector(settings), make_detector(settings, signals=3)
    for detector in (one, three):
        for value in (*range(30), -1.0, -2.0):
            detector.update(float(value))
    assert (one.drift_detected, three.drift_detected) == (True, False)


def test_what_is_copied_from_a_prompt_s_own_text_is_no_learned_token():
    rates = Rates("learned")
    assert rates.read(make_completed(0, emitted=30, blocks=10, own_accepted=10)) == 0.5
    assert rates.read(make_completed(0, emitted=30, blocks=20, own_accepted=10)) == 0
    assert rates.read(make_completed(0, emitted=30, blocks=4, own_accepted=23)) is None, "too few others"
