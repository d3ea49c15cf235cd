"""Counts over a pair of vocabularies whose every token is known."""

import pytest
from tokenizer_making import byte_level, space_mark

from pipeline.reports.vocab_report import (
    BANDS,
    band_of,
    count_bands,
    coverage,
    silent,
)
from stages.vocabulary.pair import Pair, pair
from stages.vocabulary.tokenizer_view import Vocabulary

MERGES = [(b"a", b"b"), (b"ab", b"c"), (b"abc", b"ab"), (b"\xe2", b"\x82"), (b"\xe2\x82", b"\xac")]
AB, ABC, ABCAB, HALF, EURO = range(256, 261)


@pytest.fixture(scope="module")
def target() -> Vocabulary:
    return Vocabulary(byte_level(MERGES, ("<s>", "</s>", "<mark>")), "target")


@pytest.fixture(scope="module")
def words(target: Vocabulary) -> Pair:
    drafter = Vocabulary(space_mark(["▁", "a", "b", "c"], [("a", "b")]), "drafter")
    return pair(target, drafter)


@pytest.mark.parametrize(
    ("length", "band"), [(2, "2"), (3, "3"), (4, "4"), (5, "5-8"), (8, "5-8"), (9, "9+"), (64, "9+")]
)
def test_every_length_has_one_band(length: int, band: str):
    assert band_of(length) == band
    assert list(BANDS) == ["2", "3", "4", "5-8", "9+"]


def test_every_token_is_direct_an_ngram_unspelt_or_never_proposed(target: Vocabulary, words: Pair):
    ngrams = sum(count_bands(len(pieces or ()) for pieces in words.pieces).values())
    assert words.direct + ngrams + words.unspelt + silent(words) == target.size
    assert silent(words) == 1, "<mark>"


def test_a_text_is_covered_by_what_its_tokens_are(words: Pair):
    found = coverage(words, [AB, ABC, ABC, ABCAB, ord("x"), EURO])
    assert (found.tokens, found.direct, found.unspelt) == (6, 2, 0)
    assert found.ngrams == {"2": 2, "3": 2, "4": 0, "5-8": 0, "9+": 0}


def test_bytes_that_the_drafter_lacks_are_unspelt(target: Vocabulary):
    poor = Vocabulary(space_mark(["▁", "a", "b", "c"]), "poor")
    poor.token_bytes = tuple(None if spelt in (b"x", b"y") else spelt for spelt in poor.token_bytes)
    poor._preferred = poor._preferred.copy()
    poor._preferred[[ord("x"), ord("y")]] = False
    found = pair(target, poor)
    assert found.unspelt == 2
    assert coverage(found, list(b"axxyb")).unspelt == 3
    assert silent(found) == 1
