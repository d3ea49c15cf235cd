"""Spells a target's vocabulary in a drafter's pieces, for translation, drafting and reading.

Ordinary tokens are spelt byte for byte. Control tokens are mapped by a rule; the result records how.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np

from stages.vocabulary.disk_cache import Arrays, digest_json, load_arrays, store_arrays
from stages.vocabulary.spelling import Pieces
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import VocabularyError


class How(StrEnum):
    """The way in which a control token of the target was mapped to pieces."""

    ROLE = "role"  # both begin a text, end it, or fill it up
    NAME = "name"  # the same name
    SPELT = "spelt"  # its name as text
    BLOCKED = "blocked"  # it has none


@dataclass(frozen=True)
class SpecialMapping:
    """A control token of the target in the drafter's pieces; without pieces if it is blocked."""

    token: int
    name: str
    how: How
    pieces: Pieces


# How control tokens of the target become pieces that have neither the role of EOS, BOS or PAD nor the name of a control
# token of the drafter: "spell" is the text of the token's name; "block" is no pieces, so it is neither proposed nor
# read. Tokens that have bytes (see `Vocabulary.specials`) appear in text and are always spelt.
SpecialRule = Literal["spell", "block"]


@dataclass(frozen=True)
class Pair:
    """A target's vocabulary in a drafter's pieces."""

    # per target id the drafter pieces that propose it; None for blocked control tokens, unused ids, and tokens
    # whose pieces another token owns
    pieces: tuple[Pieces | None, ...]
    # per target id the pieces that the drafter reads after the token was emitted; may be empty
    context: tuple[Pieces, ...]
    drafter_size: int  # number of the drafter's ids
    digest: str  # sha256 of the two vocabularies' digests and the rule
    unspelt: int  # target tokens with bytes that the drafter cannot spell
    specials: tuple[SpecialMapping, ...] = ()  # the target's control tokens, in id order

    @property
    def direct(self) -> int:
        return sum(1 for pieces in self.pieces if pieces and len(pieces) == 1)


def pair(target: Vocabulary, drafter: Vocabulary, rule: SpecialRule = "block") -> Pair:
    """Spell every target token in the drafter's pieces; by default control tokens without a counterpart are blocked.

    A sequence of pieces is owned by one target token. Of ordinary tokens with the same bytes it is the one that the
    target's tokenizer prefers; ordinary tokens precede control tokens; of control tokens EOS is first, then the lower
    id. Raises `VocabularyError` if more than one target token in a hundred cannot be spelt.
    """
    digest = digest_json(target.digest, drafter.digest, rule, {})  # the last is in digests that are stored
    found: Pair | None = load_arrays("pair", digest, lambda arrays: _from_arrays(arrays, target, drafter, digest))
    if found is None:
        found = _spell_pair(target, drafter, rule, digest)
        store_arrays("pair", digest, _to_arrays(found))
    if found.unspelt > target.size // 100:
        raise VocabularyError(
            f"the drafter {drafter.name} must be able to spell the target's bytes, but has no pieces for "
            f"{found.unspelt:,} of {target.size:,} tokens of {target.name}; "
            "use a drafter with a byte-level or byte-fallback tokenizer"
        )
    return found


def _spell_pair(target: Vocabulary, drafter: Vocabulary, rule: SpecialRule, digest: str) -> Pair:
    cuts = drafter.spell_each([spelt or b"" for spelt in target.token_bytes])
    specials = tuple(
        SpecialMapping(token, name, *_map_special(name, token, target, drafter, rule))
        for name, token in target.specials.items()
    )
    context = [cut or () for cut in cuts]
    for special in specials:
        context[special.token] = special.pieces
    ordinary = set(target.id_of_bytes.values())
    pieces = [cut if cut and index in ordinary else None for index, cut in enumerate(context)]
    owned = set(pieces)
    for special in sorted(specials, key=lambda special: special.token != target.eos):
        if special.pieces not in owned:
            pieces[special.token] = special.pieces or None
            owned.add(special.pieces)
    return Pair(tuple(pieces), tuple(context), drafter.size, digest, cuts.count(None), specials)


def _map_special(
    name: str, token: int, target: Vocabulary, drafter: Vocabulary, rule: SpecialRule
) -> tuple[How, Pieces]:
    for ours, theirs in ((target.eos, drafter.eos), (target.bos, drafter.bos), (target.pad, drafter.pad)):
        if ours == token and theirs is not None:
            return How.ROLE, (theirs,)
    if name in drafter.specials:
        return How.NAME, (drafter.specials[name],)
    pieces = drafter.spell(name.encode()) if rule == "spell" or target.bytes_of(token) is not None else ()
    return (How.SPELT, pieces) if pieces else (How.BLOCKED, ())


def _to_arrays(found: Pair) -> Arrays:
    flat = [piece for pieces in found.context for piece in pieces]
    return {
        "lengths": np.array([len(pieces) for pieces in found.context], dtype=np.int32),
        "flat": np.array(flat, dtype=np.int32),
        "drafted": np.array([pieces is not None for pieces in found.pieces], dtype=bool),
        "how": np.array([list(How).index(special.how) for special in found.specials], dtype=np.uint8),
        "unspelt": np.array(found.unspelt),
    }


def _from_arrays(arrays: Arrays, target: Vocabulary, drafter: Vocabulary, digest: str) -> Pair:
    flat, ends = tuple(arrays["flat"].tolist()), arrays["lengths"].cumsum().tolist()
    context = tuple(flat[end - length : end] for length, end in zip(arrays["lengths"].tolist(), ends, strict=True))
    drafted = arrays["drafted"].tolist()
    pieces = tuple(cut if own else None for cut, own in zip(context, drafted, strict=True))
    hows = [list(How)[how] for how in arrays["how"].tolist()]
    specials = tuple(
        SpecialMapping(token, name, how, context[token])
        for (name, token), how in zip(target.specials.items(), hows, strict=True)
    )
    return Pair(pieces, context, drafter.size, digest, int(arrays["unspelt"]), specials)
