"""The index of a row's own text finds what a search of the whole text finds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_own_text import LONGEST_MATCH, ORDERS, Match, SuffixIndex

texts = st.lists(st.integers(0, 2), max_size=60)


def search(text: list[int], suffix: tuple[int, ...], begin: int = 0) -> Match | None:
    """The longest end of a suffix that occurs in the text with a continuation after `begin`, by looking everywhere."""
    for length in reversed(ORDERS):
        for place in reversed(range(max(begin, length), len(text))):
            if length <= len(suffix) and tuple(text[place - length : place]) == suffix[-length:]:
                return Match(place, length)
    return None


def extend(text: list[int], match: Match) -> Match:
    place, length = match
    while length < min(place, LONGEST_MATCH) and text[place - length - 1] == text[-length - 1]:
        length += 1
    return Match(place, length)


def assert_finds(index: SuffixIndex, text: list[int], suffix: tuple[int, ...], begin: int = 0) -> None:
    wanted = search(text, suffix, begin)
    found = index.find(suffix)
    assert found == wanted
    if found:
        assert index.token_at(found.place) == text[found.place]


def make_index(text: list[int]) -> SuffixIndex:
    index = SuffixIndex()
    index.read(text)
    return index


def test_suffixes_of_one_to_eight_tokens_are_indexed():
    assert list(ORDERS) == [1, 2, 3, 4, 5, 6, 7, 8]


@given(texts, st.lists(st.integers(1, 5)))
def test_the_index_finds_what_a_search_of_the_whole_text_finds(text: list[int], steps: list[int]):
    index, read = SuffixIndex(), 0
    for step in [*steps, len(text)]:
        read = min(read + step, len(text))
        index.read(text[:read])
        suffix = tuple(text[:read][-8:])
        assert_finds(index, text[:read], suffix)
        if found := index.find(suffix):
            assert index.extend_match(found) == extend(text[:read], found)


@given(texts, st.lists(st.integers(0, 2), max_size=10).map(tuple))
def test_texts_that_are_not_the_end_of_the_own_text_are_found_too(text: list[int], suffix: tuple[int, ...]):
    """So a tree's candidates have continuations: the suffix goes beyond the text."""
    index = make_index(text)
    assert_finds(index, text, suffix)
    assert_finds(index, text, (*text[-8:], *suffix))


@given(texts, st.integers(1, 59))
def test_a_text_that_is_read_in_parts_is_indexed_as_one_read_at_once(text: list[int], step: int):
    parts = SuffixIndex(reach=10)
    for read in range(0, len(text) + step, step):
        parts.read(text[:read])
    whole = SuffixIndex(reach=10)
    whole.read(text)
    assert vars(parts) == vars(whole), "so a row of a checkpoint continues with the same index"


@given(texts, st.integers(4, 12))
def test_what_is_indexed_is_bounded_and_reaches_as_far_as_promised(text: list[int], reach: int):
    index = SuffixIndex(reach)
    for read in range(1, len(text) + 1):
        index.read(text[:read])
        assert len(index) <= 2 * reach * len(ORDERS)
        # Halves are dropped whole: what is known begins at the last but one multiple of the reach.
        begin = max(0, ((read - 1) // reach - 1) * reach)
        assert_finds(index, text[:read], tuple(text[:read][-8:]), begin)
        assert read - begin >= min(read, reach)


def test_the_index_does_not_grow_with_the_text_for_ever():
    index, sizes = SuffixIndex(reach=50), set()
    text: list[int] = []
    for token in range(1000):  # no n-gram comes twice: the worst case
        text.append(token)
        index.read(text)
        sizes.add(len(index))
    assert max(sizes) <= 2 * 50 * len(ORDERS)
    assert index.find((998, 999)) is None


def test_a_match_is_measured_beyond_the_longest_ngram():
    text = [*range(100, 140), 7, *range(100, 140)]
    index = make_index(text)
    found = index.find(tuple(text[-8:]))
    assert found == Match(40, 8)
    assert index.extend_match(found) == Match(40, LONGEST_MATCH)


def test_of_several_occurrences_the_last_is_found():
    index = make_index([1, 2, 3, 1, 2, 4, 1, 2])
    assert index.find((1, 2)) == Match(5, 2)
    assert index.find((3, 1, 2)) == Match(5, 3), "the longer one decides"
    assert index.find((9, 2)) == Match(5, 1)


def test_the_end_of_the_text_is_no_occurrence_until_something_follows():
    index = make_index([1, 2])
    assert index.find((1, 2)) is None
    index.read([1, 2, 3])
    assert index.find((1, 2)) == Match(2, 2)


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3]])
def test_texts_without_repetition_have_no_match(text: list[int]):
    assert make_index(text).find(tuple(text)) is None
