"""Pauses by the clock: drafting ends where blocks with drafts emit fewer tokens per second, and is tried again."""

import random

import pytest
from stored_states import store

from stages.drafting.costs import BlockTimes, Costs
from stages.drafting.timed_pauses import (
    DRAFTING_BLOCKS,
    PLAIN_BLOCKS,
    SECOND_PLAIN_BLOCKS,
    SHORTEST_PAUSE,
    TRIAL,
    TimedPauses,
)

BEFORE_A_PAUSE = DRAFTING_BLOCKS + PLAIN_BLOCKS + TRIAL + SECOND_PLAIN_BLOCKS  # blocks, where drafting is slower
COSTS = Costs(target=((1, 0.010), (5, 0.011)), drafter=((1, 0.001),))


def run(
    pauses: TimedPauses,
    blocks: int,
    tokens: float,
    seconds: float,
    *,
    rows: int = 1,
    jitter: float = 0.0,
    seed: int = 0,
) -> tuple[list[bool], float]:
    """Blocks that draft emit so many tokens per row in so many seconds, others one in 10 ms. Which drafted, and the
    rate of all in units of the plain one."""
    chance, made, spent, emitted = random.Random(seed), [], 0.0, 0.0
    for _ in range(blocks):
        drafts = pauses.drafts
        took = (seconds if drafts else 0.010) * (1 + jitter * chance.gauss(0, 1))
        got = tokens if drafts else 1.0
        pauses.observe(
            BlockTimes([0] * rows, rows * (3 if drafts else 1), 0.001, took - 0.002, 0.001), rows * got, drafts=drafts
        )
        made.append(drafts)
        spent, emitted = spent + took, emitted + got
    return made, emitted / spent * 0.010


def test_where_drafting_is_faster_few_blocks_are_plain_and_none_in_a_row_but_those_of_a_comparison():
    made, rate = run(TimedPauses(COSTS), 3000, 1.5, 0.012)
    plain = made.count(False)
    assert 0.02 < plain / len(made) < 0.04
    assert plain % PLAIN_BLOCKS == 0
    assert rate > 0.98 * 1.25


def test_where_it_is_slower_it_is_paused_for_longer_and_longer():
    made, rate = run(TimedPauses(COSTS), 4000, 1.2, 0.013)
    assert made.index(False) == DRAFTING_BLOCKS
    assert sum(made) == DRAFTING_BLOCKS + 6 * TRIAL, "after pauses of 128, 256, 512, 1024 and 1024 blocks"
    assert rate > 0.99


def test_drafting_that_becomes_faster_is_found_by_a_trial():
    pauses = TimedPauses(COSTS)
    run(pauses, 400, 1.2, 0.013)
    assert pauses.paused
    made, _ = run(pauses, 800, 1.5, 0.012)
    assert not pauses.paused
    assert sum(made) > 400


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("tokens", "seconds"), [(1.05, 0.012), (1.4, 0.0125), (2.0, 0.014)])
def test_noise_costs_little(tokens: float, seconds: float, seed: int):
    _, rate = run(TimedPauses(COSTS), 4000, tokens, seconds, jitter=0.15, seed=seed)
    assert rate > 0.97 * max(1.0, tokens / seconds * 0.010)


def test_a_disturbed_start_pauses_nothing():
    """Other work takes a core for the first blocks, all of which draft: the next comparison finds that it is over."""
    pauses = TimedPauses(COSTS)
    run(pauses, DRAFTING_BLOCKS, 1.5, 0.025)
    made, _ = run(pauses, 600, 1.5, 0.012)
    assert pauses.state_dict()["trials"][2] is False
    assert (not pauses.paused, made.count(False)) == (True, PLAIN_BLOCKS * 6 + SECOND_PLAIN_BLOCKS)


def test_the_first_block_of_a_stretch_is_not_counted():
    """It records what the stretch before it decided."""
    pauses = TimedPauses(COSTS)
    run(pauses, DRAFTING_BLOCKS, 1.05, 0.010)
    pauses.observe(BlockTimes([0], 1, 0.0, 0.025), 1.0, drafts=False)
    run(pauses, PLAIN_BLOCKS - 1, 1.05, 0.010)
    drafting, plain = pauses.state_dict()["speeds"]
    assert plain[0] / plain[1] == pytest.approx(1.0)
    assert drafting[0] / drafting[1] == pytest.approx(1.05)


def test_a_pause_ends_with_a_trial_when_something_changed():
    pauses = TimedPauses(COSTS)
    run(pauses, 750, 1.2, 0.013)
    assert (pauses.paused, pauses.drafts) == (True, False)
    pauses.resume()
    made, _ = run(pauses, TRIAL + SHORTEST_PAUSE + 1, 1.2, 0.013)
    assert made == [True] * TRIAL + [False] * SHORTEST_PAUSE + [True], "and the pauses begin with the shortest again"


def test_rows_of_a_batch_are_compared_with_as_many_plain_ones():
    """Eight rows that emit 8.4 tokens in the time of 8 plain ones are faster, and 8.4 in that of 9 slower."""
    costs = Costs(target=((8, 0.020), (40, 0.080)), drafter=((8, 0.001),))
    for seconds, slower in ((0.020, False), (0.0225, True)):
        pauses = TimedPauses(costs)
        for _ in range(BEFORE_A_PAUSE):
            took, emitted, tokens = (seconds, 8.4, 12) if pauses.drafts else (0.020, 8.0, 8)
            pauses.observe(BlockTimes([0] * 8, tokens, 0.0, took), emitted, drafts=pauses.drafts)
        assert pauses.paused is slower


@pytest.mark.parametrize("blocks", [10, DRAFTING_BLOCKS + 3, 300, 900])
def test_a_restored_state_continues_alike(blocks: int):
    pauses, again = TimedPauses(COSTS), TimedPauses(COSTS)
    run(pauses, blocks, 1.2, 0.013)
    state = store(pauses.state_dict())
    again.load_state_dict(state)
    assert again.state_dict() == pauses.state_dict()
    assert run(again, 500, 1.2, 0.013, jitter=0.1) == run(pauses, 500, 1.2, 0.013, jitter=0.1)
    assert again.state_dict() == pauses.state_dict()
