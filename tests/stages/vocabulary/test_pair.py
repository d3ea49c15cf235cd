"""One vocabulary spelt in the pieces of another, and what becomes of special tokens."""

from collections.abc import Sequence

import pytest
from tokenizer_making import LETTERS, MERGES, byte_level, space_mark

from stages.vocabulary.pair import How, Pair, SpecialRule, pair
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import VocabularyError


def special(*names: str, texts: Sequence[str] = ()) -> Vocabulary:
    """A vocabulary with these special tokens; `<s>`, `</s>` and `<pad>` have their roles."""
    return Vocabulary(byte_level(MERGES, names, texts=texts), "special")


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


def test_direct_maps_and_ngrams_are_distinguished(bytes_words, marked_words):
    spelt = pieces_by_bytes(pair(bytes_words, marked_words), bytes_words, marked_words)
    assert spelt[b"ab"] == [b"ab"]
    assert spelt[b"abc"] == [b"ab", b"c"]
    assert spelt[b"\xe2\x82"] == [b"\xe2", b"\x82"], "half of a character"
    assert spelt[b"\xc3\xa9"] == ["é".encode()]


def test_of_tokens_with_the_same_bytes_one_can_be_drafted_and_all_can_be_read(bytes_words, marked_words):
    found = pair(marked_words, bytes_words)
    normal = 256 + LETTERS.index("a")
    assert found.pieces[normal] == (ord("a"),)
    assert found.pieces[ord("a")] is None, "the byte token <0x61> is a duplicate"
    assert found.context[ord("a")] == found.context[normal] == (ord("a"),)


def test_a_drafter_that_cannot_spell_the_target_is_refused(bytes_words):
    poor = Vocabulary(byte_level([], without=bytes(range(0x80, 0x100))), "poor")
    for _ in range(2):  # also when it is known from the disk
        with pytest.raises(
            VocabularyError, match=r"drafter poor must be able to spell .* pieces for 130 of 263 tokens"
        ):
            pair(bytes_words, poor)


def test_a_few_tokens_may_stay_unspelt(bytes_words):
    found = pair(bytes_words, Vocabulary(byte_level([], without=b"\xff\xfe")))
    assert found.unspelt == 2
    assert [index for index, context in enumerate(found.context[:256]) if not context] == [0xFE, 0xFF]
    assert found.pieces[0xFF] is None


def map_token(target: Vocabulary, drafter: Vocabulary, rule: SpecialRule = "block") -> dict[str, tuple[How, object]]:
    """Per special token how it is mapped, and the drafter's special token or the text that it became."""
    names = {index: name for name, index in drafter.specials.items()}
    found = pair(target, drafter, rule)
    assert [one.token for one in found.specials] == sorted(one.token for one in found.specials)
    assert {one.name: one.token for one in found.specials} == target.specials
    assert all(found.context[one.token] == one.pieces for one in found.specials)
    return {
        one.name: (
            one.how,
            names[one.pieces[0]] if one.pieces and one.pieces[0] in names else drafter.decode(one.pieces),
        )
        for one in found.specials
    }


def test_special_tokens_meet_by_role_then_by_name():
    target = special("<s>", "</s>", "<pad>", "<tool>", "<other>")
    drafter = Vocabulary(space_mark(LETTERS, specials=("<tool>", "<pad>", "</s>", "<s>")), "drafter")
    assert map_token(target, drafter) == {
        "<s>": (How.ROLE, "<s>"),
        "</s>": (How.ROLE, "</s>"),
        "<pad>": (How.ROLE, "<pad>"),
        "<tool>": (How.NAME, "<tool>"),
        "<other>": (How.BLOCKED, ""),
    }
    found = pair(target, drafter)
    assert found.pieces[target.eos] == found.context[target.eos] == (drafter.eos,)
    assert found.pieces[target.specials["<tool>"]] == (drafter.specials["<tool>"],)
    other = target.specials["<other>"]
    assert (found.pieces[other], found.context[other]) == (None, ())


def test_special_tokens_are_spelt_where_the_rule_is_to_spell(marked_words):
    target = special("<s>", "</s>", "<a b>")
    found = pair(target, marked_words, "spell")
    pieces = found.pieces[target.specials["<a b>"]]
    assert pieces == found.context[target.specials["<a b>"]] == marked_words.spell(b"<a b>")
    assert len(pieces) == 5


def test_markers_that_are_shown_are_spelt_and_never_blocked_unasked():
    target, drafter = special("</s>", texts=["<|EOT|>", "[x]"]), special("</s>", "[x]")
    assert map_token(target, drafter) == {
        "</s>": (How.ROLE, "</s>"),
        "<|EOT|>": (How.SPELT, "<|EOT|>"),
        "[x]": (How.NAME, "[x]"),
    }


def test_pieces_belong_to_one_target_token_and_eos_is_first():
    target, drafter = special("<end>", "</s>"), Vocabulary(byte_level(MERGES, ["<end>"]), "drafter")
    drafter.eos = drafter.specials["<end>"]  # the role of one, the name of the other
    found, ids = pair(target, drafter), target.specials
    assert found.context[ids["<end>"]] == found.context[ids["</s>"]] == (drafter.eos,)
    assert found.pieces[ids["</s>"]] == (drafter.eos,)
    assert found.pieces[ids["<end>"]] is None, "a lower id, but not the end"
