"""Translation against a naive reference that knows the vocabulary as a dictionary."""

from collections.abc import Sequence

import pytest
from doubles import row_of
from hypothesis import given
from hypothesis import strategies as st
from torch import zeros

from stages.contract.blocks import STOP, Draft, ProposedToken, Verdict
from stages.ngrams.cache import NgramCache
from stages.ngrams.trie import Trie
from stages.translate import Translate
from stages.verification.parsing import parse, parse_longest

Spelling = tuple[tuple[int, ...], ...]
drafts = st.lists(st.integers(0, 3), max_size=9).map(tuple)
spellings = st.sets(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8).map(
    lambda found: tuple(sorted(found))
)


def trie_of(spelling: Spelling) -> Trie:
    trie = Trie(len(spelling), 4)
    trie.insert_all((pieces, token) for token, pieces in enumerate(spelling))
    return trie


def reference(spelling: Spelling, pieces: tuple[int, ...]) -> list[tuple[int | None, int, int]]:
    """(token, start, stop): take pieces while some token begins with all of them; what was taken must be a token."""
    found, start = [], 0
    while start < len(pieces):
        stop = start
        while stop < len(pieces) and any(pieces[start : stop + 1] == spelt[: stop + 1 - start] for spelt in spelling):
            stop += 1
        taken = pieces[start:stop]
        token = spelling.index(taken) if taken in spelling else None
        found.append((token, start, max(stop, start + 1)))
        if token is None:
            break
        start = stop
    return found


def reference_longest(spelling: Spelling, pieces: tuple[int, ...]) -> list[tuple[int | None, int, int]]:
    """The longest span that is a token, else one piece without a token."""
    found, start = [], 0
    while start < len(pieces):
        spans = [stop for stop in range(len(pieces), start, -1) if pieces[start:stop] in spelling]
        stop = spans[0] if spans else start + 1
        found.append((spelling.index(pieces[start:stop]) if spans else None, start, stop))
        if not spans:
            break
        start = stop
    return found


def spans(proposed: Sequence[ProposedToken]) -> list[tuple[int | None, int, int]]:
    return [(token.token, token.start, token.stop) for token in proposed]


@given(spellings, drafts)
def test_tokens_are_those_of_the_reference(spelling: Spelling, pieces: tuple[int, ...]):
    assert spans(parse(trie_of(spelling), pieces)) == reference(spelling, pieces)
    assert spans(parse_longest(trie_of(spelling), pieces)) == reference_longest(spelling, pieces)


@given(spellings, drafts)
def test_the_tests_follow_the_pieces_of_each_token_and_then_its_stop(spelling: Spelling, pieces: tuple[int, ...]):
    trie, before = trie_of(spelling), None
    for proposed in parse(trie, pieces):
        taken = pieces[proposed.start : proposed.stop]
        node, options = trie.root, list(taken)
        for test, option in zip(proposed.tests, options, strict=False):
            assert (test.node, test.option) == (node, option)
            assert pieces[test.position] == option
            node = node.children.get(option)
        if node is not None and node.children:
            last = proposed.tests[-1]
            assert (last.node, last.option) == (node, STOP)
            assert last.position == (proposed.stop if proposed.stop < len(pieces) else None)
            options.append(STOP)
        assert len(proposed.tests) == len(options)
        assert proposed.tests[0].excluded is before, "the node whose children the last STOP ruled out"
        looked_ahead = proposed.tests[-1].option == STOP and proposed.tests[-1].position is not None
        before = proposed.tests[-1].node if looked_ahead else None


@given(spellings, drafts)
def test_every_piece_of_a_translated_token_is_tested_by_the_distribution_it_was_drawn_from(spelling, pieces):
    for proposed in parse(trie_of(spelling), pieces):
        drawn = [test.position for test in proposed.tests if test.option != STOP]
        assert drawn == list(range(proposed.start, proposed.stop))


def translate_of(spelling: Sequence[tuple[int, ...] | None], *, longest: bool = False) -> tuple[Translate, NgramCache]:
    trie = Trie(len(spelling), 4)
    trie.insert_all((pieces, token) for token, pieces in enumerate(spelling) if pieces and len(pieces) == 1)
    cache = NgramCache(trie, 100_000, "lru")
    return Translate(trie, cache, spelling, parse_longest if longest else parse), cache


def draft(pieces: tuple[int, ...]) -> Draft:
    return Draft(row_of([0]), pieces, zeros(len(pieces), 4), (), None, ())


def emit(*tokens: int) -> list[Verdict]:
    return [Verdict(None, (), tokens, 0, 0)]


NESTED = ((0,), (1,), (0, 1), None, (0, 1, 2), (1, 1))


def test_an_ngram_can_be_drafted_once_it_was_emitted():
    translate, cache = translate_of(NESTED)
    assert translate([draft((0, 1))])[0].verifiable == (0, 1)
    translate.observe(emit(2))
    assert translate([draft((0, 1))])[0].verifiable == (2,)
    assert translate.cache_version == cache.version == 1


@pytest.mark.parametrize(("longest", "proposed"), [(False, [2, None]), (True, [2, 3, 2])])
def test_the_papers_way_backs_up_to_the_longest_token_where_ours_ends_at_the_gap(longest: bool, proposed: list):
    """(0, 1, 2, 2) is active, (0, 1, 2) is not: after it the walk is in a gap."""
    spelling = ((0,), (1,), (2,), (0, 1), (0, 1, 2, 2))
    translate, _ = translate_of(spelling, longest=longest)
    translate.observe(emit(3, 4))
    found = translate([draft((2, 0, 1, 2))])[0]
    assert [token.token for token in found.tokens] == proposed


def test_an_untranslatable_piece_ends_the_proposal():
    translate, _ = translate_of(((0,), (1, 2)))
    proposal = translate([draft((0, 2, 0))])[0]
    assert [token.token for token in proposal.tokens] == [0, None]
    assert proposal.verifiable == (0,)


def test_only_tokens_of_several_pieces_are_remembered():
    translate, cache = translate_of(NESTED)
    translate.observe(emit(0, 1, 3, len(NESTED) + 7))  # direct, direct, without pieces, beyond the tokenizer
    assert cache.entries() == []
    translate.observe(emit(5, 5, 4))
    assert [(entry.pieces, entry.token, entry.count) for entry in cache.entries()] == [
        ((1, 1), 5, 2),
        ((0, 1, 2), 4, 1),
    ]
