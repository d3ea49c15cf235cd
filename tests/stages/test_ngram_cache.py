"""The n-gram cache against a naive model that sorts everything anew at every step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.ngram_cache import (
    EVICTIONS,
    Entry,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    NgramCache,
    entry_bytes,
)
from stages.trie import Node, Trie

PIECES = [(a, b) for a in range(3) for b in range(3)] + [(a, b, 0) for a in range(3) for b in range(3)]
TOKEN_OF = {pieces: token for token, pieces in enumerate(PIECES)}
events = st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 3)), max_size=60)
budgets = st.integers(0, 6 * entry_bytes((0, 0, 0)))
every_policy = pytest.mark.parametrize("policy", EVICTIONS)


class Naive:
    """What is cached, by the definition of the policies."""

    def __init__(self, policy: str, budget: int) -> None:
        self.policy, self.budget, self.time = policy, budget, 0
        self.state: dict[tuple[int, ...], tuple[int, int]] = {}  # touches, time of the last

    @property
    def bytes(self) -> int:
        return sum(entry_bytes(pieces) for pieces in self.state)

    def observe(self, pieces: tuple[int, ...], times: int) -> None:
        if entry_bytes(pieces) > self.budget:
            return
        self.time += 1
        while pieces not in self.state and self.bytes + entry_bytes(pieces) > self.budget:
            self.state.pop(min(self.state, key=self.worth))
        self.state[pieces] = (self.state.get(pieces, (0, 0))[0] + times, self.time)

    def worth(self, pieces: tuple[int, ...]) -> tuple[int, ...]:
        touches, time = self.state[pieces]
        return (time,) if self.policy == "lru" else (touches, time)


def new_cache(policy: str, budget: int) -> tuple[NgramCache, Trie]:
    trie = Trie(len(PIECES), 3)
    return NgramCache(trie, budget, EVICTIONS[policy]()), trie


def complete(node: Node, path: tuple[int, ...] = ()) -> dict[tuple[int, ...], int]:
    found = {path: node.token} if node.token is not None else {}
    for piece, child in node.children.items():
        found |= complete(child, (*path, piece))
    return found


@every_policy
@given(events, budgets)
def test_the_cache_holds_what_the_policy_says_within_its_budget(policy: str, events, budget: int):
    cache, trie = new_cache(policy, budget)
    naive = Naive(policy, budget)
    for pieces, times in events:
        cache.observe(pieces, TOKEN_OF[pieces], times)
        naive.observe(pieces, times)
        assert {entry.pieces: entry.count for entry in cache.entries()} == {
            pieces: touches for pieces, (touches, _) in naive.state.items()
        }
        assert cache.bytes == naive.bytes <= budget
        assert len(cache) == len(naive.state)
        assert complete(trie.root) == {entry.pieces: entry.token for entry in cache.entries()}


@every_policy
@given(events, budgets)
def test_the_version_counts_insertions_and_evictions(policy: str, events, budget: int):
    cache, trie = new_cache(policy, budget)
    for pieces, times in events:
        before, version = set(complete(trie.root)), cache.version
        cache.observe(pieces, TOKEN_OF[pieces], times)
        assert cache.version - version == len(before ^ set(complete(trie.root)))


@every_policy
@given(events, budgets)
def test_what_is_saved_and_loaded_again_is_the_same(policy: str, events, budget: int):
    cache, _ = new_cache(policy, budget)
    for pieces, times in events:
        cache.observe(pieces, TOKEN_OF[pieces], times)
    again, _ = new_cache(policy, budget)
    again.load(cache.entries())
    assert again.entries() == cache.entries()


def test_of_too_many_saved_entries_those_touched_most_are_kept():
    for policy in EVICTIONS:
        cache, _ = new_cache(policy, 3 * entry_bytes((0, 0)))
        cache.load(Entry(pieces, TOKEN_OF[pieces], count) for count, pieces in enumerate(PIECES[:9], start=1))
        assert [entry.count for entry in cache.entries()] == [9, 8, 7]


def test_entries_are_listed_most_touched_first():
    cache, _ = new_cache("lru", 10_000)
    for pieces, times in ((PIECES[0], 2), (PIECES[1], 5), (PIECES[2], 2)):
        cache.observe(pieces, TOKEN_OF[pieces], times)
    assert cache.entries() == [Entry(PIECES[1], 1, 5), Entry(PIECES[0], 0, 2), Entry(PIECES[2], 2, 2)]


def test_an_entry_above_the_whole_budget_evicts_nothing():
    cache, _ = new_cache("lru", entry_bytes((0, 0)))
    cache.observe((0, 1), TOKEN_OF[0, 1])
    cache.observe((0, 1, 0), TOKEN_OF[0, 1, 0])
    assert [entry.pieces for entry in cache.entries()] == [(0, 1)]


def test_the_policies_differ():
    kept = {}
    for policy in EVICTIONS:
        cache, _ = new_cache(policy, 2 * entry_bytes((0, 0)))
        for pieces in (PIECES[0], PIECES[0], PIECES[1], PIECES[2]):
            cache.observe(pieces, TOKEN_OF[pieces])
        kept[policy] = {entry.pieces for entry in cache.entries()}
    assert kept == {"lru": {PIECES[1], PIECES[2]}, "lfu": {PIECES[0], PIECES[2]}}


def test_the_frequency_heap_stays_small_however_often_an_entry_is_touched():
    order = LeastFrequentlyUsed()
    for _ in range(10_000):
        order.touch((1, 2))
    assert len(order._heap) < 200
    assert order.victim() == (1, 2)


def test_recency_is_that_of_the_last_touch():
    order = LeastRecentlyUsed()
    for pieces in ((0, 0), (1, 1), (0, 0)):
        order.touch(pieces)
    assert [order.victim(), order.victim()] == [(1, 1), (0, 0)]


def test_longer_entries_take_more_bytes():
    assert 0 < entry_bytes((1, 2)) < entry_bytes((1, 2, 3)) < entry_bytes((1, 2, 3, 4))
