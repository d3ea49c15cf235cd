"""Rates with intervals: of acceptance by its definition, of the probe compared with resampling of its prompts."""

import random
from math import sqrt
from statistics import quantiles, stdev

import pytest
from event_making import make_completed

from store.query.rates import Acceptance, Z, estimate_difference, estimate_ratio


@pytest.mark.parametrize(("accepted", "judged"), [(1, 3), (30, 40), (999, 1000), (0, 7), (5, 5)])
def test_the_interval_ends_at_the_extreme_rates_that_the_count_does_not_reject(accepted: int, judged: int):
    found = Acceptance(accepted, judged)
    low, high = found.interval or (0.0, 0.0)
    assert found.rate is not None
    assert 0 <= low <= found.rate <= high <= 1
    for end in (low, high):
        if end not in (0, 1):
            assert abs(found.rate - end) == pytest.approx(Z * sqrt(end * (1 - end) / judged), abs=1e-12)


def test_without_judged_tokens_there_is_no_rate():
    assert (Acceptance().rate, Acceptance().interval) == (None, None)


def test_prompts_are_weighted_by_their_judged_tokens():
    prompts = [make_completed(0, judged=10, accepted=1), make_completed(1, judged=90, accepted=89)]
    assert Acceptance.sum_over(prompts) == Acceptance(90, 100)


PROMPTS = random.Random(1).choices(range(20, 33), k=24)
FIRST = [random.Random(n).randint(2, 10) for n in range(24)]
SECOND = [part + random.Random(n).randint(0, 3) for n, part in enumerate(FIRST)]


def resample(seed: int) -> list[int]:
    return random.Random(seed).choices(range(24), k=24)


def test_the_interval_of_a_rate_is_as_wide_as_that_of_resampling():
    found = estimate_ratio(FIRST, PROMPTS)
    assert found
    drawn = [sum(FIRST[n] for n in picks) / sum(PROMPTS[n] for n in picks) for picks in map(resample, range(4000))]
    assert found.value == sum(FIRST) / sum(PROMPTS)
    assert (found.high - found.low) / 2 == pytest.approx(2.069 * stdev(drawn) * (24 / 23) ** 0.5, rel=0.05)


def test_a_difference_is_paired():
    found = estimate_difference(FIRST, PROMPTS, SECOND, PROMPTS)
    one, two = estimate_ratio(FIRST, PROMPTS), estimate_ratio(SECOND, PROMPTS)
    assert found
    assert one
    assert two
    assert found.value == pytest.approx(two.value - one.value, abs=1e-12)
    assert found.low > 0, "every prompt gained"
    assert one.high > two.low, "the intervals of both overlap"
    gains = [
        sum(SECOND[n] - FIRST[n] for n in picks) / sum(PROMPTS[n] for n in picks)
        for picks in map(resample, range(4000))
    ]
    low, *_, high = quantiles(gains, n=40)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.01)


@pytest.mark.parametrize(("freedom", "quantile"), [(4, 2.776445), (9, 2.262157), (23, 2.068658), (999, 1.962341)])
def test_the_interval_has_the_quantile_of_students_distribution(freedom: int, quantile: float):
    count = freedom + 1
    found = estimate_ratio([1, 3, *[2] * (count - 2)], [10] * count)
    assert found
    assert (found.high - found.low) / 2 == pytest.approx(quantile * sqrt(2 * count / freedom) / (10 * count))


def test_too_few_prompts_give_no_interval():
    assert estimate_ratio([], []) is estimate_ratio([1] * 4, [2] * 4) is estimate_ratio([0] * 9, [0] * 9) is None
    assert estimate_difference([1] * 4, [2] * 4, [1] * 4, [2] * 4) is None
    assert estimate_difference([1] * 8, [2] * 8, [1] * 9, [2] * 9) is None
