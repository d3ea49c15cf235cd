"""How long drafts are: the rules by which they stop, and whether there are any."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.costs import Costs, rising
from stages.stopping import AlwaysDraft, CostStop, DraftWherePaying, FixedLength, StopRule, ThresholdStop

chances = st.lists(st.floats(0.01, 1), min_size=1, max_size=8)


def survival_of(acceptances: Sequence[float]) -> tuple[float, ...]:
    survival = [1.0]
    for acceptance in acceptances:
        survival.append(survival[-1] * acceptance)
    return tuple(survival[1:])


def goes_on(rule: StopRule, survival: tuple[float, ...]) -> bool:
    return list(rule.going_on([survival], [0])) == [0]


def flat(cost: float) -> Costs:
    """One row: drafting and verifying one more piece costs this share of a target pass."""
    return Costs(((1, 1.0), (2, 1.0)), ((1, cost),))


@given(chances)
def test_a_fixed_length_always_goes_on(acceptances: list[float]):
    assert goes_on(FixedLength(), survival_of(acceptances))


def test_a_threshold_stops_where_a_rejection_is_likelier_than_it():
    rule = ThresholdStop(0.7)
    assert rule.going_on([(0.9, 0.5, 0.31), (0.9, 0.5, 0.29), ()], [0, 1]) == [0]
    assert goes_on(ThresholdStop(0.5), (0.5,)), "exactly the threshold is not above it"


@given(chances, st.floats(0.01, 1))
def test_the_cost_rule_goes_on_while_a_longer_draft_emits_more_per_second(acceptances: list[float], cost: float):
    survival = survival_of(acceptances)
    rate = (1 + sum(survival)) / (1 + len(survival) * cost)
    longer = survival_of([*acceptances, acceptances[-1]])
    longer_rate = (1 + sum(longer)) / (1 + len(longer) * cost)
    if longer_rate != pytest.approx(rate, rel=1e-9):
        assert goes_on(CostStop(flat(cost)), survival) == (longer_rate > rate)


def test_the_cost_rule_stops_sooner_for_dearer_or_worse_pieces():
    def length(acceptance: float, cost: float) -> int:
        count = 1
        while count < 50 and goes_on(CostStop(flat(cost)), survival_of([acceptance] * count)):
            count += 1
        return count

    assert length(0.9, 0.1) > length(0.6, 0.1) > length(0.2, 0.1)
    assert length(0.9, 0.02) > length(0.9, 0.1) > length(0.9, 0.5)


def test_the_cost_rule_stops_where_all_hope_is_gone():
    assert not goes_on(CostStop(flat(0.1)), (0.0,))
    assert not goes_on(CostStop(flat(0.1)), (0.0, 0.0))


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
        spent = costs.verifying(size + sum(longer)) + passes * drafting
        return (size + sum(map(sum, survivals)) + sum(hopes)) / spent

    sets = [chosen for number in range(len(open_rows) + 1) for chosen in combinations(open_rows, number)]
    found = CostStop(costs).going_on(survivals, open_rows)
    assert rate(tuple(found)) == pytest.approx(max(map(rate, sets)))


def drafted(paying: DraftWherePaying, blocks: int, emitted: int, length: int = 2) -> int:
    """How many of the next blocks draft, when each drafting one emits so many tokens."""
    count = 0
    for _ in range(blocks):
        drafts = paying.drafts()
        count += drafts
        paying.observe([length if drafts else 0], emitted if drafts else 1)
    return count


def test_drafting_goes_on_where_it_pays_and_rests_where_it_does_not():
    assert drafted(DraftWherePaying(flat(0.1)), 500, emitted=2) == 500
    assert drafted(DraftWherePaying(flat(0.1)), 5000, emitted=1) / 5000 < 0.04, "trials alone"
    assert AlwaysDraft().drafts()


@pytest.mark.parametrize(("cost", "better"), [(0.1, 2), (0.4, 2)], ids=["by far", "by a ninth"])
def test_drafting_comes_back_soon_after_it_begins_to_pay(cost: float, better: int):
    """Two pieces a block: it pays from 1 + 2 * cost tokens on."""
    paying = DraftWherePaying(flat(cost))
    drafted(paying, 2000, emitted=1)
    drafted(paying, DraftWherePaying.LONGEST + 2 * DraftWherePaying.TRIAL, emitted=better)
    assert drafted(paying, 100, emitted=better) == 100


def test_a_few_bad_blocks_do_not_stop_what_pays():
    paying = DraftWherePaying(flat(0.1))
    drafted(paying, 60, emitted=3)
    assert drafted(paying, 4, emitted=1) == 4
    assert drafted(paying, 60, emitted=3) == 60


def test_costs_are_linear_between_points_and_go_on_beyond_them():
    costs = Costs(((2, 4.0), (4, 6.0), (8, 14.0)), ((1, 1.0), (3, 2.0)))
    assert [costs.verifying(tokens) for tokens in (1, 2, 3, 4, 6, 8, 10)] == [4, 4, 5, 6, 10, 14, 18]
    assert [costs.drafting(rows) for rows in (1, 2, 3, 5)] == [1, 1.5, 2, 3]
    assert costs.block([]) == 4
    assert costs.block([2, 0, 1]) == costs.verifying(6) + costs.drafting(2) + costs.drafting(1)


def test_measured_falls_are_levelled():
    assert rising([(1, 2.0), (2, 1.5), (4, 3.0)]) == ((1, 2.0), (2, 2.0), (4, 3.0))
