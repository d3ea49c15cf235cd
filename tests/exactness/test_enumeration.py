"""Exactness: whatever is drafted, what is emitted has the target's distribution (design, section 4).

Every draft and every accept/reject outcome is enumerated through the production functions, in double precision.
"""

import math
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from enumeration import (
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

from stages.ngrams import trie
from stages.sampling.random_source import RandomSource
from stages.verification import chain_decisions, parsing
from stages.verification import rules as acceptance
from stages.verification.rules import MODES

EXACT = 1e-12
EXACT_MODES = [name for name, mode in MODES.items() if mode.exact]
INEXACT_MODES = [name for name, mode in MODES.items() if not mode.exact]

# Pieces 0..3; None is a token without pieces. Piece 3 begins no token of NESTED: it is untranslatable.
NESTED = ((0,), (1,), (0, 1), (0, 1, 2), (2,), None, (1, 3))
GAPS = ((0,), (1,), (0, 1, 2), (2, 3, 1), (2, 3), (0, 2), None)  # gaps at (0, 1) and at (2,)
NO_DIRECT = ((0, 0), (0, 0, 1), (1, 1, 1), (1, 2), None)  # only tokens in the cache can be drafted
VOCABULARIES = {"nested": NESTED, "gaps": GAPS, "no-direct": NO_DIRECT}


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
@pytest.mark.parametrize("vocabulary", ["nested", "gaps"])
def test_two_tokens_have_the_targets_distribution(vocabulary: str, mode: str, max_draft: int):
    assert_exact(World(VOCABULARIES[vocabulary], 4, mode, max_draft, seed=max_draft))


@pytest.mark.parametrize("mode", ["trie", "match"])
def test_an_untrained_vocabulary_without_direct_maps_is_exact_too(mode: str):
    assert_exact(World(NO_DIRECT, 3, mode, 3, seed=5))


@pytest.mark.slow
@pytest.mark.representatives(2)
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("vocabulary", ["nested", "gaps"])
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
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_cache_that_fills_and_evicts_between_blocks(vocabulary: str):
    assert_exact(World(VOCABULARIES[vocabulary], 4, "trie", 2, seed=3, seeded=False, cache_entries=1), count=3)


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
@pytest.mark.parametrize("vocabulary", ["nested", "gaps"])
def test_greedy_is_the_limit_at_temperature_0(vocabulary: str, mode: str, drafter: str):
    greedy = "both" if drafter == "greedy" else "target"
    for seed in range(4):
        world = World(VOCABULARIES[vocabulary], 4, mode, 3, seed=seed, greedy=greedy)
        ((tokens, probability),) = emitted_distribution(world, 3).items()
        assert tokens in true_distribution(world, 3), "the greedy sequence"
        assert probability == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize("mode", INEXACT_MODES)
@pytest.mark.parametrize("vocabulary", ["nested", "gaps"])
def test_a_mode_that_is_declared_inexact_is_biased_where_ngrams_are_merged(vocabulary: str, mode: str):
    world = World(VOCABULARIES[vocabulary], 4, mode, 2, seed=3)
    assert total_variation(emitted_distribution(world, 2), true_distribution(world, 2)) > 1e-3
    without_merges = replace(world, max_draft=1)
    assert difference(emitted_distribution(without_merges, 2), true_distribution(without_merges, 2)) < EXACT


# A drafter whose distribution is NaN or infinite: a draw from it is meaningless and must not be used.


@dataclass(frozen=True)
class BrokenWorld(World):
    """A world whose drafter's distribution is no distribution after histories of some lengths.

    Attributes:
        value: stored in place of a probability.
        whole: whether the value fills the distribution or is at one piece.
        after: lengths of the histories, modulo 2, after which the distribution is broken.
        blind: the piece that is drafted there; the text must be exact for each.
    """

    value: float = math.nan
    whole: bool = True
    after: tuple[int, ...] = (0, 1)
    blind: int = 0

    def drafter_distribution(self, pieces: tuple[int, ...]) -> Tensor:
        distribution = super().drafter_distribution(pieces)
        if len(pieces) % 2 not in self.after:
            return distribution
        place = slice(None) if self.whole else self.allowed[0]
        distribution[place] = self.value
        return distribution

    def draw(self, distribution: Tensor, rng: RandomSource) -> int:
        return super().draw(distribution, rng) if distribution.isfinite().all() else self.blind


@pytest.mark.slow
@pytest.mark.parametrize("blind", range(4))
@pytest.mark.parametrize("after", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(("value", "whole"), [(math.nan, True), (math.nan, False), (math.inf, True), (math.inf, False)])
@pytest.mark.parametrize("vocabulary", ["nested", "gaps"])
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


def _nan_is_always_accepted(monkeypatch):
    monkeypatch.setattr(chain_decisions, "acceptance_probability", lambda drafter, target: min(1.0, target / drafter))


def _infinity_at_another_piece_is_ignored(monkeypatch):
    monkeypatch.setattr(acceptance, "nan", 0.5)


def _residual_of_what_is_not_finite(monkeypatch):
    monkeypatch.setattr(
        acceptance.TrieRule,
        "_remaining_probs",
        lambda self, test, target_probs_V: target_probs_V * (target_probs_V > 0.2),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutate", [_nan_is_always_accepted, _infinity_at_another_piece_is_ignored, _residual_of_what_is_not_finite]
)
def test_accepting_a_distribution_that_is_not_finite_is_detected(monkeypatch, mutate):
    worlds = [BrokenWorld(NESTED, 4, "trie", 3, seed=seed, after=(1,)) for seed in (3, 4, 5)]
    mutate(monkeypatch)
    assert max(difference(emitted_distribution(world, 2), true_distribution(world, 2)) for world in worlds) > 1e-3


# The suite can fail: each of these changes leaves out one step of the algorithm.


def _looks_ahead_without_excluding(monkeypatch):
    follow = parsing._follow
    monkeypatch.setattr(parsing, "_follow", lambda *args: (*follow(*args)[:2], False))


def _residual_is_the_targets_distribution(monkeypatch):
    monkeypatch.setattr(
        acceptance.TrieRule, "_root_residual", lambda self, test, draft_probs_KD, target_probs_V: target_probs_V
    )


def _residual_forgets_the_exclusion(monkeypatch):
    root_residual = acceptance.TrieRule._root_residual
    monkeypatch.setattr(
        acceptance.TrieRule,
        "_root_residual",
        lambda s, test, *distributions: root_residual(s, replace(test, excluded=None), *distributions),
    )


def _inner_residual_is_the_conditional(monkeypatch):
    def conditional(test, draft_probs_KD, target_probs_V):
        below = torch.zeros_like(target_probs_V).index_fill_(0, torch.tensor(test.node.members), 1.0)
        return target_probs_V * below

    monkeypatch.setattr(acceptance, "_node_residual", conditional)


def _inner_target_is_not_divided(monkeypatch):
    target_levels = acceptance.TrieRule._target_levels

    def divide_nothing(self, placed, target_probs_NV):
        distributions = [
            float(target_probs_NV[position, list(acceptance.option_members(test))].sum()) for position, test in placed
        ]
        return distributions if placed else target_levels(self, placed, target_probs_NV)

    monkeypatch.setattr(acceptance.TrieRule, "_target_levels", divide_nothing)


def _groups_leave_out_what_is_below(monkeypatch):
    own = property(lambda node: () if node.token is None else (node.token,))
    monkeypatch.setattr(trie.Node, "members", own)


def _stop_counts_as_its_piece(monkeypatch):
    monkeypatch.setattr(
        acceptance, "_drafter_level", lambda test, piece, children: 1.0 if test.position is None else piece
    )


def _the_end_of_the_pieces_is_no_test(monkeypatch):
    follow = parsing._follow

    def without_last(node, pieces, start, tests):
        result = follow(node, pieces, start, tests)
        if tests[-1].position is None:
            tests.pop()
        return result

    monkeypatch.setattr(parsing, "_follow", without_last)


def _groups_are_not_kept_up_to_date(monkeypatch):
    assign = trie.Trie._assign
    monkeypatch.setattr(trie.Trie, "_assign", lambda self, *new: assign(self, *new) if self.version == 0 else None)


def _members_are_not_kept_up_to_date(monkeypatch):
    monkeypatch.setattr(trie.Node, "invalidate_members", lambda self: None)


@pytest.mark.slow
@pytest.mark.representatives(3)
@pytest.mark.parametrize(
    "mutate",
    [
        _looks_ahead_without_excluding,
        _residual_is_the_targets_distribution,
        _residual_forgets_the_exclusion,
        _inner_residual_is_the_conditional,
        _inner_target_is_not_divided,
        _groups_leave_out_what_is_below,
        _stop_counts_as_its_piece,
        _the_end_of_the_pieces_is_no_test,
        _groups_are_not_kept_up_to_date,
        _members_are_not_kept_up_to_date,
    ],
)
def test_leaving_out_any_step_of_the_algorithm_is_detected(monkeypatch, mutate):
    worlds = [World(NESTED, 4, "trie", 3, seed=seed, drafter_support=3) for seed in (3, 4, 5)]
    mutate(monkeypatch)
    assert max(difference(emitted_distribution(world, 2), true_distribution(world, 2)) for world in worlds) > 1e-3


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
@pytest.mark.parametrize("vocabulary", ["nested", "gaps"])
def test_whole_stages_emit_the_targets_distribution(vocabulary: str, mode: str, neighbours: int):
    """Neighbours with 1 and 2 remaining tokens leave early, so that the row moves to another place."""
    world = World(VOCABULARIES[vocabulary], 4, mode, 2, seed=3, target_support=3, drafter_support=2)
    distribution, lengths = stage_distribution(world, 2, remaining_tokens=4, neighbours=neighbours)
    assert difference(distribution, true_distribution(world, 2)) < EXACT
    assert max(lengths) == 2


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("vocabulary", ["nested", "gaps"])
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
