"""The acceptance rate with its interval."""

from math import sqrt

import pytest
from event_making import make_completed

from store.query.acceptance import Acceptance, Z


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
    assert (Acceptance().rate, Acceptance().interval, Acceptance().is_vague) == (None, None, True)


def test_prompts_are_weighted_by_their_judged_tokens():
    prompts = [make_completed(0, judged=10, accepted=1), make_completed(1, judged=90, accepted=89)]
    assert Acceptance.sum_over(prompts) == Acceptance(90, 100)
    assert not Acceptance.sum_over(prompts).is_vague
