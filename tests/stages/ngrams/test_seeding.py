"""Entries that fill a cache before the first prompt."""

from itertools import pairwise

from cache_measuring import trie_of_direct_maps
from hypothesis import given
from hypothesis import strategies as st

from stages.ngrams.cache import Entry, NgramCache, count_text_ngrams, entry_bytes

SPELLING = ((0,), (1, 0, 2), None, (0, 1), (1,), (2, 2), (1, 0), ())


@given(st.lists(st.integers(0, 9)))
def test_a_text_gives_its_ngrams_with_their_counts_the_commonest_first_then_by_id(tokens: list[int]):
    found = count_text_ngrams(tokens, SPELLING)
    assert {entry.token: entry.count for entry in found} == {n: tokens.count(n) for n in (1, 3, 5, 6) if n in tokens}
    assert all(entry.pieces == SPELLING[entry.token] for entry in found)
    assert all((-left.count, left.token) < (-right.count, right.token) for left, right in pairwise(found))


def test_under_lfu_what_a_text_has_often_outlasts_what_the_stream_has_once():
    trie = trie_of_direct_maps(SPELLING, 3)
    cache = NgramCache(trie, 2 * entry_bytes((0, 1)))
    cache.fill(count_text_ngrams([3] * 9, SPELLING))
    for token in (5, 6) * 4:
        cache.observe(SPELLING[token], token)
    assert cache.version > 2 * len(cache), "entries must have left"
    assert cache.entries()[0] == Entry((0, 1), 3, 9)
