"""Exactness: whatever is drafted, what is emitted has the target's distribution (design, section 4).

Every draft and every accept/reject outcome is enumerated through the production functions, in double precision.
"""

import math
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from enumeration import (
    EXACT,
    GAPS,
    NESTED,
    VOCABULARIES,
    EnumeratingRandomSource,
    World,
    block_distribution,
    difference,
    emitted_distribution,
    every_outcome,
    total_variation,
    true_distribution,
)
from torch import Tensor
from whole_stages import stage_distribution

from stages.sampling.random_source import RandomSource
from stages.verification.rules import MODES

EXACT_MODES = [name for name, mode in MODES.items() if mode.exact and not mode.coupled]  # see test_coupled.py
INEXACT_MODES = [name for name, mode in MODES.items() if not mode.exact]

NO_DIRECT = ((0, 0), (0, 0, 1), (1, 1, 1), (1, 2), None)  # only tokens in the cache can be drafted


def random_spelling(random: Random, size: int) -> tuple[tuple[int, ...] | None, ...]:
    """A vocabulary of up to 7 tokens of 1 to 4 pieces; half of the longer ones extend another."""
    found = {(piece,) for piece in range(size) if random.random() < 0.6} | {(0,)}
    while len(found) < 6:
        begun = random.choice(sorted(found)) if random.random() < 0.6 else ()
        found.add((*begun, *(random.randrange(size) for _ in range(random.randint(1, 2))))[:4])
    spelling = [*sorted(found), None]
    random.shuffle(spelling)
    return tuple(spelling)


def random_world(seed: int) -> World:
    random = Random(seed)
    size = random.randint(2, 4)
    return World(
        random_spelling(random, size),
        size,
        max_draft=random.randint(1, 3),
        seed=seed,
        seeded=random.random() < 0.6,
        cache_entries=random.choice([1, 2, 100]),
        adaptive=random.random() < 0.5,
        target_support=random.choice([0, 2, 3]),
        drafter_support=random.choice([0, 2]),
        ends=random.choice([(), (0,)]),
    )


def assert_exact(world: World, count: int = 2, remaining_tokens: int = 99) -> None:
    got = emitted_distribution(world, count, remaining_tokens)
    assert sum(got.values()) == pytest.approx(1, abs=EXACT), "outcomes were left out"
    assert difference(got, true_distribution(world, count)) < EXACT


def test_no_mode_is_declared_inexact_to_leave_the_suite():
    assert {"trie", "match", "tli"} <= set(EXACT_MODES)  # a new one is enumerated below once it is in the table
    assert INEXACT_MODES == ["paper"]


