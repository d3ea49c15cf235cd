"""Two ways of translating the same blocks: they propose the same tokens and remember the same n-grams."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_making import byte_level, space_mark

from stages.ngrams.cache import NgramCache
from stages.ngrams.eviction import EVICTIONS
from stages.ngrams.trie import build_direct_trie
from stages.tools.retokenize import (
    RetokenizingTranslation,
    TextBlock,
    TrieTranslation,
    random_distributions,
    text_blocks,
)
from stages.vocabulary.pair import Pair, pair
from stages.vocabulary.tokenizer_view import Vocabulary

MERGES = [(b"a", b"b"), (b"ab", b"c"), (b" ", b"abc"), (b"\xe2\x82", b"\xac"), (b"\xe2", b"\x82")]
TEXT = "abc abc ab €, abcab c € " * 12


@pytest.fixture(scope="module")
def target() -> Vocabulary:
    return Vocabulary(byte_level(MERGES), "target")


@pytest.fixture(scope="module", params=["bytes", "marks"])
def drafter(request) -> Vocabulary:
    made = byte_level(MERGES[:1]) if request.param == "bytes" else space_mark(["▁", "a", "b", "c"], [("a", "b")])
    return Vocabulary(made, request.param)


@pytest.fixture(scope="module")
def words(target: Vocabulary, drafter: Vocabulary) -> Pair:
    return pair(target, drafter)


def both(target: Vocabulary, drafter: Vocabulary, words: Pair):
    trie = build_direct_trie(words.pieces, target.size, words.drafter_size)
    cache = NgramCache(trie, 1e6, EVICTIONS["lfu"]())
    return TrieTranslation(words, trie, cache), RetokenizingTranslation(target, drafter, words), cache


def bytes_of(words: Vocabulary, ids) -> bytes:
    return b"".join(words.bytes_of(index) or b"" for index in ids)


def blocks_of(target: Vocabulary, drafter: Vocabulary, text: str = TEXT, most: int = 40) -> list[TextBlock]:
    return text_blocks(target, drafter, text, context=20, drafted=5, most=most)


def test_blocks_follow_one_another_through_the_text(target: Vocabulary, drafter: Vocabulary):
    blocks = blocks_of(target, drafter)
    assert len(blocks) > 10
    tokens = target.encode_text(TEXT)
    place = 20
    for block in blocks:
        assert block.context == tuple(tokens[place - 20 : place])
        assert block.emitted == tuple(tokens[place : place + len(block.emitted)])
        assert len(block.draft) == 5
        place += len(block.emitted)


def test_a_draft_is_the_text_that_follows_and_the_emitted_tokens_reach_over_it(target: Vocabulary, drafter: Vocabulary):
    whole = TEXT.encode()
    for block in blocks_of(target, drafter):
        context = bytes_of(target, block.context)
        drafted, emitted = bytes_of(drafter, block.draft), bytes_of(target, block.emitted)
        assert bytes_of(drafter, block.context_pieces).strip() == context.strip()
        assert drafted in whole[whole.index(context) + len(context) :]
        assert len(emitted) >= len(drafted) - max(len(spelt or b"") for spelt in target.token_bytes)


def test_too_short_a_text_gives_no_blocks(target: Vocabulary, drafter: Vocabulary):
    assert blocks_of(target, drafter, "abc") == []
    assert len(blocks_of(target, drafter, most=3)) == 3


def test_both_ways_remember_the_same_ngrams(target: Vocabulary, drafter: Vocabulary, words: Pair):
    ours, papers, cache = both(target, drafter, words)
    for block in blocks_of(target, drafter):
        ours(block)
        papers(block)
    remembered = {entry.pieces: entry.token for entry in cache.entries()}
    assert len(remembered) > 1
    # In context the paper's way may cut a token's bytes together with what precedes it; elsewhere they agree.
    spelt_alone = {
        pieces: token for pieces, token in papers.known.items() if bytes_of(drafter, pieces) == target.bytes_of(token)
    }
    assert spelt_alone == remembered


def test_both_ways_propose_the_same_tokens_where_no_ngram_begins_like_another(
    target: Vocabulary, drafter: Vocabulary, words: Pair
):
    ours, papers, _ = both(target, drafter, words)
    agreed = 0
    for block in blocks_of(target, drafter):
        ours(block)
        papers(block)
    for block in blocks_of(target, drafter):
        tokens = [proposed.token for proposed in ours.propose(block.draft).tokens]
        if None not in tokens:
            assert tokens == papers.propose(block.draft)
            agreed += 1
    assert agreed > 5


def test_both_ways_give_the_emitted_text_in_pieces(target: Vocabulary, drafter: Vocabulary, words: Pair):
    ours, papers, _ = both(target, drafter, words)
    for block in blocks_of(target, drafter):
        emitted = bytes_of(target, block.emitted)
        assert bytes_of(drafter, ours(block)) == emitted
        assert bytes_of(drafter, papers(block)).strip() == (bytes_of(target, block.context) + emitted).strip()


def test_the_paper_s_way_merges_the_longest_known_span(target: Vocabulary, drafter: Vocabulary, words: Pair):
    _, papers, _ = both(target, drafter, words)
    a, b = (words.pieces[ord(letter)][0] for letter in "ab")
    assert papers.propose([a, b, a]) == [ord("a"), ord("b"), ord("a")]
    papers.known |= {(a, b): 1000, (a, b, a): 2000}
    assert papers.propose([a, b, a, a, b, b]) == [2000, 1000, ord("b")]


@given(st.text(alphabet="ab c€é", max_size=120))
def test_any_text_can_be_cut_into_blocks(target: Vocabulary, drafter: Vocabulary, text: str):
    blocks = text_blocks(target, drafter, text, context=2, drafted=3, most=50)
    tokens = target.encode_text(text)
    assert [token for block in blocks for token in block.emitted] == tokens[2:][: sum(len(b.emitted) for b in blocks)]


def test_levels_are_those_of_the_given_distributions(target: Vocabulary, drafter: Vocabulary, words: Pair):
    ours, _, _ = both(target, drafter, words)
    block = blocks_of(target, drafter)[0]
    draft_probs_KD, target_probs_NV = random_distributions(5, drafter.size, 0), random_distributions(6, target.size, 1)
    levels = ours.levels(block, draft_probs_KD, target_probs_NV)
    assert len(levels) == len(ours.propose(block.draft).tokens)
    assert levels[0][0][0] == pytest.approx(float(draft_probs_KD[0, block.draft[0]]))


def test_random_distributions_sum_to_one_and_depend_on_the_seed():
    target_probs_NV = random_distributions(3, 50, 0)
    assert target_probs_NV.sum(-1).tolist() == pytest.approx([1.0] * 3)
    assert not target_probs_NV.equal(random_distributions(3, 50, 1))
