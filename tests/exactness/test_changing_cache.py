"""Exactness while the cache changes between blocks, and with several targets in parallel on one drafter.

The active entries of a block depend on what earlier blocks emitted: entries are added, and others are evicted for them.
Every outcome of the production stages is enumerated, as in `test_enumeration`.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
import torch
from enumeration import (
    EXACT,
    Distribution,
    World,
    add_up,
    difference,
    emitted_distribution,
    every_outcome,
    random_distribution,
    true_distribution,
)
from whole_stages import Stages, new_row, run_block, stages_of

from stages.contract.blocks import SequenceState
from stages.ngrams.cache import NgramCache
from stages.sampling.random_source import RandomSource, SeededRandomSource

BIGRAMS = ((0,), (1,), (0, 1), (1, 0), (1, 1), None)
PREFIXES = ((0,), (0, 1), (0, 1, 1), (1, 0), (1, 0, 1), (1,), None)
NO_DIRECT = ((0, 0), (0, 0, 1), (1, 1, 1), (1, 0), None)
VOCABULARIES = {"bigrams": BIGRAMS, "prefixes": PREFIXES, "no-direct": NO_DIRECT}
every_policy = pytest.mark.parametrize("policy", ["lru", "lfu"])


def world_of(vocabulary: str, policy: str, entries: int, seed: int, **changed: object) -> World:
    world = World(
        VOCABULARIES[vocabulary], 2, max_draft=2, seed=seed, seeded=False, cache_entries=entries,
        policy=policy, target_support=3, drafter_support=2,
    )  # fmt: skip
    return replace(world, **changed)


@every_policy
@pytest.mark.parametrize("entries", [1, 2, 3])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_four_tokens_have_the_targets_distribution_while_entries_come_and_go(
    policy: str, vocabulary: str, entries: int
):
    world = world_of(vocabulary, policy, entries, seed=entries)
    assert difference(emitted_distribution(world, 4), true_distribution(world, 4)) < EXACT


@dataclass
class Changes:
    """The largest numbers of blocks, insertions and evictions over all outcomes."""

    blocks: int = 0
    insertions: int = 0
    evictions: int = 0

    def note(self, cache: NgramCache, blocks: int) -> None:
        evictions = (cache.version - len(cache)) // 2
        self.blocks = max(self.blocks, blocks)
        self.insertions = max(self.insertions, cache.version - evictions)
        self.evictions = max(self.evictions, evictions)


def admit(world: World, rng: RandomSource, remaining_tokens: int) -> tuple[Stages, list[SequenceState]]:
    stages, row = stages_of(world), new_row(rng, remaining_tokens)
    for stage in stages:
        stage.admit(row)
    return stages, [row]


def stage_distribution(world: World, count: int, changes: Changes) -> Distribution:
    """The distribution of the first tokens that whole stages emit, one cache from the first block to the last."""

    def run(rng: RandomSource) -> tuple[int, ...]:
        stages, (row,) = admit(world, rng, remaining_tokens=count + 2)
        while row.emitted < count:
            run_block(stages, [row])
        changes.note(stages[1].cache, row.block)
        return tuple(row.tokens[row.prompt_length :])[:count]

    return add_up(run)


@pytest.mark.representatives(2)
@every_policy
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_whole_stages_over_several_blocks_with_one_cache(policy: str, vocabulary: str):
    world, changes = world_of(vocabulary, policy, 1, seed=3, max_draft=1, target_support=2), Changes()
    assert difference(stage_distribution(world, 4, changes), true_distribution(world, 4)) < EXACT
    assert changes.blocks >= 3
    assert changes.insertions >= 2
    assert changes.evictions >= 1


# Several targets: each has its own vocabulary, cache and stages; the drafter's weights are one object.


class Weights:
    """One drafter for all targets: a distribution over all of its pieces after any text."""

    def __init__(self, size: int) -> None:
        self.size = size

    def distribution(self, pieces: tuple[int, ...]) -> torch.Tensor:
        return random_distribution(77, pieces, self.size, self.size)


@dataclass(frozen=True)
class SharedDrafter(World):
    """A world whose drafter has the given weights."""

    weights: Weights | None = None

    def drafter_distribution(self, pieces: tuple[int, ...]) -> torch.Tensor:
        """The shared distribution over the pieces that this target allows."""
        assert self.weights is not None
        distribution, kept = self.weights.distribution(pieces), torch.zeros(self.drafter_size, dtype=torch.float64)
        kept[self.allowed] = distribution[self.allowed]
        return kept / kept.sum()


def two_targets(policy: str, **changed: object) -> tuple[SharedDrafter, SharedDrafter]:
    weights = Weights(3)
    common = {
        "max_draft": 2, "seeded": False, "cache_entries": 1, "policy": policy,
        "target_support": 3, "weights": weights, **changed,
    }  # fmt: skip
    return (
        SharedDrafter(((0,), (1,), (0, 1), (0, 1, 1), None), 3, seed=21, **common),
        SharedDrafter(((2,), (0, 1), (1, 2), (0,), (0, 2), None), 3, seed=22, **common),
    )


def interleave(
    worlds: tuple[World, World], rng: tuple[RandomSource, RandomSource], count: int
) -> list[tuple[int, ...]]:
    """Run one block of each target in turn, until both have emitted `count` tokens."""
    runners = [admit(world, own, remaining_tokens=6) for world, own in zip(worlds, rng, strict=True)]
    rows = [rows[0] for _, rows in runners]
    while any(row.emitted < count for row in rows):
        for stages, running in runners:
            if running:
                run_block(stages, running)
    return [tuple(row.tokens[row.prompt_length :])[:count] for row in rows]


def interleaved_distribution(worlds: tuple[World, World], place: int, seed: int) -> Distribution:
    """The distribution of the first two tokens of one target while the other's draws are fixed."""

    def run(rng: RandomSource) -> tuple[int, ...]:
        other = SeededRandomSource(seed, 0)
        return interleave(worlds, (rng, other) if place == 0 else (other, rng), 2)[place]

    return add_up(run)


@pytest.mark.slow
@pytest.mark.representatives(1)
@every_policy
@pytest.mark.parametrize("place", [0, 1])
def test_a_target_interleaved_with_another_keeps_its_own_distribution(policy: str, place: int):
    worlds = two_targets(policy)
    distribution = interleaved_distribution(worlds, place, seed=place)
    assert difference(distribution, true_distribution(worlds[place], 2)) < EXACT
    assert difference(distribution, true_distribution(worlds[1 - place], 2)) > 0.01, "the targets must differ"
    assert worlds[0].weights is worlds[1].weights


@every_policy
def test_the_texts_of_two_targets_are_independent(policy: str):
    worlds = two_targets(policy, max_draft=1, target_support=2)
    joint: Distribution = defaultdict(float)
    for weight, texts in every_outcome(lambda rng: interleave(worlds, (rng, rng), 1)):
        joint[texts[0] + texts[1]] += weight
    first, second = (true_distribution(world, 1) for world in worlds)
    expected = {left + right: first[left] * second[right] for left in first for right in second}
    assert difference(joint, expected) < EXACT
