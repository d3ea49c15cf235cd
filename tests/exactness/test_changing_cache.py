"""Exactness while the cache changes between blocks, and with several targets beside each other on one drafter.

What is active in a block depends on what earlier blocks emitted: entries come, and others leave for them. Every outcome
of the production stages is enumerated, as in `test_enumeration`.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import enumeration
import pytest
import torch
from enumeration import Law, World, difference, emitted_law, every_outcome, random_law, true_law
from whole_stages import Stages, new_row, run_block, stages_of

from stages import trie
from stages.blocks import Row
from stages.draws import Draws, SeededDraws
from stages.eviction import EVICTIONS
from stages.ngram_cache import NgramCache
from stages.translate import Translate

EXACT = 1e-12
BUDGET_OF_ONE = {"lru": 490, "lfu": 720}  # bytes; a second entry that shares no prefix does not fit
BIGRAMS = ((0,), (1,), (0, 1), (1, 0), (1, 1), None)
PREFIXES = ((0,), (0, 1), (0, 1, 1), (1, 0), (1, 0, 1), (1,), None)
NO_DIRECT = ((0, 0), (0, 0, 1), (1, 1, 1), (1, 0), None)
VOCABULARIES = {"bigrams": BIGRAMS, "prefixes": PREFIXES, "no-direct": NO_DIRECT}


@pytest.fixture(params=["lru", "lfu"])
def policy(request, monkeypatch) -> str:
    """The order of leaving in the caches of all worlds, and budgets that hold so few bigrams on direct maps."""
    monkeypatch.setattr(enumeration, "LeastRecentlyUsed", EVICTIONS[request.param])
    monkeypatch.setattr(enumeration, "entry_bytes", lambda pieces: BUDGET_OF_ONE[request.param])
    return request.param


def world_of(vocabulary: str, entries: int, seed: int, **changed: object) -> World:
    world = World(
        VOCABULARIES[vocabulary], 2, max_draft=2, seed=seed, seeded=False, cache_entries=entries,
        target_support=3, drafter_support=2,
    )  # fmt: skip
    return replace(world, **changed)


@pytest.mark.parametrize("entries", [1, 2, 3])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_four_tokens_have_the_targets_law_while_entries_come_and_go(policy: str, vocabulary: str, entries: int):
    world = world_of(vocabulary, entries, seed=entries)
    assert difference(emitted_law(world, 4), true_law(world, 4)) < EXACT


@dataclass
class Changes:
    """What happened to the caches in all outcomes."""

    blocks: int = 0
    insertions: int = 0
    evictions: int = 0

    def note(self, cache: NgramCache, blocks: int) -> None:
        evictions = (cache.version - len(cache)) // 2
        self.blocks = max(self.blocks, blocks)
        self.insertions = max(self.insertions, cache.version - evictions)
        self.evictions = max(self.evictions, evictions)


def admitted(world: World, draws: Draws, room: int) -> tuple[Stages, list[Row]]:
    stages, row = stages_of(world), new_row(draws, room)
    for stage in stages:
        stage.admit(row)
    return stages, [row]


def stage_law(world: World, count: int, changes: Changes) -> Law:
    """The law of the first tokens that whole stages emit, one cache from the first block to the last."""

    def emitted(draws: Draws) -> tuple[int, ...]:
        stages, (row,) = admitted(world, draws, room=count + 2)
        while row.emitted < count:
            run_block(stages, [row])
        changes.note(stages[1].cache, row.block)
        return tuple(row.tokens[row.prompt_length :])[:count]

    law: Law = defaultdict(float)
    for weight, tokens in every_outcome(emitted):
        law[tokens] += weight
    return law


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_whole_stages_over_several_blocks_with_one_cache(policy: str, vocabulary: str):
    world, changes = world_of(vocabulary, 1, seed=3, max_draft=1, target_support=2), Changes()
    assert difference(stage_law(world, 4, changes), true_law(world, 4)) < EXACT
    assert changes.blocks >= 3
    assert changes.insertions >= 2
    assert changes.evictions >= 1


# Several targets: each has its own vocabulary, cache and stages; the drafter's weights are one object.


class Weights:
    """One drafter for all targets: a law over all of its pieces after any text."""

    def __init__(self, size: int) -> None:
        self.size = size

    def law(self, pieces: tuple[int, ...]) -> torch.Tensor:
        return random_law(77, pieces, self.size, self.size)


@dataclass(frozen=True)
class Beside(World):
    """A world whose drafter is given."""

    weights: Weights | None = None

    def drafter_law(self, pieces: tuple[int, ...]) -> torch.Tensor:
        """The shared law on what this target allows."""
        assert self.weights is not None
        law, kept = self.weights.law(pieces), torch.zeros(self.drafter_size, dtype=torch.float64)
        kept[self.allowed] = law[self.allowed]
        return kept / kept.sum()


def two_targets(**changed: object) -> tuple[Beside, Beside]:
    weights = Weights(3)
    common = {"max_draft": 2, "seeded": False, "cache_entries": 1, "target_support": 3, "weights": weights, **changed}
    return (
        Beside(((0,), (1,), (0, 1), (0, 1, 1), None), 3, seed=21, **common),
        Beside(((2,), (0, 1), (1, 2), (0,), (0, 2), None), 3, seed=22, **common),
    )


def interleaved(worlds: tuple[World, World], draws: tuple[Draws, Draws], count: int) -> list[tuple[int, ...]]:
    """One block of each target in turn, until both have emitted so many tokens."""
    lanes = [admitted(world, own, room=6) for world, own in zip(worlds, draws, strict=True)]
    rows = [rows[0] for _, rows in lanes]
    while any(row.emitted < count for row in rows):
        for stages, running in lanes:
            if running:
                run_block(stages, running)
    return [tuple(row.tokens[row.prompt_length :])[:count] for row in rows]


def law_beside(worlds: tuple[World, World], place: int, seed: int) -> Law:
    """The law of the first two tokens of one target while the other's draws are fixed."""

    def emitted(draws: Draws) -> tuple[int, ...]:
        other = SeededDraws(seed, 0)
        return interleaved(worlds, (draws, other) if place == 0 else (other, draws), 2)[place]

    law: Law = defaultdict(float)
    for weight, tokens in every_outcome(emitted):
        law[tokens] += weight
    return law


