"""The length of drafts: the rules by which they stop."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.drafting.costs import Costs
from stages.drafting.stopping import (
    CostStop,
    FixedLength,
    StopRule,
    ThresholdStop,
)

chances = st.lists(st.floats(0.01, 1), min_size=1, max_size=8)


def survival_of(acceptances: Sequence[float]) -> tuple[float, ...]:
    survival = [1.0]
    for acceptance in acceptances:
        survival.append(survival[-1] * acceptance)
    return tuple(survival[1:])


def drafts_more(rule: StopRule, survival: tuple[float, ...]) -> bool:
    return list(rule.select_rows([survival], [0])) == [0]


def flat(cost: float) -> Costs:
    """One row: drafting and verifying one more piece costs this share of a target pass."""
    return Costs(((1, 1.0), (2, 1.0)), ((1, cost),))


@given(chances)
def test_a_fixed_length_always_continues(acceptances: list[float]):
    assert drafts_more(FixedLength(), survival_of(acceptances))


def test_a_threshold_stops_where_a_rejection_is_likelier_than_it():
    rule = ThresholdStop(0.7)
    assert rule.select_rows([(0.9, 0.5, 0.31), (0.9, 0.5, 0.29), ()], [0, 1]) == [0]
    assert drafts_more(ThresholdStop(0.5), (0.5,)), "exactly the threshold is not above it"


@given(chances, st.floats(0.01, 1))
def test_the_cost_rule_continues_while_a_longer_draft_emits_more_per_second(acceptances: list[float], cost: float):
    survival = survival_of(acceptances)
    rate = (1 + sum(survival)) / (1 + len(survival) * cost)
    longer = survival_of([*acceptances, acceptances[-1]])
    longer_rate = (1 + sum(longer)) / (1 + len(longer) * cost)
    if longer_rate != pytest.approx(rate, rel=1e-9):
        assert drafts_more(CostStop(flat(cost)), survival) == (longer_rate > rate)


def test_the_cost_rule_stops_sooner_for_dearer_or_worse_pieces():
    def length(acceptance: float, cost: float) -> int:
        count = 1
        while count < 50 and drafts_more(CostStop(flat(cost)), survival_of([acceptance] * count)):
            count += 1
        return count

    assert length(0.9, 0.1) > length(0.6, 0.1) > length(0.2, 0.1)
    assert length(0.9, 0.02) > length(0.9, 0.1) > length(0.9, 0.5)


@given(
    st.lists(st.lists(st.floats(0.05, 0.99), min_size=0, max_size=4), min_size=1, max_size=5),
    st.floats(0.01, 0.5),
    st.floats(0.0, 0.2),
)
def test_the_rows_that_draft_on_are_the_set_with_the_highest_rate(rows: list, drafting: float, verifying: float):
    """Against all sets: a drafter pass costs the same for one row as for many, a verified token its share."""
    survivals = [survival_of(row) for row in rows]
    size = len(rows)
    costs = Costs(((size, 1.0), (size + 1, 1.0 + verifying)), ((1, drafting),))
    open_rows = [number for number, survival in enumerate(survivals) if survival]
    lengths = [len(survival) for survival in survivals]

    def rate(chosen: Sequence[int]) -> float:
        hopes = (survivals[row][-1] * rows[row][-1] for row in chosen)
        longer = [length + (row in chosen) for row, length in enumerate(lengths)]
        passes = max(lengths) + bool(chosen)
        spent = costs.verification_cost(size + sum(longer)) + passes * drafting
        return (size + sum(map(sum, survivals)) + sum(hopes)) / spent

    sets = [chosen for number in range(len(open_rows) + 1) for chosen in combinations(open_rows, number)]
    found = CostStop(costs).select_rows(survivals, open_rows)
    assert rate(tuple(found)) == pytest.approx(max(map(rate, sets)))


def test_costs_are_linear_between_points_and_continue_beyond_them():
    costs = Costs(((2, 4.0), (4, 6.0), (8, 14.0)), ((1, 1.0), (3, 2.0)))
    assert [costs.verification_cost(tokens) for tokens in (1, 2, 3, 4, 6, 8, 10)] == [4, 4, 5, 6, 10, 14, 18]
    assert [costs.drafting_cost(rows) for rows in (1, 2, 3, 5)] == [1, 1.5, 2, 3]
    assert costs.block_cost([]) == 4
    assert costs.block_cost([2, 0, 1]) == costs.verification_cost(6) + costs.drafting_cost(2) + costs.drafting_cost(1)
