"""Exactness in float32, the precision of production: what is emitted differs from the target by rounding alone.

The enumeration of `test_enumeration.py` with distributions in float32 and test numbers of 24 bits, so that every weight
is the probability that production gives. docs/exactness.md derives the bound.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from enumeration import (
    NESTED,
    VOCABULARIES,
    Distribution,
    World,
    emitted_distribution,
    every_outcome,
    random_distribution,
    total_variation,
    true_distribution,
)
from test_enumeration import EXACT_MODES, random_world
from test_tree_exactness import KINDS, grow
from token_trees import make_tree
from torch import Tensor
from whole_stages import EXTRA, stage_distribution

from stages.sampling.distributions import to_distribution
from stages.sampling.drawing import RowDistributions
from stages.sampling.params import SamplingParams
from stages.verification.tree_decisions import decide_tree

UNIT = 2.0**-24  # relative error of one rounding in float32, and the grid of the numbers that decide tests
COUNT = 2  # emitted tokens


def compute_bound(world: World, count: int = COUNT) -> float:
    """The bound of docs/exactness.md on the total variation distance of `count` emitted tokens."""
    target, drafter = len(world.spelling), world.drafter_size
    levels = max(len(pieces) for pieces in world.spelling if pieces)
    return count * levels * (5 * target + 12 * drafter + 8) * UNIT


@dataclass(frozen=True)
class PlainWorld(World):
    """The distribution of plain decoding in float32: rounded probabilities, normalised to sum to 1."""

    probs: Callable[[tuple[int, ...]], Tensor] = torch.tensor  # the rounded probabilities after a text

    def target_distribution(self, emitted: tuple[int, ...]) -> Tensor:
        probs_V = self.probs(emitted).double()
        return probs_V / probs_V.sum()


@dataclass(frozen=True)
class PeakedWorld(World):
    """A world with probabilities from nearly 1 to 1e-9, so that remainders of 1 have few correct bits."""

    power: int = 6  # exponent of the probabilities before they are normalised

    def target_distribution(self, emitted: tuple[int, ...]) -> Tensor:
        return self._peak(super().target_distribution(emitted))

    def drafter_distribution(self, pieces: tuple[int, ...]) -> Tensor:
        return self._peak(super().drafter_distribution(pieces))

    def _peak(self, probs: Tensor) -> Tensor:
        weights = probs.double() ** self.power
        return (weights / weights.sum()).to(self.dtype)


@dataclass(frozen=True)
class CloseWorld(World):
    """A world of one piece per token whose drafter has the target's distribution up to a few roundings.

    Rejections, and the tokens drawn after them, come from rounding alone.
    """

    def drafter_distribution(self, pieces: tuple[int, ...]) -> Tensor:
        probs_D = self.target_distribution(pieces).double()
        noise_D = random_distribution(self.seed, pieces, len(probs_D), len(probs_D)) - 0.5
        probs_D = probs_D * (1 + 4 * UNIT * noise_D)
        return (probs_D / probs_D.sum()).to(self.dtype)


def plain_world(world: World, probs: Callable[[tuple[int, ...]], Tensor] | None = None) -> World:
    """The world of plain decoding, by default from the same probabilities."""
    return PlainWorld(world.spelling, world.drafter_size, ends=world.ends, probs=probs or world.target_distribution)


def softmax_probs(world: World, emitted: tuple[int, ...]) -> Tensor:
    """The target's probabilities as whole stages compute them, from logits."""
    masked = torch.full((EXTRA,), -torch.inf)
    logits_V = torch.cat([world.target_distribution(emitted).log(), masked])
    return to_distribution(logits_V[None], SamplingParams(temperature=1.0))[0, :-EXTRA]


def distance(world: World) -> float:
    got = emitted_distribution(world, COUNT)
    assert sum(got.values()) == pytest.approx(1, abs=1e-11), "outcomes were left out"
    return total_variation(got, true_distribution(plain_world(world), COUNT))


@pytest.mark.representatives(4)
@pytest.mark.parametrize("max_draft", [1, 3])
@pytest.mark.parametrize("mode", EXACT_MODES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_two_tokens_in_float32_are_within_the_bound(vocabulary: str, mode: str, max_draft: int):
    world = World(VOCABULARIES[vocabulary], 4, mode, max_draft, seed=max_draft, dtype=torch.float32)
    assert 0 < distance(world) <= compute_bound(world), "rounding changes the distribution, within the bound"


@pytest.mark.representatives(6)
@pytest.mark.parametrize("mode", EXACT_MODES)
@pytest.mark.parametrize("seed", range(8))
def test_random_vocabularies_in_float32_are_within_the_bound(seed: int, mode: str):
    world = replace(random_world(seed), mode=mode, dtype=torch.float32)
    assert distance(world) <= compute_bound(world)


@pytest.mark.representatives(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_probabilities_near_0_and_1_are_within_the_bound(vocabulary: str, seed: int):
    world = PeakedWorld(VOCABULARIES[vocabulary], 4, "trie", 3, seed=seed, dtype=torch.float32)
    assert distance(world) <= compute_bound(world)


@pytest.mark.parametrize("seed", range(4))
def test_a_drafter_that_differs_by_roundings_is_within_the_bound(seed: int):
    world = CloseWorld(((0,), (1,), (2,), (3,)), 4, "trie", 2, seed=seed, dtype=torch.float32)
    assert distance(world) <= compute_bound(world)


@pytest.mark.representatives(3)
@pytest.mark.parametrize("mode", EXACT_MODES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_whole_stages_in_float32_are_within_the_bound(vocabulary: str, mode: str):
    """Distributions are computed from logits, by softmax in float32."""
    world = World(VOCABULARIES[vocabulary], 4, mode, 2, 3, target_support=3, drafter_support=2, dtype=torch.float32)
    got, lengths = stage_distribution(world, COUNT, remaining_tokens=4)
    assert max(lengths) == 2
    wanted = true_distribution(plain_world(world, partial(softmax_probs, world)), COUNT)
    assert total_variation(got, wanted) <= compute_bound(world)


def tree_distance(world: World, kind: str) -> float:
    """The distance of the first token after a tree of candidates."""
    tree = make_tree(grow(world, (), KINDS[kind], 2))
    probs_MV = torch.stack([world.target_distribution(path) for path in [(), *_paths_of(tree)]])
    found: Distribution = defaultdict(float)
    for weight, decisions in every_outcome(
        lambda rng: decide_tree(tree, RowDistributions(probs_MV), rng), rounded=True
    ):
        emitted = next(one.emitted for one in decisions if one.emitted is not None)
        found[(emitted,)] += weight
    return total_variation(found, true_distribution(plain_world(world), 1))


def tree_bound(world: World, kind: str) -> float:
    """The bound of docs/exactness.md for one token after a tree."""
    return (2 * len(world.spelling) + len(KINDS[kind](world, ())) + 1) * UNIT


def _paths_of(tree: Any) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for one in tree.candidates:
        paths.append((*(paths[one.parent] if one.parent >= 0 else ()), one.token))
    return paths


@pytest.mark.parametrize("kind", ["some", "one", "all mass", "impossible first"])
@pytest.mark.parametrize("seed", range(3))
def test_trees_in_float32_are_within_their_bound(kind: str, seed: int):
    world = World(NESTED, 4, seed=seed, target_support=5, dtype=torch.float32)
    if KINDS[kind](world, ()):
        assert tree_distance(world, kind) <= tree_bound(world, kind)
