"""The contract of `Cache`, for every implementation and every eviction policy."""

import inspect
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_states import store

from stages.ngrams import cache as ngram_cache
from stages.ngrams.cache import Cache, Entry, NgramCache, NoCache, entry_bytes
from stages.ngrams.eviction import EVICTIONS
from stages.ngrams.trie import Node, Trie

PIECES = [(a, b, *rest) for a in range(3) for b in range(3) for rest in ((), (0,), (1, 2))]
TOKEN_OF = {pieces: 400 + token for token, pieces in enumerate(PIECES)}
SMALL, LARGE = 4 * entry_bytes((0, 0)), 100 * entry_bytes((0, 0))


def _make(policy: str, budget: float) -> Callable[[Trie], Cache]:
    return lambda trie: NgramCache(trie, budget, EVICTIONS[policy]())


CACHES: dict[str, tuple[Callable[[Trie], Cache], float]] = {
    **{
        f"{policy}-{budget}": (_make(policy, budget), budget)
        for policy in ("lru", "lfu")
        for budget in (0, SMALL, LARGE)
    },
    "unbounded": (_make("unbounded", math.inf), math.inf),
    "off": (lambda trie: NoCache(), 0),
}
every_cache = pytest.mark.parametrize(("make", "budget"), CACHES.values(), ids=list(CACHES))
entries = st.builds(
    lambda pieces, count: Entry(pieces, TOKEN_OF[pieces], count), st.sampled_from(PIECES), st.integers(1, 400)
)
calls = st.lists(
    st.one_of(
        st.tuples(st.just("observe"), entries),
        st.tuples(st.sampled_from(["fill", "load"]), st.lists(entries, max_size=12, unique_by=lambda e: e.pieces)),
    ),
    max_size=25,
)


def new_trie() -> Trie:
    trie = Trie(500, 3)
    trie.insert_all(((piece,), piece) for piece in range(2))
    return trie


def perform(cache: Cache, name: str, argument: Entry | list[Entry]) -> None:
    if isinstance(argument, Entry):
        cache.observe(argument.pieces, argument.token, argument.count)
    else:
        getattr(cache, name)(iter(argument))


def complete(node: Node, path: tuple[int, ...] = ()) -> dict[tuple[int, ...], int]:
    found = {path: node.token} if node.token is not None else {}
    for piece, child in node.children.items():
        found |= complete(child, (*path, piece))
    return found


@pytest.mark.slow
@pytest.mark.representatives(3)
@every_cache
@given(calls)
def test_after_every_call_the_trie_holds_the_direct_maps_and_the_entries_within_the_budget(make, budget, calls):
    trie = new_trie()
    cache: Cache = make(trie)
    assert cache.bytes == 0
    for call in calls:
        before, version = set(complete(trie.root)), cache.version
        perform(cache, *call)
        held = cache.entries()
        assert complete(trie.root) == {(0,): 0, (1,): 1} | {entry.pieces: entry.token for entry in held}
        assert cache.bytes <= budget
        assert (cache.bytes > 0) == (len(cache) > 0)
        assert len(cache) == len(held)
        assert cache.version - version >= len(before ^ set(complete(trie.root)))
        assert held == sorted(held, key=lambda entry: (-entry.count, entry.pieces))
        assert trie.group_of_token_V.tolist() == [
            next((pieces[0] for pieces, own in complete(trie.root).items() if own == token), 3) for token in range(500)
        ]


@pytest.mark.slow
@every_cache
@given(calls)
def test_equal_calls_leave_equal_entries_and_bytes(make, budget, calls):
    first, second = make(new_trie()), make(new_trie())
    for call in calls:
        perform(first, *call)
        perform(second, *call)
    assert (first.entries(), first.bytes, first.version) == (second.entries(), second.bytes, second.version)


@every_cache
@given(st.lists(entries, max_size=20, unique_by=lambda entry: entry.pieces))
def test_filling_keeps_existing_entries(make, budget, found):
    cache = make(new_trie())
    cache.fill(found)
    before = cache.entries()
    cache.fill(Entry(entry.pieces, entry.token, 7) for entry in [*before, *found])
    assert set(cache.entries()) >= set(before)


@pytest.mark.slow
@every_cache
@given(calls)
def test_loading_saved_entries_restores_them(make, budget, calls):
    cache, restored = make(new_trie()), make(new_trie())
    for call in calls:
        perform(cache, *call)
    restored.load(cache.entries())
    assert restored.entries() == cache.entries()


def test_no_implementation_is_missing_from_this_suite():
    found = {
        cls for _, cls in inspect.getmembers(ngram_cache, inspect.isclass)
        if {"observe", "fill", "load"} <= vars(cls).keys() and cls is not Cache
    }  # fmt: skip
    assert found == {NgramCache, NoCache} == {type(make(new_trie())) for make, _ in CACHES.values()}


def members(node: Node) -> list[tuple[int, ...]]:
    """The members of every node, in the order in which sums over tokens visit them."""
    return [node.members, *(below for child in node.children.values() for below in members(child))]


@pytest.mark.slow
@pytest.mark.representatives(3)
@every_cache
@given(calls, calls, calls)
def test_a_restored_cache_continues_like_the_saved_one(make, budget, before, other, after):
    first_trie, second_trie = new_trie(), new_trie()
    first, second = make(first_trie), make(second_trie)
    for call in before:
        perform(first, *call)
    for call in other:  # entries that the configuration may have filled in
        perform(second, *call)
    state = store(first.state_dict())
    second.load_state_dict(state)
    for call in [None, *after]:
        if call:
            perform(first, *call)
            perform(second, *call)
        assert (first.entries(), first.bytes, first.version) == (second.entries(), second.bytes, second.version)
        assert members(first_trie.root) == members(second_trie.root)