@pytest.mark.representatives(4)
@pytest.mark.parametrize("max_draft", range(4))
@pytest.mark.parametrize("mode", EXACT_MODES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_two_tokens_have_the_targets_distribution(vocabulary: str, mode: str, max_draft: int):
    assert_exact(World(VOCABULARIES[vocabulary], 4, mode, max_draft, seed=max_draft))


@pytest.mark.parametrize("mode", ["trie", "match"])
def test_an_untrained_vocabulary_without_direct_maps_is_exact_too(mode: str):
    assert_exact(World(NO_DIRECT, 3, mode, 3, seed=5))


@pytest.mark.representatives("nested-False")
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_drafts_of_four_pieces(vocabulary: str, adaptive: bool):
    assert_exact(World(VOCABULARIES[vocabulary], 4, "trie", 4, seed=6, adaptive=adaptive, drafter_support=3))


def test_three_tokens_have_the_targets_distribution():
    assert_exact(World(NESTED, 4, "trie", 3, seed=8, target_support=4, drafter_support=3), count=3)


@pytest.mark.parametrize("mode", EXACT_MODES)
@pytest.mark.parametrize("seed", range(8))
def test_random_vocabularies_caches_and_stops(seed: int, mode: str):
    assert_exact(replace(random_world(seed), mode=mode))


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("spelling", [NESTED, GAPS, NO_DIRECT], ids=["nested", "gaps", "no-direct"])
def test_a_cache_that_fills_and_evicts_between_blocks(spelling: tuple):
    assert_exact(World(spelling, 4, "trie", 2, seed=3, seeded=False, cache_entries=1), count=3)


@pytest.mark.parametrize("remaining_tokens", [1, 2, 3])
def test_a_window_that_ends_inside_ngrams_and_gaps(remaining_tokens: int):
    assert_exact(
        World(GAPS, 4, "trie", 4, seed=4, drafter_support=3),
        count=min(remaining_tokens, 2),
        remaining_tokens=remaining_tokens,
    )


@pytest.mark.slow
@pytest.mark.representatives("trie")
@pytest.mark.parametrize("mode", EXACT_MODES)
def test_a_sequence_that_ends(mode: str):
    assert_exact(World(NESTED, 4, mode, 3, seed=9, ends=(1,)))


def test_a_block_emits_at_most_the_remaining_tokens_and_stops_at_an_end():
    world = World(NESTED, 4, "trie", 3, seed=2, ends=(0,))
    for tokens in block_distribution(world, (), remaining_tokens=2):
        assert len(tokens) <= 2
        assert 0 not in tokens[:-1]


@pytest.mark.representatives(3)
@pytest.mark.parametrize("drafter", ["greedy", "warm"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_greedy_is_the_limit_at_temperature_0(vocabulary: str, mode: str, drafter: str):
    greedy = "both" if drafter == "greedy" else "target"
    for seed in range(4):
        world = World(VOCABULARIES[vocabulary], 4, mode, 3, seed=seed, greedy=greedy)
        ((tokens, probability),) = emitted_distribution(world, 3).items()
        assert tokens in true_distribution(world, 3), "the greedy sequence"
        assert probability == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize("mode", INEXACT_MODES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_mode_that_is_declared_inexact_is_biased_where_ngrams_are_merged(vocabulary: str, mode: str):
    world = World(VOCABULARIES[vocabulary], 4, mode, 2, seed=3)
    assert total_variation(emitted_distribution(world, 2), true_distribution(world, 2)) > 1e-3
    without_merges = replace(world, max_draft=1)
    assert difference(emitted_distribution(without_merges, 2), true_distribution(without_merges, 2)) < EXACT


# A drafter whose distribution is NaN or infinite: a draw from it is meaningless and must not be used.


@dataclass(frozen=True)
class BrokenWorld(World):
    """A world whose drafter's distribution is no distribution after histories of some lengths."""

    value: float = math.nan  # stored in place of a probability
    whole: bool = True  # whether the value fills the distribution or is at one piece
    after: tuple[int, ...] = (0, 1)  # lengths of the histories, modulo 2, after which the distribution is broken
    blind: int = 0  # the piece that is drafted there; the text must be exact for each

    def drafter_distribution(self, pieces: tuple[int, ...]) -> Tensor:
        distribution = super().drafter_distribution(pieces)
        if len(pieces) % 2 not in self.after:
            return distribution
        place = slice(None) if self.whole else self.allowed[0]
        distribution[place] = self.value
        return distribution

    def draw(self, distribution: Tensor, rng: RandomSource) -> int:
        return super().draw(distribution, rng) if distribution.isfinite().all() else self.blind


@pytest.mark.representatives(15)
@pytest.mark.parametrize("blind", range(4))
@pytest.mark.parametrize("after", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(("value", "whole"), [(math.nan, True), (math.nan, False), (math.inf, True), (math.inf, False)])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_drafter_whose_distribution_is_not_finite_leaves_the_targets_distribution(
    vocabulary, value, whole, after, blind
):
    broken = {"value": value, "whole": whole, "after": after, "blind": blind}
    assert_exact(BrokenWorld(VOCABULARIES[vocabulary], 4, "trie", 3, seed=6, drafter_support=3, **broken))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["match", "tli"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_distribution_that_is_not_finite_in_the_other_modes(mode: str, value: float):
    assert_exact(BrokenWorld(NESTED, 4, mode, 3, seed=6, value=value, after=(1,)))


def test_the_enumeration_itself_reaches_every_outcome_with_its_probability():
    def two_draws(rng) -> tuple[float, float]:
        return rng.uniform(torch.tensor([1.0, 3.0])), rng.uniform(torch.tensor([0.5, 0.0, 0.5]))

    found = {result: weight for weight, result in every_outcome(two_draws)}
    assert found == {(0.125, 0.25): 0.125, (0.125, 0.75): 0.125, (0.625, 0.25): 0.375, (0.625, 0.75): 0.375}


def test_the_enumeration_refuses_cells_that_the_logged_number_could_miss():
    with pytest.raises(AssertionError, match="too narrow"):
        EnumeratingRandomSource().uniform(torch.tensor([1.0, 1e-9], dtype=torch.float64))


# Whole stages, including feeding, rollback, lengths and remaining tokens.


@pytest.mark.representatives(4)
@pytest.mark.parametrize("neighbours", [0, 2])
@pytest.mark.parametrize("mode", EXACT_MODES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_whole_stages_emit_the_targets_distribution(vocabulary: str, mode: str, neighbours: int):
    """Neighbours with 1 and 2 remaining tokens leave early, so that the row moves to another place."""
    world = World(VOCABULARIES[vocabulary], 4, mode, 2, seed=3, target_support=3, drafter_support=2)
    distribution, lengths = stage_distribution(world, 2, remaining_tokens=4, neighbours=neighbours)
    assert difference(distribution, true_distribution(world, 2)) < EXACT
    assert max(lengths) == 2


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_whole_stages_with_an_adaptive_head_and_a_cache_of_one_entry(vocabulary: str):
    world = World(
        VOCABULARIES[vocabulary], 4, "trie", 3, 3, seeded=False, cache_entries=1, adaptive=True,
        target_support=3, drafter_support=2,
    )  # fmt: skip
    distribution, lengths = stage_distribution(world, 2, remaining_tokens=3)
    assert difference(distribution, true_distribution(world, 2)) < EXACT
    assert len(lengths) > 1, "drafts must have stopped at different lengths"


@pytest.mark.parametrize("after", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_whole_stages_with_a_drafter_whose_distribution_is_not_finite(value: float, after: tuple[int, ...]):
    world = BrokenWorld(
        NESTED, 4, "trie", 3, 3, target_support=3, drafter_support=2, value=value, whole=False, after=after
    )
    distribution, lengths = stage_distribution(world, 2, remaining_tokens=3)
    assert difference(distribution, true_distribution(world, 2)) < EXACT
    assert max(lengths) == (0 if len(after) == 2 else 1), "no draft is longer than the finite part"


def test_whole_stages_stop_at_an_end():
    world = World(NESTED, 4, "trie", 2, 11, target_support=3, drafter_support=2)
    world = replace(world, ends=(int(world.target_distribution(()).argmax()),))
    distribution, _ = stage_distribution(world, 2, remaining_tokens=3)
    assert difference(distribution, true_distribution(world, 2)) < EXACT
    assert any(len(tokens) == 1 for tokens in distribution), "some sequences must have ended"


@pytest.mark.slow
@pytest.mark.representatives(2)
@pytest.mark.parametrize("seed", range(4))
def test_a_drafter_that_reads_the_targets_states_keeps_the_distribution(seed: int):
    world = random_world(seed)
    got, lengths = stage_distribution(world, 2, 99, states=True)
    assert sum(got.values()) == pytest.approx(1, abs=EXACT), "outcomes were left out"
    assert difference(got, true_distribution(world, 2)) < EXACT
    assert max(lengths) > 0
