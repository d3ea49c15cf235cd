"""The vocabularies that people use: 13 tokenizers, and each spelt in the pieces of every other (156 pairs)."""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, compress, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from stages.vocabulary.pair import How, Pair, pair
from stages.vocabulary.spelling import Pieces
from stages.vocabulary.tokenizer_view import Vocabulary

FOLDER = ROOT.parent / "shared" / "tokenizers"
NAMES = (
    "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "gpt-neox", "llama-2", "llama-3", "llama-4", "mistral-v1",
    "mistral-v3", "phi-3", "qwen2", "starcoder",
)  # fmt: skip
MARKED = {"llama-2", "mistral-v1", "mistral-v3", "phi-3"}  # these put a space before a text
NFC = {"qwen2", "gpt-neox"}
# Bytes without a token. Those of the first line never occur in text; Falcon and StarCoder cannot write a few
# control characters and some far planes of Unicode.
NEVER = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])
LACKING = {
    "deepseek-coder": NEVER,
    "deepseek-llm": NEVER,
    "gpt-neox": NEVER,
    "starcoder": NEVER | {0xF1},
    "falcon": NEVER | {0x03, 0x04, 0x05, 0x0B, 0x11, 0x13, 0x14, 0x15, 0x16, 0x17, 0x19, 0x1C, 0x1D, 0x1E, 0xF2},
}

pytestmark = [
    pytest.mark.skipif(not FOLDER.is_dir(), reason=f"the real tokenizers lie in {FOLDER}, which is not there"),
    pytest.mark.representatives("falcon", "gpt-2", "llama-2", "qwen2"),
]


class Remembering(Vocabulary):
    """Keeps what it spelt: the vocabularies share most of their tokens."""

    def spell_each(self, texts: Sequence[bytes]) -> list[Pieces | None]:
        known = vars(self).setdefault("known", {})
        new = [text for text in dict.fromkeys(texts) if text not in known]
        known.update(zip(new, super().spell_each(new), strict=True))
        return [known[text] for text in texts]


@cache
def vocabulary(name: str) -> Vocabulary:
    from transformers import AutoTokenizer

    return Remembering(AutoTokenizer.from_pretrained(FOLDER / name, local_files_only=True), name)


@pytest.fixture(scope="module", params=NAMES)
def words(request) -> Vocabulary:
    return vocabulary(request.param)


def decode_bytes(words: Vocabulary, ids: Sequence[int]) -> bytes:
    """The bytes of ids that all have some."""
    return b"".join(words.token_bytes[index] for index in ids)


# --- each by itself ---------------------------------------------------------------------------------------------------


def test_every_token_is_read_back_from_its_bytes(words: Vocabulary):
    """The tokenizer's own decoder gives the same for all that is text, and its own cut gives the token back."""
    backend = words.tokenizer.backend_tokenizer
    controls, added = set(words.specials.values()), set(backend.get_added_tokens_decoder())
    for index, spelt in enumerate(words.token_bytes):
        assert (spelt is None) <= (index in controls), index
        if spelt is None or index in added:
            continue
        shown = backend.decoder.decode(["a", backend.id_to_token(index)])[1:]
        if words.name in MARKED:  # their decoder takes one space from the front of a text
            shown = backend.decoder.decode(["▁", backend.id_to_token(index)])
        assert shown == spelt.decode(errors="replace"), index


def test_every_byte_string_of_a_token_is_spelt_by_one_token(words: Vocabulary):
    controls = set(words.specials.values())
    for spelt, index in words.id_of_bytes.items():
        assert words.token_bytes[index] == spelt
    ordinary = {spelt for index, spelt in enumerate(words.token_bytes) if spelt and index not in controls}
    assert ordinary == set(words.id_of_bytes)
    assert controls.isdisjoint(words.id_of_bytes.values())


def test_which_bytes_a_vocabulary_lacks_is_known(words: Vocabulary):
    lacking = LACKING.get(words.name, frozenset())
    assert {byte for byte in range(256) if words.spell(bytes([byte])) is None} == lacking
    assert lacking.isdisjoint(b"".join(spelt or b"" for spelt in words.token_bytes)), "longer tokens do not help"
    for byte in lacking:
        assert words.spell(b"ab" + bytes([byte])) is None


