"""Vocabularies as byte strings, and one spelt in the pieces of another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_making import byte_level, space_mark, word_level

from stages.vocabulary import BYTE_TO_CHARACTER, CHARACTER_TO_BYTE, Pair, Vocabulary, pair
from store.errors import VocabularyError

MERGES = [(b"a", b"b"), (b"ab", b"c"), (b"\xc3", b"\xa9"), (b" ", b"a"), (b"\xe2", b"\x82")]
LETTERS = ["▁", "a", "b", "c", "é", "."]
LETTER_MERGES = [("a", "b"), ("▁", "a"), ("▁a", "b")]


@pytest.fixture(scope="module")
def bytes_words() -> Vocabulary:
    return Vocabulary(byte_level(MERGES), "bytes")


@pytest.fixture(scope="module")
def marked_words() -> Vocabulary:
    return Vocabulary(space_mark(LETTERS, LETTER_MERGES), "marked")


@pytest.fixture(scope="module", params=["bytes_words", "marked_words"])
def words(request) -> Vocabulary:
    return request.getfixturevalue(request.param)


def test_the_byte_alphabet_has_a_printable_character_for_every_byte():
    assert sorted(BYTE_TO_CHARACTER) == list(range(256))
    assert len(CHARACTER_TO_BYTE) == 256
    assert all(character.isprintable() and not character.isspace() for character in CHARACTER_TO_BYTE)
    assert (BYTE_TO_CHARACTER[32], BYTE_TO_CHARACTER[10], BYTE_TO_CHARACTER[65]) == ("Ġ", "Ċ", "A")  # GPT-2's


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
    for index in (words.bos, words.eos, words.size, words.size + 100):
        assert words.bytes_of(index) is None


def test_byte_tokens_that_are_wrongly_marked_special_are_text():
    wrong, right = Vocabulary(space_mark(LETTERS, special_bytes=True)), Vocabulary(space_mark(LETTERS))
    assert wrong.token_bytes == right.token_bytes


def test_a_byte_token_gives_way_to_the_normal_token_of_the_same_byte(marked_words: Vocabulary):
    assert marked_words.id_of_bytes[b"a"] == 256 + LETTERS.index("a")
    assert marked_words.spell(b"a") == (256 + LETTERS.index("a"),)
    assert marked_words.spell(b"z") == (ord("z"),), "only the byte token spells it"


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


def test_nothing_spells_nothing(words: Vocabulary):
    assert words.spell(b"") == ()


def test_bytes_that_no_token_spells_have_no_pieces():
    tokenizer = byte_level(MERGES)
    words = Vocabulary(tokenizer)
    words.token_bytes = tuple(None if spelt == b"q" else spelt for spelt in words.token_bytes)
    assert words.spell(b"q") is None
    assert words.spell(b"aq") is None


def test_names_of_special_tokens_in_a_users_text_are_text(words: Vocabulary):
    ids = words.encode("a</s><s>b")
    assert words.eos not in ids
    assert words.bos not in ids
    assert words.decode(ids).strip() == "a</s><s>b"


@given(st.text(max_size=20))
def test_decoding_gives_back_what_was_encoded(bytes_words: Vocabulary, text: str):
    assert bytes_words.decode(bytes_words.encode(text)) == text


def test_decoding_replaces_broken_characters_and_leaves_special_tokens_out(bytes_words: Vocabulary):
    assert bytes_words.decode([bytes_words.bos, 65, 0xE2, 66, bytes_words.eos, bytes_words.size + 5]) == "A\ufffdB"


def test_the_bos_is_added_where_the_tokenizer_does_so_itself():
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_level(MERGES)
    assert Vocabulary(tokenizer).encode("a") == [97]
    backend = tokenizer.backend_tokenizer
    bos = tokenizer.bos_token_id
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    assert Vocabulary(tokenizer).encode("a") == [bos, 97]


def test_the_digest_tells_tokenizers_apart():
    first, same, other = (Vocabulary(byte_level(merges)) for merges in (MERGES, MERGES, MERGES[:-1]))
    assert first.digest == same.digest != other.digest


def test_tokenizers_of_another_kind_are_refused():
    with pytest.raises(VocabularyError, match="the tokenizer of odd must be byte-level or mark spaces"):
        Vocabulary(word_level(["<unk>", "a"]), "odd")


def test_slow_tokenizers_are_refused():
    with pytest.raises(VocabularyError, match="slow needs a fast tokenizer"):
        Vocabulary(object(), "slow")


def pieces_by_bytes(found: Pair, target: Vocabulary, drafter: Vocabulary) -> dict[bytes, list[bytes]]:
    return {
        target.bytes_of(index): [drafter.bytes_of(piece) for piece in pieces]
        for index, pieces in enumerate(found.pieces)
        if pieces and target.bytes_of(index)
    }


@pytest.mark.parametrize("turned", [False, True])
def test_every_target_token_is_spelt_in_pieces(bytes_words, marked_words, turned: bool):
    target, drafter = (marked_words, bytes_words) if turned else (bytes_words, marked_words)
    found = pair(target, drafter)
    assert (len(found.pieces), found.drafter_size, found.unspelt) == (target.size, drafter.size, 0)
    for spelt, pieces in pieces_by_bytes(found, target, drafter).items():
        assert b"".join(pieces) == spelt
    assert found.direct == sum(len(pieces or ()) == 1 for pieces in found.pieces)


def test_direct_maps_and_ngrams_are_told_apart(bytes_words, marked_words):
    spelt = pieces_by_bytes(pair(bytes_words, marked_words), bytes_words, marked_words)
    assert spelt[b"ab"] == [b"ab"]
    assert spelt[b"abc"] == [b"ab", b"c"]
    assert spelt[b"\xe2\x82"] == [b"\xe2", b"\x82"], "half of a character"
    assert spelt[b"\xc3\xa9"] == ["é".encode()]


def test_the_ends_meet_by_role_and_other_special_tokens_stay_apart(bytes_words, marked_words):
    found = pair(bytes_words, marked_words)
    assert found.pieces[bytes_words.eos] == found.context[bytes_words.eos] == (marked_words.eos,)
    assert found.pieces[bytes_words.bos] is None
    assert found.context[bytes_words.bos] == ()


def test_of_tokens_with_the_same_bytes_one_can_be_drafted_and_all_can_be_read(bytes_words, marked_words):
    found = pair(marked_words, bytes_words)
    normal = 256 + LETTERS.index("a")
    assert found.pieces[normal] == (ord("a"),)
    assert found.pieces[ord("a")] is None, "the byte token <0x61> is a duplicate"
    assert found.context[ord("a")] == found.context[normal] == (ord("a"),)


def test_no_two_target_tokens_have_the_same_pieces(bytes_words, marked_words):
    for target, drafter in ((bytes_words, marked_words), (marked_words, bytes_words)):
        spelt = [pieces for pieces in pair(target, drafter).pieces if pieces]
        assert len(spelt) == len(set(spelt))


def test_a_drafter_that_cannot_spell_the_target_is_refused(bytes_words):
    poor = Vocabulary(byte_level([]), "poor")
    poor.token_bytes = tuple(None if spelt and spelt > b"\x80" else spelt for spelt in poor.token_bytes)
    with pytest.raises(VocabularyError, match=r"drafter poor must be able to spell .* no pieces for \d+ of 263 tokens"):
        pair(bytes_words, poor)


def test_the_pairs_digest_depends_on_both_and_on_their_order(bytes_words, marked_words):
    ways = [(bytes_words, marked_words), (marked_words, bytes_words), (bytes_words, bytes_words)]
    assert len({pair(*way).digest for way in ways}) == 3
