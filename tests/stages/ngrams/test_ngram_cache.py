"""The n-gram cache against a naive model that sorts and measures everything again at every step."""

import gc
import math
import tracemalloc
from random import Random
from sys import getsizeof

import pytest
from cache_measuring import (
    Spelling,
    nodes_below,
    real_spelling,
    records_bytes,
    trie_bytes,
    trie_of_direct_maps,
)
from hypothesis import example, given
from hypothesis import strategies as st
from stored_states import store

from stages.ngrams.cache import Entry, NgramCache, entry_bytes
from stages.ngrams.eviction import Record
from stages.ngrams.trie import Node, Trie

PIECES = [(a, b) for a in range(3) for b in range(3)] + [(a, b, 0) for a in range(3) for b in range(3)]
TOKEN_OF = {pieces: 300 + token for token, pieces in enumerate(PIECES)}
events = st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 3) | st.integers(250, 260)), max_size=60)
budgets = st.integers(0, 6 * entry_bytes((0, 0, 0)))
# Fits to the byte: the records of the naive model must not be counted with their large counts.
FITTING = [*[((0, 0), 1)] * 7, ((0, 0), 250), ((1, 0), 1), ((1, 0, 0), 258), ((2, 0, 0), 1)]
every_policy = pytest.mark.parametrize("policy", ["lru", "lfu"])


def new_trie() -> Trie:
    trie = Trie(400, 3)
    trie.insert_all(((piece,), piece) for piece in range(2))
    return trie


DIRECT_BYTES = trie_bytes(new_trie())


class Naive:
    """The cache by the definition of the policies."""

    def __init__(self, policy: str, budget: int) -> None:
        self.policy, self.budget, self.time = policy, budget, 0
        self.state: dict[tuple[int, ...], tuple[int, int]] = {}  # touches, time of the last

    def bytes_with(self, *new: tuple[int, ...]) -> int:
        """All bytes, those of new entries without their rings."""
        trie, touched = new_trie(), Trie(400, 3)
        for pieces in [*self.state, *new]:
            trie.insert(pieces, TOKEN_OF[pieces])
        for pieces, (touches, _) in self.state.items():
            touched.insert(pieces, TOKEN_OF[pieces]).record = Record(pieces, touches)
        return trie_bytes(trie) - DIRECT_BYTES + records_bytes(touched, self.policy) + len(new) * getsizeof(Record(()))

    def observe(self, pieces: tuple[int, ...], times: int) -> None:
        self.time += 1
        if pieces not in self.state and not self.evict_for(pieces):
            return
        self.state[pieces] = (self.state.get(pieces, (0, 0))[0] + times, self.time)
        while self.bytes_with() > self.budget:
            self.state.pop(min(self.state, key=self.worth))

    def evict_for(self, pieces: tuple[int, ...]) -> bool:
        if self.bytes_with(pieces) - self.bytes_with() > self.budget:
            return False
        while self.state and self.bytes_with(pieces) > self.budget:
            self.state.pop(min(self.state, key=self.worth))
        return self.bytes_with(pieces) <= self.budget

    def worth(self, pieces: tuple[int, ...]) -> tuple[int, ...]:
        touches, time = self.state[pieces]
        return (time,) if self.policy == "lru" else (touches, time)


def new_cache(policy: str, budget: float = math.inf) -> tuple[NgramCache, Trie]:
    trie = new_trie()
    return NgramCache(trie, budget, policy), trie


def complete(node: Node, path: tuple[int, ...] = ()) -> dict[tuple[int, ...], int]:
    found = {path: node.token} if node.token is not None else {}
    for piece, child in node.children.items():
        found |= complete(child, (*path, piece))
    return found


@every_policy
@given(events, budgets)
@example(FITTING, 2664)
def test_the_cache_holds_what_the_policy_keeps_within_its_budget(policy: str, events, budget: int):
    cache, trie = new_cache(policy, budget)
    naive = Naive(policy, budget)
    for pieces, times in events:
        cache.observe(pieces, TOKEN_OF[pieces], times)
        naive.observe(pieces, times)
        held = {pieces: touches for pieces, (touches, _) in naive.state.items()}
        assert {entry.pieces: entry.count for entry in cache.entries()} == held
        assert complete(trie.root) == {(0,): 0, (1,): 1} | {pieces: TOKEN_OF[pieces] for pieces in held}
        assert cache.bytes == trie_bytes(trie) - DIRECT_BYTES + records_bytes(trie, policy) <= budget
        assert len(cache) == len(held)


@pytest.mark.parametrize(("policy", "kept"), [("unbounded", True), ("off", False)])
@given(events)
def test_an_unbounded_cache_keeps_everything_and_one_that_is_off_nothing(policy: str, kept: bool, events):
    cache, _ = new_cache(policy, 1000)
    cache.fill(Entry(pieces, TOKEN_OF[pieces], times) for pieces, times in events[:1])
    for pieces, times in events[1:]:
        cache.observe(pieces, TOKEN_OF[pieces], times)
    total = {pieces: sum(times for seen, times in events if seen == pieces) for pieces, _ in events if kept}
    assert {entry.pieces: entry.count for entry in cache.entries()} == total
    assert (cache.bytes > 0, cache.version) == (len(total) > 0, len(total))


