"""Text that comes token by token is the text of all tokens at once, and never half a character."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from stages.engine.models.huggingface import load_tokenizer
from stages.vocabulary.text_stream import TextStream
from stages.vocabulary.tokenizer_view import Vocabulary

TOKENIZERS = ROOT.parent / "shared" / "tokenizers"
NAMES = sorted(folder.parent.name for folder in TOKENIZERS.glob("*/tokenizer.json"))
BROKEN = "\N{REPLACEMENT CHARACTER}"


@cache
def vocabulary_of(name: str) -> Vocabulary:
    return Vocabulary(load_tokenizer(str(TOKENIZERS / name)), name)


def stream(parts: list[bytes]) -> list[str]:
    """Return the text that each part adds, and that of the end."""
    stream = TextStream(parts.__getitem__)
    return [*(stream.push([number]) for number in range(len(parts))), stream.close()]


def may_begin_a_character(text: bytes) -> bool:
    """Whether some further bytes make one character of these, by trying the smallest and largest.

    A surrogate's encoding is no character, but Python's decoder waits for its last byte to report that.
    """
    missing = {0xC2: 1, 0xE0: 2, 0xF0: 3}[max(first for first in (0xC2, 0xE0, 0xF0) if first <= text[0])]
    missing = missing + 1 - len(text)
    for filler in (b"\x80", b"\x9f", b"\xa0", b"\xbf"):
        try:
            return len((text + filler * missing).decode(errors="surrogatepass")) == 1
        except UnicodeDecodeError:
            continue
    return False


chunks = st.lists(st.binary(max_size=4) | st.sampled_from([b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\xed\xa0", b"a"]))


@given(chunks)
def test_the_parts_make_the_whole_however_the_bytes_are_split(parts: list[bytes]):
    assert "".join(stream(parts)) == b"".join(parts).decode(errors="replace")


@given(st.text(max_size=30), st.randoms(use_true_random=False))
def test_a_valid_text_never_shows_a_broken_character(text: str, random):
    whole, parts = text.encode(), []
    while whole:
        size = random.randint(1, 5)
        parts, whole = [*parts, whole[:size]], whole[size:]
    shown = stream(parts)
    assert "".join(shown) == text
    assert BROKEN in text or BROKEN not in "".join(shown)


@given(chunks)
def test_only_the_beginning_of_a_character_is_kept_back(parts: list[bytes]):
    stream, taken = TextStream(parts.__getitem__), b""
    shown = ""
    for number, part in enumerate(parts):
        shown, taken = shown + stream.push([number]), taken + part
        if shown != taken.decode(errors="replace"):
            kept = next(size for size in range(1, 4) if taken[:-size].decode(errors="replace") == shown)
            assert may_begin_a_character(taken[-kept:])


@pytest.mark.representatives(3)
@pytest.mark.skipif(not NAMES, reason=f"needs the real tokenizers in {TOKENIZERS}")
@pytest.mark.parametrize("name", NAMES)
@given(st.text(max_size=20), st.lists(st.integers(min_value=0, max_value=250_000), max_size=12))
def test_real_tokens_give_the_text_that_decoding_them_at_once_gives(name: str, text: str, others: list[int]):
    words = vocabulary_of(name)
    for ids in (words.encode(text), others, words.encode(text + " 漢字 🙂‍↔️ naïve"), words.encode(text)[1:] + others):
        stream = TextStream(words.bytes_of)
        shown = [stream.push([token]) for token in ids]
        assert "".join(shown) + stream.close() == words.decode(ids)


def test_a_text_that_was_cut_ends_before_an_incomplete_character():
    text = TextStream({1: b"a \xe2", 2: b"\x82"}.get, [" b"])
    assert [text.push([1]), text.push([2]), text.close(cut=True)] == ["a ", "", ""]
    begun = TextStream({1: b"a ", 2: b"b"}.get, [" b"])
    assert [begun.push([1]), begun.close(cut=True)] == ["a", " "], "what only began a stop string is text"