BROKEN = [
    b"\x80",
    b"\xbf\xbf",
    b"\xe2\x82",
    b"\xf0\x9f\x98",
    b"\xed\xa0\x80",
    b"\xff\xfe",
    b"\0",
    b"\0\0",
    b"\r\n",
    b"\t",
]
FAMILY, FLAG = "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea"  # several characters each
TRICKY = [
    "▁", "▁▁", " ▁", "Ġ", "Ċ", "ĠĠ", "<0x0A>", "<0x", "é", "e\u0301", "õ", "ÿ", FAMILY, FLAG, "日本語", "\u200b",
    "\ufffd", "<s>", "</s>", "<unk>", "<|im_end|>", "<|endoftext|>", "<|EOT|>", "[INST]", "[REFERENCE_DOC_0]",
]  # fmt: skip
PARTS = st.one_of(
    st.binary(max_size=12),
    st.text(max_size=12).map(str.encode),
    st.sampled_from(BROKEN),
    st.sampled_from(TRICKY).map(str.encode),
    st.integers(0, 10**30).map(lambda number: str(number).encode()),
    st.integers(1, 200).map(lambda number: b" " * number),
    st.sampled_from([b"\n" * 40, b"a" * 300, b"=" * 70, b" \n \n", b"    return x\n\n"]),
)
BYTES = st.lists(PARTS, max_size=6).map(b"".join)


@settings(max_examples=150)
@given(text=BYTES)
def test_what_is_spelt_is_exactly_the_bytes(words: Vocabulary, text: bytes):
    pieces = Vocabulary.spell_each(words, [text])[0]
    if LACKING.get(words.name, frozenset()).isdisjoint(text):
        assert decode_bytes(words, pieces) == text
        assert set(words.specials.values()).isdisjoint(pieces)
    else:
        assert pieces is None


def as_it_reads(words: Vocabulary, text: str) -> str:
    """The text as the tokenizer normalises it before it cuts it."""
    if words.name in MARKED:
        return " " * bool(text) + text.replace("▁", " ")
    return unicodedata.normalize("NFC", text) if words.name in NFC else text


TEXT = BYTES.map(lambda content: content.decode(errors="ignore"))


@settings(max_examples=100)
@given(text=TEXT)
def test_what_is_encoded_is_decoded(words: Vocabulary, text: str):
    ids = words.encode(text)
    if words._adds_bos:
        assert ids[0] == words.bos
        ids = ids[1:]
    assert ids == words.encode_text(text)
    assert set(words.specials.values()).isdisjoint(ids), "a user's text is text"
    read = as_it_reads(words, text)
    if LACKING.get(words.name, frozenset()).isdisjoint(read.encode()):
        assert words.decode(ids) == read


@settings(max_examples=60)
@given(text=TEXT)
def test_text_without_names_is_encoded_as_by_the_tokenizer_itself(words: Vocabulary, text: str):
    """Names of special tokens, too; markers that a tokenizer does not call special are the difference."""
    if not any(name in text for name, index in words.specials.items() if words.bytes_of(index)):
        theirs = words.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert words.encode_text(text) == words.encode_text(text, first=False) == theirs


def test_names_of_control_tokens_in_a_users_text_are_text(words: Vocabulary):
    known = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|EOT|>", "<｜User｜>"]
    controls = set(words.specials.values())
    for name in (*known, *words.specials):
        for text in (name, f"a{name}b {name}\n"):
            ids = words.encode_text(text)
            assert controls.isdisjoint(ids), text
            assert words.decode(ids) == as_it_reads(words, text)
            assert controls.isdisjoint(words.spell(text.encode()))


# --- all ordered pairs ------------------------------------------------------------------------------------------------


@dataclass
class Flat:
    """A pair's context in arrays: all pieces in a row, the target's token of each, and pieces per token."""

    pieces: np.ndarray
    token: np.ndarray
    lengths: np.ndarray

    @classmethod
    def from_pair(cls, found: Pair) -> "Flat":
        lengths = np.fromiter(map(len, found.context), dtype=int)
        pieces = np.fromiter(chain.from_iterable(found.context), dtype=int)
        return cls(pieces, np.repeat(np.arange(len(lengths)), lengths), lengths)


@cache
def byte_lengths(name: str) -> np.ndarray:
    """Per token the number of its bytes; -1 where it has none."""
    return np.array([-1 if spelt is None else len(spelt) for spelt in vocabulary(name).token_bytes])


@cache
def holding(name: str, some: frozenset[int]) -> np.ndarray:
    """Per token whether it holds one of these bytes."""
    return np.array([bool(spelt) and not some.isdisjoint(spelt) for spelt in vocabulary(name).token_bytes])


def choose(ids: Iterable[int], size: int) -> np.ndarray:
    mask = np.zeros(size, dtype=bool)
    mask[list(ids)] = True
    return mask


