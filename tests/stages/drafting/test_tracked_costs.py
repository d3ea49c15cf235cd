"""Costs that follow what blocks take: only ratios count, interruptions are bounded, and a checkpoint holds them."""

import pytest
from stored_states import store

from stages.drafting.costs import BlockTimes, Costs, ReadPrompts
from stages.drafting.tracked_costs import TrackedCosts

START = Costs(target=((1, 2.0), (3, 2.2), (9, 4.0)), drafter=((1, 0.5), (2, 0.6)))
SIZES = (1, 2, 3, 6, 9, 12)


def observe(costs: TrackedCosts, tokens: int, verifying: float, *lengths: int, drafting: float = 0.0) -> None:
    costs.observe(BlockTimes(lengths or (0,), tokens, drafting, verifying))


def rises(costs: TrackedCosts | Costs) -> list[float]:
    return [costs.verification_cost(tokens) / costs.verification_cost(1) for tokens in SIZES]


def test_before_the_first_block_they_are_those_of_the_start():
    costs = TrackedCosts(START)
    assert rises(costs) == rises(START)
    assert costs.block_cost([3, 1]) == START.block_cost([3, 1])


def test_a_machine_that_is_slower_in_all_changes_no_ratio():
    costs = TrackedCosts(START)
    for tokens in SIZES * 20:
        observe(costs, tokens, 3 * START.verification_cost(tokens), 2, drafting=3 * START.drafts_cost([2]))
    assert rises(costs) == pytest.approx(rises(START), rel=0.005), "the first block counts as one of twice the costs"
    assert costs.drafting_cost(2) == pytest.approx(3 * START.drafting_cost(2), rel=0.01)


def test_what_a_busy_start_measured_is_forgotten():
    truth = Costs(target=((1, 2.0), (3, 2.0), (9, 2.5)), drafter=START.drafter)
    costs = TrackedCosts(START)
    for tokens in SIZES * 60:
        observe(costs, tokens, truth.verification_cost(tokens))
    assert rises(costs) == pytest.approx(rises(truth), rel=0.08)
    assert abs(rises(START)[4] / rises(truth)[4] - 1) > 0.5


def test_a_draft_has_a_cost_of_its_own_next_to_that_of_its_pieces():
    costs = TrackedCosts(START)
    for length in (1, 2, 4) * 100:
        observe(costs, 3, START.verification_cost(3), length, drafting=3.0 + 0.25 * length)
        observe(costs, 3, START.verification_cost(3))
    assert costs.drafting_cost(1) == pytest.approx(0.25, rel=0.2)
    assert [costs.drafts_cost([length]) for length in (0, 1, 4)] == pytest.approx([0, 3.25, 4], rel=0.05)


def test_what_verifying_a_draft_takes_beyond_a_tree_is_a_cost_of_the_draft():
    costs = TrackedCosts(START)
    for _ in range(200):
        observe(costs, 3, START.verification_cost(3))
        observe(costs, 3, START.verification_cost(3) + 0.4, 2, drafting=START.drafts_cost([2]))
    assert costs.drafts_cost([2]) == pytest.approx(START.drafts_cost([2]) + 0.4, rel=0.05)
    assert costs.block_cost([2]) - costs.verification_cost(3) == pytest.approx(costs.drafts_cost([2]))


def test_what_drafts_took_on_a_busy_machine_is_forgotten_while_none_is_made():
    """On two busy processors the drafter's short passes suffer more than the target's: so it would not be tried."""
    costs = TrackedCosts(START)
    for _ in range(60):
        observe(costs, 3, 3 * START.verification_cost(3) + 1, 2, drafting=12 * START.drafts_cost([2]))
        observe(costs, 1, 3 * START.verification_cost(1))
    busy = costs.drafts_cost([2]) / costs.verification_cost(1)
    for _ in range(400):
        observe(costs, 1, START.verification_cost(1))
    assert busy > 3.5 * START.drafts_cost([2]) / START.verification_cost(1)
    assert costs.drafts_cost([2]) == pytest.approx(START.drafts_cost([2]), rel=0.25)


def test_prompts_cost_what_reading_them_took_and_nothing_when_none_was_read_for_long():
    costs = TrackedCosts(START)
    assert costs.prompt_cost(100) == 0
    for _ in range(50):
        times = BlockTimes([2], 3, START.drafts_cost([2]), START.verification_cost(3), prompts=ReadPrompts(50, 2.0))
        costs.observe(times)
    assert costs.prompt_cost(100) == pytest.approx(4, rel=0.02)
    for _ in range(600):
        observe(costs, 1, START.verification_cost(1))
    assert costs.prompt_cost(100) < 0.1


def test_an_interruption_counts_as_twice_the_mean():
    costs, other = TrackedCosts(START), TrackedCosts(START)
    for one, longest in ((costs, 1000.0), (other, 4.0)):
        for _ in range(10):
            observe(one, 1, 2.0)
        observe(one, 1, longest)
    assert rises(costs) == rises(other)


def test_more_tokens_never_cost_less():
    costs = TrackedCosts(START)
    for _ in range(100):
        observe(costs, 1, 9.0)
        observe(costs, 9, 1.0)
    assert rises(costs) == sorted(rises(costs))


def test_a_checkpoint_restores_them_bit_for_bit():
    costs, again = TrackedCosts(START), TrackedCosts(START)
    for number, tokens in enumerate(SIZES * 3):
        observe(costs, tokens, 1.0 + number / 7, number % 3, drafting=0.3 + number % 5)
    state = store(costs.state_dict())
    again.load_state_dict(state)
    assert (rises(again), again.drafts_cost([3, 1])) == (rises(costs), costs.drafts_cost([3, 1]))
    observe(costs, 2, 1.0)
    observe(again, 2, 1.0)
    assert rises(again) == rises(costs)