@pytest.mark.parametrize("place", [0, 1])
def test_a_target_beside_another_keeps_its_own_law(policy: str, place: int):
    worlds = two_targets()
    law = law_beside(worlds, place, seed=place)
    assert difference(law, true_law(worlds[place], 2)) < EXACT
    assert difference(law, true_law(worlds[1 - place], 2)) > 0.01, "the targets must differ"
    assert worlds[0].weights is worlds[1].weights


def test_the_texts_of_two_targets_are_independent(policy: str):
    worlds = two_targets(max_draft=1, target_support=2)
    joint: Law = defaultdict(float)
    for weight, texts in every_outcome(lambda draws: interleaved(worlds, (draws, draws), 1)):
        joint[texts[0] + texts[1]] += weight
    first, second = (true_law(world, 1) for world in worlds)
    expected = {left + right: first[left] * second[right] for left in first for right in second}
    assert difference(joint, expected) < EXACT


# The suite can fail: each of these changes what is active in a way that must not be.


def _the_cache_changes_while_a_block_is_in_flight(monkeypatch):
    call = Translate.__call__

    def too_early(self, batch):
        proposals = call(self, batch)
        for token, pieces in enumerate(self._pieces):
            if pieces and len(pieces) > 1:
                self.cache.observe(pieces, token)
        return proposals

    monkeypatch.setattr(Translate, "__call__", too_early)


def _what_is_evicted_stays_in_its_group(monkeypatch):
    remove = trie.Trie.remove

    def leaving_the_group(self, pieces):
        known = self.group_of_token_V.clone()
        remove(self, pieces)
        self._changed = {}
        assert self.group_of_token_V.equal(known)

    monkeypatch.setattr(trie.Trie, "remove", leaving_the_group)


def _members_are_not_kept_up_to_date(monkeypatch):
    monkeypatch.setattr(trie.Node, "forget_members", lambda self: None)


@pytest.mark.parametrize(
    ("mutate", "entries"),
    [
        (_the_cache_changes_while_a_block_is_in_flight, 9),  # without evictions, which would crash it
        (_what_is_evicted_stays_in_its_group, 1),
        (_members_are_not_kept_up_to_date, 1),
    ],
)
def test_changing_the_cache_in_a_wrong_way_is_found_out(policy: str, monkeypatch, mutate: Callable, entries: int):
    mutate(monkeypatch)
    worlds = [world_of(vocabulary, entries, seed) for vocabulary in ("bigrams", "prefixes") for seed in (1, 2, 3)]
    assert max(difference(emitted_law(world, 3), true_law(world, 3)) for world in worlds) > 1e-3


def test_what_one_target_changes_in_the_trie_of_another_is_found_out(policy: str, monkeypatch):
    init, shared = trie.Trie.__init__, {}

    def sharing(self, *args):
        init(self, *args)
        self._changed = shared  # what is not written to the device yet

    monkeypatch.setattr(trie.Trie, "__init__", sharing)
    worlds = two_targets(max_draft=1)
    assert max(difference(law_beside(worlds, place, 0), true_law(worlds[place], 2)) for place in (0, 1)) > 1e-3