def check_spelling(found: Pair, flat: Flat, target: Vocabulary, drafter: Vocabulary) -> None:
    """Every target token with bytes is spelt exactly, but for those that hold a byte which the drafter lacks.

    All at once: the same bytes in a row, in parts of the same lengths.
    """
    named = choose((one.token for one in found.specials if one.how != How.SPELT), target.size)
    lacking = holding(target.name, LACKING.get(drafter.name, frozenset()))
    expected = (byte_lengths(target.name) > 0) & ~named & ~lacking
    spelt = flat.pieces[expected[flat.token]]
    summed = np.bincount(flat.token, weights=byte_lengths(drafter.name)[flat.pieces], minlength=target.size)
    assert (summed[expected] == byte_lengths(target.name)[expected]).all()
    texts = (target.token_bytes[index] for index in expected.nonzero()[0].tolist())
    assert decode_bytes(drafter, spelt.tolist()) == b"".join(texts)
    assert not flat.lengths[lacking].any()
    assert found.unspelt == lacking.sum()


def check_pieces(found: Pair, flat: Flat, target: Vocabulary, drafter: Vocabulary) -> None:
    """The pieces that may be drafted: ids of the two tokenizers alone, each sequence of pieces for one token."""
    assert len(found.pieces) == len(found.context) == target.size
    assert found.drafter_size == drafter.size
    drafted = np.array([pieces is not None for pieces in found.pieces])
    own = [pieces for pieces in found.pieces if pieces is not None]
    assert own == list(compress(found.context, drafted))
    assert len(set(own)) == len(own)
    assert all(own)
    assert flat.pieces.min() >= 0
    assert flat.pieces.max() < drafter.size
    lacking = holding(target.name, LACKING.get(drafter.name, frozenset()))
    ordinary = choose(target.id_of_bytes.values(), target.size)
    controls = choose(target.specials.values(), target.size)
    assert (drafted[~controls] == (ordinary & ~lacking)[~controls]).all(), "one token for each byte string"


def check_specials(found: Pair, flat: Flat, target: Vocabulary, drafter: Vocabulary, otherwise: str) -> None:
    """Roles first, then names; the rule decides the rest. Only these become control tokens of the drafter."""
    assert [(one.name, one.token) for one in found.specials] == sorted(target.specials.items(), key=lambda one: one[1])
    assert found.pieces[target.eos] == (drafter.eos,)
    mapped = {one.token for one in found.specials if one.how in (How.ROLE, How.NAME)}
    assert set(flat.token[choose(drafter.specials.values(), drafter.size)[flat.pieces]].tolist()) == mapped
    for one in found.specials:
        shown = target.bytes_of(one.token) is not None
        match one.how:
            case How.ROLE:
                assert one.token in (target.eos, target.bos, target.pad)
            case How.NAME:
                assert one.pieces == (drafter.specials[one.name],)
            case How.SPELT:
                assert decode_bytes(drafter, one.pieces) == one.name.encode()
                assert otherwise == "spell" or shown
            case How.BLOCKED:
                assert (one.pieces, found.pieces[one.token], found.context[one.token]) == ((), None, ())
                assert otherwise == "block"
                assert not shown


@pytest.mark.slow
@pytest.mark.representatives("gpt-2-llama-2", "gpt-2-qwen2")
@pytest.mark.parametrize(("name", "other"), permutations(NAMES, 2))
def test_every_target_is_spelt_in_the_pieces_of(name: str, other: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNIDRAFT_CACHE", "/dev/null/none")  # each pair once: not worth writing
    drafter, target = vocabulary(name), vocabulary(other)
    for otherwise in ("block", "spell") if name in ("llama-2", "qwen2", "falcon") else ("block",):
        found = pair(target, drafter, otherwise)
        flat = Flat.from_pair(found)
        check_spelling(found, flat, target, drafter)
        check_pieces(found, flat, target, drafter)
        check_specials(found, flat, target, drafter, otherwise)
    vars(drafter)["known"].clear()


def test_ids_of_a_wider_output_layer_are_nothing():
    """Phi-3's model has 32,064 outputs, its tokenizer 32,011 tokens."""
    target, drafter = vocabulary("phi-3"), vocabulary("qwen2")
    assert {target.bytes_of(index) for index in range(target.size, 32_064)} == {None}
    assert target.decode([*target.encode_text("a"), 32_050]) == " a"
    assert len(pair(target, drafter).pieces) == 32_011
