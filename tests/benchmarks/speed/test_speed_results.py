"""The benchmark's results, for hand-made rounds."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.speed.results import (
    Mean,
    Quartiles,
    differing,
    mean,
    quartiles,
    same_distribution,
    summarize_rounds,
)
from benchmarks.speed.work import MeasuredRound, Work


def make_round(seconds: float, *texts: str, **more: Any) -> MeasuredRound:
    return replace(MeasuredRound(tuple(tuple(map(ord, text)) for text in texts), seconds), **more)


PLAIN = [make_round(4.0, "ab", "cd"), make_round(4.0, "abcdefgh"), make_round(1.0, "ab")]


def test_spread_of_values_and_of_one() -> None:
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0], 2.5) == Quartiles(median=3.0, lower=2.0, upper=4.0, overall=2.5)
    assert quartiles([7.0], 7.0) == Quartiles(7.0, 7.0, 7.0, 7.0)


def test_mean_has_the_standard_error() -> None:
    assert mean([1.0, 3.0]) == Mean(2.0, 1.0)
    assert mean([1.0]) == Mean(1.0, None)


def test_distributions_differ_beyond_four_standard_errors() -> None:
    assert same_distribution(Mean(3.0, 0.3), Mean(5.0, 0.4))
    assert not same_distribution(Mean(3.0, 0.3), Mean(5.1, 0.4))
    assert same_distribution(Mean(3.0, None), Mean(9.0, 0.1))
    assert same_distribution(None, None)


def test_ratios_are_paired_by_round_and_the_overall_one_is_of_totals() -> None:
    # Twice as fast in the first two rounds, and an update's ten seconds in the third.
    own = [make_round(2.0, "ab", "cd"), make_round(2.0, "abcdefgh"), make_round(10.5, "ab")]
    found = summarize_rounds(own, PLAIN, greedy=True)
    assert (found.ratio.median, found.ratio.upper, found.ratio.overall) == (2.0, 2.0, 9 / 14.5)
    assert found.ratio.lower == pytest.approx((1 / 10.5 + 2.0) / 2)
    assert found.tokens_per_second.median == 2.0
    assert found.tokens_per_second.overall == 14 / 14.5


def test_an_arm_that_emits_more_tokens_is_compared_per_token() -> None:
    own = [make_round(8.0, "abcdefg", "h"), make_round(2.0, "abcd"), make_round(0.5, "a")]
    found = summarize_rounds(own, PLAIN, greedy=False)
    assert (found.ratio.lower, found.ratio.median, found.ratio.upper) == (1.0, 1.0, 1.0)
    assert found.differing is None


def test_differing_prompts_are_found_one_by_one() -> None:
    own = [make_round(4.0, "ab", "cX"), make_round(4.0, "abcdefgX"), make_round(1.0, "ab")]
    assert differing(own, PLAIN) == [(0, 1), (1, 0)]
    assert summarize_rounds(own, PLAIN, greedy=True, widest_difference=0.25).differing == 2


def work(**more: Any) -> Work:
    one = Work(1, 0, 0, decode=1.0, translate=0.5, verify=2.0, learning=0.0)
    return replace(one, **more)


def test_acceptance_and_shares_of_time_come_from_sums() -> None:
    own = [
        make_round(5.0, "ab", "cd", work=work(judged=4, accepted=2)),
        make_round(5.0, "abcdefgh", work=work(judged=6, accepted=6, learning=1.5)),
        make_round(6.0, "ab", work=work(log=0.5, versions=1.0, drift=0.5)),
    ]
    found = summarize_rounds(own, PLAIN, greedy=True)
    assert (found.acceptance_rate, found.block_efficiency) == (0.8, 14 / 3)
    assert summarize_rounds(PLAIN, PLAIN, greedy=True).acceptance_rate is None
    assert found.breakdown is not None
    assert (found.breakdown.decode, found.breakdown.learning) == (3 / 16, 1.5 / 16)
    assert (found.breakdown.log, found.breakdown.versions, found.breakdown.drift) == (0.5 / 16, 1 / 16, 0.5 / 16)
    assert found.breakdown.rest == pytest.approx(2 / 16)


def test_surprisal_is_per_token_and_per_prompt() -> None:
    own = [replace(PLAIN[0], nats=(2.0, 6.0))]
    assert summarize_rounds(own, PLAIN[:1], greedy=False).nats_per_token == Mean(2.0, 1.0)
