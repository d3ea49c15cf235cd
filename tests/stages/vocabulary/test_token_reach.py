"""The bound on the text of a token: never too low, so that no prompt that fits is refused by its characters."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_making import LETTER_MERGES, LETTERS, MERGES, byte_level, space_mark
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from pipeline.models import catalog as zoo
from stages.engine.models.huggingface import load_tokenizer
from stages.vocabulary.tokenizer_view import Vocabulary

BUILT_IN = ("drafter-1.6m", "target-7m", "target-12m")


@cache
def load_built_in(name: str) -> Vocabulary:
    return Vocabulary(load_tokenizer(str(zoo.path_of(name))), name)


def change(tokenizer: Any, **parts: Any) -> Vocabulary:
    """A vocabulary whose tokenizer has other parts."""
    for part, value in parts.items():
        setattr(tokenizer.backend_tokenizer, part, value)
    return Vocabulary(tokenizer)


def texts_of_long_tokens(words: Vocabulary) -> list[str]:
    """Runs of a token each, the longest tokens first."""
    readable = {spelt.decode(errors="ignore") for spelt in words.token_bytes if spelt}
    return [token * 50 for token in sorted(readable, key=len)[:-40:-1]]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_text_of_the_longest_tokens_reaches_the_bound_and_not_beyond(name: str):
    words = load_built_in(name)
    found = {text: len(words.encode_text(text)) for text in texts_of_long_tokens(words)}
    assert all(words.fewest_tokens(len(text)) <= tokens for text, tokens in found.items())
    longest = max(found, key=len)
    assert found[longest] - words.fewest_tokens(len(longest)) <= 2, "the bound is of use"


@pytest.mark.parametrize("name", BUILT_IN)
@given(text=st.text(max_size=60))
def test_no_text_has_fewer_tokens_than_the_bound_for_its_characters(name: str, text: str):
    words = load_built_in(name)
    for many in (text, text * 20):
        assert words.fewest_tokens(len(many)) <= len(words.encode_text(many))


@pytest.mark.parametrize("form", [normalizers.NFC(), normalizers.Sequence([normalizers.NFKC()])])
def test_the_bound_allows_for_characters_that_are_composed(form: Any):
    """Four characters become one, which is one token."""
    words = change(byte_level([(b"\xe1", b"\xbe"), (b"\xe1\xbe", b"\x82")]), normalizer=form)
    text = "\u03b1\u0313\u0300\u0345" * 30
    assert len(words.encode_text(text)) == 30
    assert words.fewest_tokens(len(text)) == 30


def added_that_swallows_spaces() -> Vocabulary:
    tokenizer = byte_level(MERGES)
    tokenizer.backend_tokenizer.add_tokens([AddedToken("word", rstrip=True)])
    return Vocabulary(tokenizer)


def unknown_in_one() -> Vocabulary:
    tokenizer = space_mark(LETTERS, LETTER_MERGES)
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "ab": 4}
    model = models.BPE(vocab=vocabulary, merges=[("a", "b")], unk_token="<unk>", fuse_unk=True)
    return change(tokenizer, model=model)


UNBOUNDED = {
    "strips": lambda: change(byte_level(MERGES), normalizer=normalizers.Strip()),
    "strips, in a sequence": lambda: change(
        byte_level(MERGES), normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    ),
    "removes": lambda: change(byte_level(MERGES), normalizer=normalizers.Replace(" ", "")),
    "replaces runs": lambda: change(byte_level(MERGES), normalizer=normalizers.Replace(Regex(" +"), " ")),
    "splits away": lambda: change(
        byte_level(MERGES),
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ),
    "a byte is missing": lambda: Vocabulary(byte_level(MERGES, without=b"?")),
    "swallows": added_that_swallows_spaces,
    "joins what it does not know": unknown_in_one,
}


@pytest.mark.parametrize("made", UNBOUNDED.values(), ids=UNBOUNDED)
def test_where_one_token_may_stand_for_any_amount_of_text_nothing_is_refused(made: Any):
    words = made()
    tokens = min(len(words.encode_text(text)) for text in (" " * 5000, "word" + " " * 5000, "?" * 5000))
    assert tokens < 200, "there is such a text"
    assert words.fewest_tokens(10**9) == 0
