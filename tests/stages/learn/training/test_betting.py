"""Evidence from bets: rare without an effect at any time, and soon there with one."""

from collections.abc import Callable
from random import Random

import pytest
from stored_states import store

from stages.learn.training.betting import BettingTest, SumTest

STREAMS, LENGTH = 400, 250
NULLS: dict[str, Callable[[Random], float]] = {
    "all or nothing": lambda random: float(random.random() < 0.2),
    "spread": lambda random: random.betavariate(0.4, 1.6),
    "constant": lambda random: 0.2,
    "mostly nothing": lambda random: random.random() if random.random() < 0.4 else 0.0,
}


def count_values(test: BettingTest, draw: Callable[[], float], threshold: float, most: int) -> int | None:
    """Count the values until the evidence is decisive; None if it never is."""
    for number in range(1, most + 1):
        test.observe(draw(), threshold)
        if test.decisive:
            return number
    return None


@pytest.mark.parametrize("draw", NULLS.values(), ids=list(NULLS))
def test_under_the_hypothesis_decisive_evidence_is_rarer_than_one_in_twenty(draw: Callable[[Random], float]):
    random = Random(5)
    found = [count_values(BettingTest(0.0), lambda: draw(random), 0.2, LENGTH) for _ in range(STREAMS)]
    assert sum(number is not None for number in found) < STREAMS / 20


def test_the_hypothesis_may_have_another_threshold_for_every_value():
    """Each threshold is the chance of its value."""
    random, decisive = Random(6), 0
    for _ in range(STREAMS):
        test = BettingTest(0.0)
        for _ in range(LENGTH):
            threshold = random.uniform(0.05, 0.5)
            test.observe(float(random.random() < threshold), threshold)
            if test.decisive:
                decisive += 1
                break
    assert decisive < STREAMS / 20


@pytest.mark.parametrize(("chance", "most"), [(0.8, 12), (0.5, 40), (0.35, 150)])
def test_an_effect_is_found_within_few_values(chance: float, most: int):
    random = Random(7)
    found = [count_values(BettingTest(0.0), lambda: float(random.random() < chance), 0.2, most) for _ in range(100)]
    assert sum(number is not None for number in found) > 90


def test_an_effect_below_zero_is_found_by_values_with_the_other_sign():
    random = Random(8)
    found = [count_values(BettingTest(-1.0), lambda: -0.02 * random.random(), -0.25, 30) for _ in range(50)]
    assert None not in found


def test_a_change_is_detected_after_a_long_past():
    test, random = BettingTest(0.0), Random(9)
    for _ in range(2000):
        test.observe(float(random.random() < 0.05), 0.2)
    assert not test.decisive
    assert (count_values(test, lambda: float(random.random() < 0.7), 0.2, 60) or 99) <= 40


def test_a_restored_test_continues_with_the_same_evidence():
    test, random = BettingTest(0.0), Random(10)
    for _ in range(20):
        test.observe(random.random(), 0.4)
    state = store(test.state_dict())
    restored = BettingTest(0.0)
    restored.load_state_dict(state)
    for one in (test, restored):
        one.observe(0.9, 0.3)
    assert restored.evidence == test.evidence


# Sums of differences.

DIFFERENCES: dict[str, Callable[[Random], float]] = {
    "signs": lambda random: random.choice((-1.0, 1.0)),
    "mostly none": lambda random: random.choice((-1.0, 0.0, 0.0, 0.0, 1.0)),
    "spread": lambda random: random.uniform(-1, 1),
}


def count_prompts(draw: Callable[[], float], most: int, tokens: int = 48) -> int | None:
    """Count the prompts until their differences are decisive; None if they never are."""
    test = SumTest()
    for number in range(1, most + 1):
        test.observe(sum(draw() for _ in range(tokens)), tokens)
        if test.decisive:
            return number
    return None


@pytest.mark.parametrize("draw", DIFFERENCES.values(), ids=list(DIFFERENCES))
def test_differences_of_none_on_average_are_decisive_in_less_than_one_stream_in_twenty(draw: Callable[[Random], float]):
    random = Random(7)
    found = [count_prompts(lambda: draw(random), 32) for _ in range(STREAMS)]
    assert sum(number is not None for number in found) < STREAMS / 20


@pytest.mark.parametrize(("gained", "lost", "most"), [(0.45, 0.05, 3), (0.3, 0.1, 8), (0.2, 0.1, 30)])
def test_a_better_drafter_is_proven_within_some_prompts(gained: float, lost: float, most: int):
    random = Random(8)

    def draw() -> float:
        value = random.random()
        return 1.0 if value < gained else -1.0 if value < gained + lost else 0.0

    found = [count_prompts(draw, most) for _ in range(40)]
    assert sum(number is not None for number in found) >= 36