@given(st.lists(st.sampled_from(PIECES), unique=True))
def test_the_version_counts_what_comes_and_what_goes(found):
    cache, _ = new_cache("lru")
    for pieces in found * 2:
        cache.observe(pieces, TOKEN_OF[pieces])
    assert cache.version == len(found)
    small, _ = new_cache("lru", 2 * entry_bytes((0, 0)))
    for pieces in found:
        version, before = small.version, set(small.entries())
        small.observe(pieces, TOKEN_OF[pieces])
        assert small.version - version == len(before ^ set(small.entries()))


@every_policy
def test_of_too_many_saved_entries_those_touched_most_are_kept_and_nothing_is_evicted(policy: str):
    cache, _ = new_cache(policy, 3 * entry_bytes((0, 0)))
    cache.fill(Entry(pieces, TOKEN_OF[pieces], count) for count, pieces in enumerate(PIECES[:9], start=1))
    kept = [entry.count for entry in cache.entries()]
    assert kept == list(range(9, 9 - len(kept), -1))
    assert 3 <= len(kept) < 9
    assert cache.version <= len(kept) + 2, "all that was inserted, and one more that did not fit"


@every_policy
def test_of_loaded_entries_the_least_touched_leaves_first(policy: str):
    cache, _ = new_cache(policy)
    cache.fill([Entry((0, 0), 300, 5), Entry((1, 1), 304, 9), Entry((2, 2), 308, 2)])
    assert cache._eviction.victim().pieces == (2, 2)


def observe_all(cache: NgramCache, found: list[tuple[tuple[int, ...], int]]) -> None:
    for pieces, times in found:
        cache.observe(pieces, TOKEN_OF[pieces], times)


@every_policy
@given(events, events)
def test_filling_leaves_present_entries_as_they_are(policy: str, before, found):
    cache, _ = new_cache(policy, 6 * entry_bytes((0, 0)))
    observe_all(cache, before)
    held = cache.entries()
    cache.fill(Entry(pieces, TOKEN_OF[pieces], times) for pieces, times in found)
    assert set(cache.entries()) >= set(held)


@every_policy
@pytest.mark.parametrize("budget", [4 * entry_bytes((0, 0)), math.inf])
@given(events, events, events)
def test_a_restored_cache_continues_like_the_saved_one(policy: str, budget: float, before, other, after):
    first, first_trie = new_cache(policy, budget)
    second, second_trie = new_cache(policy, budget)
    observe_all(first, before)
    observe_all(second, other)  # entries that the configuration may have filled in
    second.load_state_dict(store(first.state_dict()))
    for call in [[], *([one] for one in after)]:
        observe_all(first, call)
        observe_all(second, call)
        assert (first.entries(), first.bytes, first.version) == (second.entries(), second.bytes, second.version)
        # in the order in which sums over tokens visit them
        members = [[node.members for node in nodes_below(trie.root)] for trie in (first_trie, second_trie)]
        assert members[0] == members[1]


def trace_memory(
    spelling: Spelling, drafter_size: int, policy: str, budget: float, steps: int
) -> list[tuple[int, int, int]]:
    """(entries, `bytes`, what Python has allocated) at four moments of a stream with common and rare n-grams."""
    random = Random(1)
    ngrams = [token for token, pieces in enumerate(spelling) if pieces and len(pieces) > 1]
    random.shuffle(ngrams)
    stream = random.choices(ngrams, [1 / rank for rank in range(1, len(ngrams) + 1)], k=steps)
    trie = trie_of_direct_maps(spelling, drafter_size)
    read_everything(trie)
    gc.collect()
    tracemalloc.start()
    try:
        begin, found = tracemalloc.get_traced_memory()[0], []
        cache = NgramCache(trie, budget, policy)
        for number, token in enumerate(stream, start=1):
            cache.observe(spelling[token], int(str(token)))  # a number of its own, as one that comes from a tensor
            if number % (steps // 4) == 0:
                read_everything(trie)
                gc.collect()
                found.append((len(cache), cache.bytes, tracemalloc.get_traced_memory()[0] - begin))
        return found
    finally:
        tracemalloc.stop()


def read_everything(trie: Trie) -> None:
    assert trie.group_of_token_V.numel()
    assert all(node.members for node in nodes_below(trie.root))


def assert_measured(moments: list[tuple[int, int, int]]) -> None:
    for entries, counted, allocated in moments:
        assert entries > 200
        assert counted == pytest.approx(allocated, rel=0.02)


@pytest.mark.sweep
@pytest.mark.representatives(1)
@every_policy
def test_the_bytes_are_what_python_allocates_for_real_vocabularies(policy: str):
    moments = trace_memory(*real_spelling(), policy, 700_000, 8_000)
    assert_measured(moments)
    assert moments[-1][1] > 0.99 * 700_000
