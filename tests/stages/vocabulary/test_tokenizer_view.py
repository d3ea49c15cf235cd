"""Vocabularies as byte strings: what tokens are, how text is cut, which tokens text never becomes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_making import LETTER_MERGES, LETTERS, MERGES, byte_level, space_mark, word_level
from tokenizers import Regex, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from stages.vocabulary.token_bytes import CHARACTER_TO_BYTE
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import VocabularyError


@pytest.fixture(scope="module", params=["bytes_words", "marked_words"])
def words(request) -> Vocabulary:
    return request.getfixturevalue(request.param)


def test_the_byte_alphabet_is_the_tokenizers_own():
    spelt = {character for part, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(
        "".join(map(chr, range(0x800)))) for character in part}  # fmt: skip
    assert spelt < set(CHARACTER_TO_BYTE), "what UTF-8 uses of it"
    assert set(pre_tokenizers.ByteLevel.alphabet()) == set(CHARACTER_TO_BYTE)


def test_byte_level_tokens_are_their_bytes_even_where_these_are_no_text(bytes_words: Vocabulary):
    assert [bytes_words.bytes_of(byte) for byte in (0, 65, 0xE2, 255)] == [b"\0", b"A", b"\xe2", b"\xff"]
    merged = [left + right for left, right in MERGES]
    assert [bytes_words.bytes_of(256 + n) for n in range(len(MERGES))] == merged
    assert bytes_words.size == 256 + len(MERGES) + 2


def test_space_marks_are_spaces_and_byte_tokens_are_bytes(marked_words: Vocabulary):
    spelt = [marked_words.bytes_of(256 + n) for n in range(len(LETTERS) + len(LETTER_MERGES))]
    assert spelt == [b" ", b"a", b"b", b"c", "é".encode(), b".", b"ab", b" a", b" ab"]
    assert marked_words.bytes_of(0xE9) == b"\xe9"


def test_special_tokens_and_ids_beyond_the_tokenizer_have_no_bytes(words: Vocabulary):
    for index in (words.bos, words.eos, words.size, words.size + 100, -10):
        assert words.bytes_of(index) is None


def test_special_tokens_have_names_and_roles(words: Vocabulary):
    assert list(words.specials.items()) == [("<s>", words.bos), ("</s>", words.eos)]
    assert words.pad is None
    padded = Vocabulary(byte_level(MERGES, ["<pad>", "</s>", "<x>"]))
    assert (padded.specials["<pad>"], padded.bos) == (padded.pad, None)
    assert list(padded.specials) == ["<pad>", "</s>", "<x>"]


def test_byte_tokens_that_are_wrongly_marked_special_are_text():
    wrong, right = Vocabulary(space_mark(LETTERS, special_bytes=True)), Vocabulary(space_mark(LETTERS))
    assert wrong.token_bytes == right.token_bytes
    assert wrong.specials == right.specials
    assert wrong.spell(b"z") == right.spell(b"z") == (ord("z"),)


def test_a_byte_token_gives_way_to_the_normal_token_of_the_same_byte(marked_words: Vocabulary):
    assert marked_words.id_of_bytes[b"a"] == 256 + LETTERS.index("a")
    assert marked_words.spell(b"a") == (256 + LETTERS.index("a"),)
    assert marked_words.spell(b"z") == (ord("z"),), "only the byte token spells it"


def test_added_text_comes_before_the_piece_with_the_same_bytes():
    """Examples: the runs of spaces of GPT-NeoX and the letters of DeepSeek, which are cut out before the merges."""
    words = Vocabulary(byte_level([(b" ", b" "), (b"\xc3", b"\xb5")], texts=["  ", "õ"], without=b"\xf5"))
    spaces, letter = words.size - 2, words.size - 1
    assert words.encode("a  b") == [97, spaces, 98]
    assert words.spell(b"  ") == (spaces,)
    assert words.spell(b"a  b") == (97, spaces, 98)
    assert words.spell("aõ".encode()) == (97, letter)
    assert words.bytes_of(letter) == "õ".encode(), "not the byte that it is in the alphabet"
    assert words.spell(b"\xf5") is None
    assert words.spell(b"\xc3") == (0xC3,)


MARKERS = ["<|EOT|>", "</s>x", "[CALL]", "</think>"]


def test_markers_that_are_not_called_special_are_control_tokens_too():
    """Examples: `<|EOT|>` of DeepSeek Coder, `</s>` of Phi-3. The model reads an end, which text must not be."""
    words = Vocabulary(byte_level(MERGES, texts=MARKERS))
    assert list(words.specials) == ["<s>", "</s>", "<|EOT|>", "[CALL]", "</think>"]
    for name in ("<|EOT|>", "[CALL]", "</think>"):
        marker = words.specials[name]
        assert words.bytes_of(marker) == name.encode(), "it is shown"
        for ids in (words.encode(f"a{name}b"), words.encode_text(name), words.spell(name.encode())):
            assert marker not in ids
        assert words.decode(words.encode(f"a{name}b")) == f"a{name}b"
    assert words.size - 3 in words.encode("</s>x"), "text that only begins like a marker"


def test_markers_of_the_vocabulary_are_control_tokens_where_no_merges_lead_to_them():
    """Example: `[REFERENCE_DOC_0]` of Mistral, which its list of added tokens lacks."""
    words = Vocabulary(space_mark([*LETTERS, "[", "]", "[ref]", "[a]"], [("[", "a"), ("[a", "]")]))
    assert list(words.specials) == ["[ref]", "<s>", "</s>"]
    assert words.spell(b"[a]") == (words.id_of_bytes[b"[a]"],)
    assert words.specials["[ref]"] not in words.spell(b"[ref]")


@given(st.binary(max_size=12))
def test_what_is_spelt_is_exactly_the_bytes(bytes_words, marked_words, text: bytes):
    for words in (bytes_words, marked_words):
        pieces = words.spell(text)
        assert b"".join(words.bytes_of(piece) for piece in pieces) == text


def test_spelling_is_the_tokenizers_own_and_puts_no_space_before_it(words: Vocabulary):
    for text in (b"abc", b" ab", b"a b"):
        whole = words.spell(text)
        assert [words.bytes_of(piece) for piece in whole] == {
            b"abc": [b"abc"] if words.name == "bytes" else [b"ab", b"c"],
            b" ab": [b" ", b"ab"] if words.name == "bytes" else [b" ab"],
            b"a b": [b"a", b" ", b"b"],
        }[text]


def test_text_is_cut_before_the_merges_as_the_tokenizer_does():
    """Digits by threes: merges alone would begin with the commonest pair, wherever it is."""
    tokenizer = byte_level([(b"2", b"3"), (b"1", b"23"), (b"3", b"4")])
    split = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, tokenizer.backend_tokenizer.pre_tokenizer]
    )
    assert Vocabulary(tokenizer).spell(b"x12") == (ord("x"), ord("1"), ord("2"))
    assert Vocabulary(tokenizer).spell(b"1234") == tuple(b"1234")


def test_a_space_that_the_tokenizer_puts_first_is_not_spelt():
    tokenizer = byte_level([(b" ", b"a"), (b"1", b"2")])
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    prefixed = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, prefixed])
    words = Vocabulary(tokenizer)
    assert words.spell(b"ax12") == tuple(b"ax12"), "and digits are cut as ever"
    assert words.decode(words.encode("ax")) == " ax"


def test_broken_characters_go_byte_by_byte_and_the_rest_does_not(marked_words: Vocabulary):
    spelt = [marked_words.bytes_of(piece) for piece in marked_words.spell(b" a.abc\xe2\x82 a\xff")]
    assert spelt == [b" a", b".", b"ab", b"c", b"\xe2", b"\x82", b" a", b"\xff"]


def test_bytes_that_no_token_spells_have_no_pieces():
    words = Vocabulary(byte_level(MERGES, without=b"q"))
    assert words.spell(b"q") is None
    assert words.spell(b"aq") is None
    assert words.spell_each([b"q", b"ab"]) == [None, words.spell(b"ab")]


def test_names_of_special_tokens_in_a_users_text_are_text(words: Vocabulary):
    ids = words.encode("a</s><s>b")
    assert words.eos not in ids
    assert words.bos not in ids
    assert words.decode(ids).strip() == "a</s><s>b"


@given(st.text(max_size=20))
def test_decoding_gives_back_what_was_encoded(bytes_words: Vocabulary, text: str):
    assert bytes_words.decode(bytes_words.encode(text)) == text


def test_the_bos_is_added_where_the_tokenizer_does_so_itself():
    tokenizer = byte_level(MERGES)
    assert Vocabulary(tokenizer).encode("a") == [97]
    backend = tokenizer.backend_tokenizer
    bos = tokenizer.bos_token_id
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    assert Vocabulary(tokenizer).encode("a") == [bos, 97]
    assert Vocabulary(tokenizer).encode_text("a") == [97]


def test_a_tokenizer_as_it_is_loaded_or_made_has_one_digest(tmp_path: Path):
    from transformers import AutoTokenizer

    for made in (byte_level(MERGES, texts=["  "]), space_mark(LETTERS, LETTER_MERGES)):
        made.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert Vocabulary(made).digest == Vocabulary(loaded).digest


def test_the_digest_tells_tokenizers_apart():
    plain = Vocabulary(byte_level(MERGES)).digest
    assert Vocabulary(byte_level(MERGES), "another name").digest == plain
    others = [
        byte_level(MERGES[:-1]),
        byte_level(MERGES[::-1]),
        byte_level(MERGES, ["</s>", "<s>"]),
        byte_level(MERGES, ["<s>", "<end>"]),
        byte_level(MERGES, texts=["x y"]),
    ]
    assert len({plain, *(Vocabulary(other).digest for other in others)}) == 6
    without_role = byte_level(MERGES)
    without_role.bos_token = None
    assert Vocabulary(without_role).digest != plain


def test_the_digest_depends_on_how_text_is_cut():
    """The same tokens with another pre-tokenizer are other pieces."""
    plain, split = byte_level(MERGES), byte_level(MERGES)
    split.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    words = Vocabulary(plain), Vocabulary(split)
    assert words[0].token_bytes == words[1].token_bytes
    assert words[0].digest != words[1].digest


def test_tokenizers_of_another_kind_are_refused():
    with pytest.raises(VocabularyError, match="the tokenizer of odd must be byte-level or mark spaces"):
        Vocabulary(word_level(["<unk>", "a"]), "odd")


@given(text=st.text(max_size=60))
def test_no_text_has_fewer_tokens_than_the_bound_for_its_characters(text: str):
    words = Vocabulary(byte_level(MERGES))
    assert words.fewest_tokens(len(text)) <= len(words.encode_text(text))
    assert words.fewest_tokens(10**6) > 10_000, "the bound is of use"
