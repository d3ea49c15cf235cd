"""The index of a row's own text finds what a search of the whole text finds."""

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
