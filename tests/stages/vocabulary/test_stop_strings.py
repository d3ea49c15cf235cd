"""Stop strings end a text where they are complete first, however its bytes are cut into tokens and blocks."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stages.vocabulary.text_stream import StopStrings, TextStream
from store.errors import ConfigError

# Tokens are numbers of these; few different bytes, so that stop strings are met and nearly met.
parts = st.lists(
    st.sampled_from([b"", None, b"a", b"b", b"ab", b"ba", b"aab", b"c", b"\xc3", b"\xa9", "é".encode(), b"\xe2\x82"])
    | st.binary(max_size=3),
    max_size=14,
)
stop_strings = st.lists(st.text("abcé", min_size=1, max_size=5), max_size=4)


def first_complete(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Beginning and end of the stop string that ends first in a whole text, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        if ended := [stop for stop in stops if text[:end].endswith(stop)]:
            return end - max(map(len, ended)), end
    return None


def whole(tokens: Sequence[bytes | None]) -> str:
    return b"".join(part or b"" for part in tokens).decode(errors="replace")


def blocks(count: int, cuts: Sequence[int]) -> list[range]:
    """Numbers below `count`, in blocks that end at the cuts."""
    edges = sorted({0, count, *(cut % (count + 1) for cut in cuts)})
    return [range(begin, end) for begin, end in pairwise(edges)]


def show(tokens: Sequence[bytes | None], stops: Sequence[str], cuts: Sequence[int]) -> list[str]:
    """Return the text that a client sees after each block, and at the end."""
    text = TextStream(tokens.__getitem__, stops)
    return [*(text.push(block) for block in blocks(len(tokens), cuts)), text.close()]


cuts_of = st.lists(st.integers(0, 14), max_size=6)


@given(parts, stop_strings, cuts_of)
@example([b"abcd"], ["bc", "abcd"], [])  # the inner one is complete first
@example([b"xab"], ["b", "ab"], [])  # both are complete at once: the longer one counts
@example([b"a", b"b", b"a", b"b", b"c"], ["ababc", "bb"], [1, 2, 3, 4])
@example([b"\xc3", b"\xa9"], ["é"], [1])  # a stop string begins inside a character's first token
@example([b"\xe2\x82", b"a"], ["a"], [1])  # half a character in front of a stop string
def test_a_client_sees_the_text_in_front_of_the_stop_string_that_is_complete_first(tokens, stops, cuts):
    text = whole(tokens)
    found = first_complete(text, stops)
    assert "".join(show(tokens, stops, cuts)) == (text if found is None else text[: found[0]])


@given(parts, stop_strings, cuts_of)
@example([b"a", b"", b"b"], ["ab"], [1, 2])
def test_a_row_ends_with_the_token_that_completes_a_stop_string(tokens, stops, cuts):
    want = next((n for n in range(1, len(tokens) + 1) if first_complete(whole(tokens[:n]), stops)), None)
    ending, text = StopStrings(tokens.__getitem__, stops), TextStream(tokens.__getitem__, stops)
    for block in blocks(len(tokens), cuts):
        number = ending.find_end(block)
        text.push(block)
        assert ending.complete == text.stopped == (number is not None)
        if number is not None:
            assert block.start + number == want
            return
    assert want is None


@given(parts, stop_strings)
def test_nothing_is_kept_back_that_no_stop_string_can_begin_with(tokens, stops):
    text, taken = TextStream(tokens.__getitem__, stops), b""
    seen = ""
    for number, part in enumerate(tokens):
        seen, taken = seen + text.push([number]), taken + (part or b"")
        if text.stopped:
            return
        kept = taken.decode(errors="replace")[len(seen) :]
        starts = {stop.encode()[:length] for stop in stops for length in range(1, len(stop.encode()))}
        held = max((len(start) for start in starts if taken.endswith(start)), default=0)
        before = taken[: len(taken) - held]  # of this at most half a character is kept back as well
        assert not kept or seen in {before[: len(before) - half].decode(errors="replace") for half in range(4)}


def test_what_is_kept_back_is_shown_when_it_turns_out_to_be_none_or_at_the_end():
    assert show([b"see ", b"EN", b"Z", b" EN"], ["END"], [1, 2, 3]) == ["see ", "", "ENZ", " ", "EN"]


@pytest.mark.parametrize("stops", [[""], ["a", ""], ["\ud800"]])
@pytest.mark.parametrize("made", [StopStrings, TextStream])
def test_a_stop_string_that_is_no_text_is_refused(made, stops: list[str]):
    with pytest.raises(ConfigError, match="a stop string must"):
        made([].__getitem__, stops)
