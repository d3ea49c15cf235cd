"""The n-gram cache against a naive model that sorts everything again at every step."""

import gc
import math
import tracemalloc
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT
from stored_states import store

from stages.engine.models.huggingface import load_tokenizer
from stages.ngrams.cache import ENTRY_BYTES, Entry, NgramCache, count_text_ngrams
from stages.ngrams.trie import Node, Trie, build_direct_trie
from stages.vocabulary.pair import pair
from stages.vocabulary.tokenizer_view import Vocabulary

TOKENIZERS = ROOT.parent / "shared" / "tokenizers"  # next to the repository, where there is one
PIECES = [(a, b) for a in range(3) for b in range(3)] + [(a, b, 0) for a in range(3) for b in range(3)]
TOKEN_OF = {pieces: 300 + token for token, pieces in enumerate(PIECES)}
events = st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 3)), max_size=60)
every_policy = pytest.mark.parametrize("policy", ["lru", "lfu"])


class Naive:
    """The cache by the definition of the policies."""

    def __init__(self, policy: str, most: int) -> None:
        self.policy, self.most, self.time = policy, most, 0
        self.state: dict[tuple[int, ...], tuple[int, int]] = {}  # touches, time of the last

    def observe(self, pieces: tuple[int, ...], times: int) -> None:
        self.time += 1
        if pieces not in self.state and len(self.state) == self.most:
            self.state.pop(min(self.state, key=self.worth), None)
        self.state[pieces] = (self.state.get(pieces, (0, 0))[0] + times, self.time)

    def worth(self, pieces: tuple[int, ...]) -> tuple[int, ...]:
        touches, time = self.state[pieces]
        return (time,) if self.policy == "lru" else (touches, time)


def new_cache(policy: str, entries: float = math.inf) -> tuple[NgramCache, Trie]:
    trie = Trie(400, 3)
    trie.insert_all(((piece,), piece) for piece in range(2))
    return NgramCache(trie, entries * ENTRY_BYTES, policy), trie


def observe_all(cache: NgramCache, found: list[tuple[tuple[int, ...], int]]) -> None:
    for pieces, times in found:
        cache.observe(pieces, TOKEN_OF[pieces], times)


def complete(node: Node, path: tuple[int, ...] = ()) -> dict[tuple[int, ...], int]:
    found = {path: node.token} if node.token is not None else {}
    for piece, child in node.children.items():
        found |= complete(child, (*path, piece))
    return found


def members(node: Node) -> list[tuple[int, ...]]:
    """The members of every node, in the order in which sums over tokens visit them."""
    return [node.members, *(below for child in node.children.values() for below in members(child))]


@every_policy
@given(events, st.integers(1, 6))
def test_the_cache_holds_what_the_policy_keeps_within_its_budget(policy: str, events, most: int):
    cache, trie = new_cache(policy, most)
    naive = Naive(policy, most)
    for pieces, times in events:
        version, before = cache.version, set(complete(trie.root))
        cache.observe(pieces, TOKEN_OF[pieces], times)
        naive.observe(pieces, times)
        held = {pieces: touches for pieces, (touches, _) in naive.state.items()}
        assert {entry.pieces: entry.count for entry in cache.entries()} == held
        assert complete(trie.root) == {(0,): 0, (1,): 1} | {pieces: TOKEN_OF[pieces] for pieces in held}
        assert len(cache) == len(held) <= most
        assert cache.bytes == len(held) * ENTRY_BYTES
        assert cache.version - version == len(before ^ set(complete(trie.root)))


@pytest.mark.parametrize(("policy", "kept"), [("unbounded", True), ("off", False)])
@given(events)
def test_an_unbounded_cache_keeps_everything_and_one_that_is_off_nothing(policy: str, kept: bool, events):
    cache, _ = new_cache(policy, 2)
    cache.fill(Entry(pieces, TOKEN_OF[pieces], times) for pieces, times in events[:1])
    observe_all(cache, events[1:])
    total = {pieces: sum(times for seen, times in events if seen == pieces) for pieces, _ in events if kept}
    assert {entry.pieces: entry.count for entry in cache.entries()} == total
    assert (cache.bytes > 0, cache.version) == (len(total) > 0, len(total))


