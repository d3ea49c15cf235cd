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


def test_no_two_target_tokens_have_the_same_pieces(bytes_words, marked_words):
    for target, drafter in ((bytes_words, marked_words), (marked_words, bytes_words)):
        spelt = [pieces for pieces in pair(target, drafter).pieces if pieces]
        assert len(spelt) == len(set(spelt))


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


def test_the_pairs_digest_depends_on_both_on_their_order_and_on_the_rule(bytes_words, marked_words):
    ways = [(bytes_words, marked_words), (marked_words, bytes_words), (bytes_words, bytes_words)]
    rules = [SpecialRule("spell"), SpecialRule(names={"<s>": "block"}), SpecialRule(names={"<s>": "spell"})]
    found = [pair(*way) for way in ways] + [pair(bytes_words, marked_words, rule) for rule in rules]
    assert len({one.digest for one in found}) == 6
    assert pair(bytes_words, marked_words, SpecialRule("block", {})).digest == found[0].digest


def map_token(
    target: Vocabulary, drafter: Vocabulary, rule: SpecialRule | None = None
) -> dict[str, tuple[How, object]]:
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


def test_a_role_counts_more_than_a_name():
    tokenizer = byte_level(MERGES, ["<s>", "</s>", "<end>"])
    tokenizer.eos_token = "<end>"
    drafter = Vocabulary(tokenizer, "drafter")
    assert map_token(special("<s>", "</s>"), drafter)["</s>"] == (How.ROLE, "<end>")
    assert map_token(drafter, special("<s>", "</s>")) == {
        "<s>": (How.ROLE, "<s>"),
        "</s>": (How.NAME, "</s>"),
        "<end>": (How.ROLE, "</s>"),
    }


def test_a_role_that_the_drafter_lacks_is_mapped_by_name_or_by_the_rule():
    target = special("<s>", "</s>")
    assert map_token(target, special("</s>"))["<s>"] == (How.BLOCKED, "")
    assert map_token(target, special("</s>"), SpecialRule("spell"))["<s>"] == (How.SPELT, "<s>")


def test_special_tokens_are_spelt_where_the_rule_is_to_spell(marked_words):
    target = special("<s>", "</s>", "<a b>")
    found = pair(target, marked_words, SpecialRule("spell"))
    pieces = found.pieces[target.specials["<a b>"]]
    assert pieces == found.context[target.specials["<a b>"]] == marked_words.spell(b"<a b>")
    assert len(pieces) == 5


def test_what_the_drafter_cannot_spell_is_blocked(bytes_words):
    drafter = Vocabulary(byte_level([], ["</s>"], without=b"<"))
    assert map_token(special("</s>", "<x>"), drafter, SpecialRule("spell"))["<x>"] == (How.BLOCKED, "")


def test_names_given_by_the_rule_count_before_everything():
    target, drafter = special("<s>", "</s>", "<tool>", "<x>"), special("<s>", "</s>", "<tool>", "<y>")
    rule = SpecialRule(names={"<s>": "spell", "</s>": "<y>", "<tool>": "block", "<x>": "</s>"})
    assert map_token(target, drafter, rule) == {
        "<s>": (How.SPELT, "<s>"),
        "</s>": (How.NAME, "<y>"),
        "<tool>": (How.BLOCKED, ""),
        "<x>": (How.NAME, "</s>"),
    }


def test_markers_that_are_shown_are_spelt_and_never_blocked_unasked():
    target, drafter = special("</s>", texts=["<|EOT|>", "[x]"]), special("</s>", "[x]")
    assert map_token(target, drafter) == {
        "</s>": (How.ROLE, "</s>"),
        "<|EOT|>": (How.SPELT, "<|EOT|>"),
        "[x]": (How.NAME, "[x]"),
    }
    assert map_token(target, drafter, SpecialRule(names={"<|EOT|>": "block"}))["<|EOT|>"] == (How.BLOCKED, "")


def test_pieces_belong_to_one_target_token_and_eos_is_first():
    target, drafter = special("<s>", "<x>", "</s>", "<y>"), special("</s>", "<z>")
    rule = SpecialRule(names={"<s>": "</s>", "<x>": "<z>", "<y>": "<z>"})
    found = pair(target, drafter, rule)
    ids = target.specials
    assert found.pieces[ids["</s>"]] == (drafter.eos,)
    assert found.pieces[ids["<s>"]] is None, "a lower id, but not the end"
    assert found.pieces[ids["<x>"]] == (drafter.specials["<z>"],)
    assert found.pieces[ids["<y>"]] is None, "a higher id"
    assert [found.context[ids[name]] for name in ("<s>", "<y>")] == [(drafter.eos,), (drafter.specials["<z>"],)]


def test_ordinary_text_keeps_its_pieces_before_a_special_token_that_is_spelt():
    target = special("</s>", " a")
    (ordinary,) = target.spell(b" a")
    assert ordinary != target.specials[" a"]
    found = pair(target, special("</s>"), SpecialRule("spell"))
    assert found.pieces[ordinary] == found.context[target.specials[" a"]] == (ordinary,)
    assert found.pieces[target.specials[" a"]] is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"<tol>": "block"}, r"'<tol>' must be a special token of the target special; the nearest is '<tool>'"),
        ({"<tool>": "<pat>"}, r"'<pat>' must be a special token of the drafter other; the nearest is '<pad>'"),
        ({"ab": "spell"}, r"'ab' must be a special token of the target"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(names, message: str):
    other = Vocabulary(byte_level(MERGES, ["</s>", "<pad>"]), "other")
    with pytest.raises(VocabularyError, match=message):
        pair(special("</s>", "<tool>"), other, SpecialRule(names=names))


def test_the_error_states_that_a_vocabulary_has_no_special_tokens(bytes_words):
    with pytest.raises(VocabularyError, match="'<x>' must be a special token of the target special; it has none"):
        pair(special(), bytes_words, SpecialRule(names={"<x>": "spell"}))


@pytest.mark.parametrize(
    ("entry", "target", "drafter"),
    [
        ("<|im_end|>=</s>", "<|im_end|>", "</s>"),
        ("<|im_end|>=spell", "<|im_end|>", "spell"),
        ("<a=b>=<c>", "<a=b>", "<c>"),
        ("<a>=<b=c>", "<a>", "<b=c>"),
        ("<a=b>=<c=d>", "<a=b>", "<c=d>"),
        ("[x=1]=[y=2]", "[x=1]", "[y=2]"),
        ("a=b=c", "a=b", "c"),
        ("===", "=", "="),
        ("<=block", "<", "block"),
    ],
)
def test_an_entry_is_divided_where_both_names_are_whole(entry: str, target: str, drafter: str):
    assert SpecialRule.from_entries("spell", [entry]) == SpecialRule("spell", {target: drafter})


@pytest.mark.parametrize("entry", ["", "=", "<x>", "<x>=", "=<x>"])
def test_an_entry_of_another_form_is_refused(entry: str):
    with pytest.raises(VocabularyError, match="must be TARGET=DRAFTER, TARGET=spell or TARGET=block"):
        SpecialRule.from_entries("block", [entry])


def test_a_name_that_is_given_twice_is_refused():
    with pytest.raises(VocabularyError, match="'<x>' is given twice"):
        SpecialRule.from_entries("block", ["<x>=spell", "<x>=block"])


def test_many_entries_are_one_rule():
    assert SpecialRule.from_entries("block", ["<x>=spell", "<y>=<z>"]) == SpecialRule(
        "block", {"<x>": "spell", "<y>": "<z>"}
    )
    assert SpecialRule.from_entries("block", []) == SpecialRule()