@every_policy
def test_of_too_many_saved_entries_those_touched_most_are_kept_and_nothing_is_evicted(policy: str):
    cache, _ = new_cache(policy, 3)
    cache.fill(Entry(pieces, TOKEN_OF[pieces], count) for count, pieces in enumerate(PIECES[:9], start=1))
    assert [entry.count for entry in cache.entries()] == [9, 8, 7]
    assert cache.version == 3
    cache.observe(PIECES[0], TOKEN_OF[PIECES[0]])
    assert PIECES[6] not in [entry.pieces for entry in cache.entries()], "the least touched one leaves first"


@every_policy
@given(events, events)
def test_filling_leaves_present_entries_as_they_are(policy: str, before, found):
    cache, _ = new_cache(policy, 6)
    observe_all(cache, before)
    held = cache.entries()
    cache.fill(Entry(pieces, TOKEN_OF[pieces], times) for pieces, times in found)
    assert set(cache.entries()) >= set(held)


@every_policy
@pytest.mark.parametrize("most", [4, math.inf])
@given(events, events, events)
def test_a_restored_cache_continues_like_the_saved_one(policy: str, most: float, before, other, after):
    first, first_trie = new_cache(policy, most)
    second, second_trie = new_cache(policy, most)
    observe_all(first, before)
    observe_all(second, other)  # entries that the configuration may have filled in
    second.load_state_dict(store(first.state_dict()))
    for call in [[], *([one] for one in after)]:
        observe_all(first, call)
        observe_all(second, call)
        assert (first.entries(), first.version) == (second.entries(), second.version)
        assert members(first_trie.root) == members(second_trie.root)


SPELLING = ((0,), (1, 0, 2), None, (0, 1), (1,), (2, 2), (1, 0), ())


@given(st.lists(st.integers(0, 9)))
def test_a_text_gives_its_ngrams_with_their_counts_the_commonest_first_then_by_id(tokens: list[int]):
    found = count_text_ngrams(tokens, SPELLING)
    assert {entry.token: entry.count for entry in found} == {n: tokens.count(n) for n in (1, 3, 5, 6) if n in tokens}
    assert all(entry.pieces == SPELLING[entry.token] for entry in found)
    assert all((-left.count, left.token) < (-right.count, right.token) for left, right in pairwise(found))


@pytest.mark.sweep
@pytest.mark.representatives(1)
@every_policy
@pytest.mark.skipif(not TOKENIZERS.is_dir(), reason="needs the tokenizers of Llama 2 and 3 in ../shared/tokenizers")
def test_the_bytes_are_about_what_python_allocates_for_real_vocabularies(policy: str):
    target, drafter = (Vocabulary(load_tokenizer(str(TOKENIZERS / name)), name) for name in ("llama-3", "llama-2"))
    spelling = pair(target, drafter).pieces
    trie, ngrams = build_direct_trie(spelling, target.size, drafter.size), list[int]()
    ngrams += [token for token, pieces in enumerate(spelling) if pieces and len(pieces) > 1]
    gc.collect()
    tracemalloc.start()
    try:
        begin = tracemalloc.get_traced_memory()[0]
        cache = NgramCache(trie, math.inf, policy)
        for token in Random(1).choices(ngrams, [1 / rank for rank in range(1, len(ngrams) + 1)], k=8000):
            cache.observe(spelling[token], int(str(token)))  # a number of its own, as one that comes from a tensor
        members(trie.root)
        assert cache.bytes == pytest.approx(tracemalloc.get_traced_memory()[0] - begin, rel=0.2)
    finally:
        tracemalloc.stop()
