"""Prompt lookup: where a row's text repeats itself, the continuation of the last occurrence is copied.

Known as prompt lookup (Saxena 2023) or LLMA (arXiv 2304.04487).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from typing_extensions import override

from stages.contract.blocks import SequenceState, Verdict
from stages.contract.snapshot import Saved, SnapshotReader
from stages.drafting.sources import (
    CopySource,
    DraftSourceSelector,
    DraftSourceSelectorState,
    Offer,
    count_accepted_pieces,
)
from store.events import DraftSource

NGRAMS = range(2, 9)  # lengths of the suffixes that are looked up, in pieces
LONGEST_MATCH = 32  # longer matches are counted as this long
REACH = 4096  # minimal number of pieces of a text that are indexed


class Match(NamedTuple):
    """The text's last `length` pieces also occur right before index `place`."""

    place: int
    length: int


class SuffixIndex:
    """Finds earlier occurrences of the last pieces of a growing text, in constant time per piece.

    Keeps, for every n-gram of 2 to 8 pieces, the index after its last occurrence. The older half of the index is
    dropped as a whole, so that at most `2 * reach` indices are kept per length.

    Args:
        reach: minimal number of pieces that are indexed.

    >>> index, text = SuffixIndex(), [5, 6, 7, 8, 5, 6]
    >>> index.read(text)
    >>> index.find(text)
    Match(place=2, length=2)
    """

    def __init__(self, reach: int = REACH) -> None:
        self._reach, self._begin, self._known = reach, 0, 0
        self._recent: dict[tuple[int, ...], int] = {}
        self._older: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        """Number of n-grams kept, at most `2 * reach` of each length."""
        return len(self._recent) + len(self._older)

    def read(self, pieces: Sequence[int]) -> None:
        """Index the pieces that were appended to the text since the last call."""
        for place in range(self._known, len(pieces)):
            if place - self._begin == self._reach:
                self._older, self._recent, self._begin = self._recent, {}, place
            before = tuple(pieces[max(0, place - NGRAMS[-1]) : place])
            for length in NGRAMS[: max(0, len(before) - 1)]:
                self._recent[before[-length:]] = place
        self._known = len(pieces)

    def find(self, pieces: Sequence[int]) -> Match | None:
        """Return the last earlier occurrence of the longest indexed suffix (at most 8 pieces) of the text last read."""
        suffix = tuple(pieces[-NGRAMS[-1] :])
        for length in reversed(NGRAMS[: max(0, len(suffix) - 1)]):
            place = self._recent.get(suffix[-length:]) or self._older.get(suffix[-length:])
            if place:
                return Match(place, _match_length(pieces, place, length))
        return None


def _match_length(pieces: Sequence[int], place: int, known: int) -> int:
    """Count the pieces before `place` that equal those at the end; the first `known` are equal already."""
    length = known
    while length < min(place, LONGEST_MATCH) and pieces[place - length - 1] == pieces[-length - 1]:
        length += 1
    return length


def continue_from(pieces: Sequence[int], place: int, count: int) -> tuple[int, ...]:
    """Return `count` pieces from `place` on; at the end of the text the repetition starts again at `place`.

    >>> continue_from([7, 8, 9, 8, 9], 3, 5)
    (8, 9, 8, 9, 8)
    """
    period = len(pieces) - place
    return tuple(pieces[place + number % period] for number in range(count))


@dataclass
class _RowLookup:
    """The state of a row: its index, and the copy of the current block."""

    index: SuffixIndex = field(default_factory=SuffixIndex)
    match: Match | None = None
    copied: tuple[int, ...] = ()
    length: int = 0  # number of the row's pieces at its last draft


class PromptLookup(CopySource):
    """Copies from the row's own text.

    Args:
        selector: compares copies with the model; one per target.
        allowed: pieces that may be drafted.
        most: maximal number of pieces of a copy.
    """

    source = DraftSource.LOOKUP
    key = "payoff"

    def __init__(self, selector: DraftSourceSelector, allowed: Collection[int], most: int) -> None:
        self._selector, self._allowed, self._most = selector, frozenset(allowed), most
        self._lookups: dict[SequenceState, _RowLookup] = {}

    @override
    def admit(self, row: SequenceState) -> None:
        self._lookups[row] = _RowLookup()

    @override
    def release(self, row: SequenceState) -> None:
        del self._lookups[row]

    @override
    def offer(self, row: SequenceState) -> Offer | None:
        lookup = self._lookups[row]
        lookup.index.read(row.pieces)
        lookup.match, lookup.copied, lookup.length = lookup.index.find(row.pieces), (), len(row.pieces)
        if lookup.match is None:
            return None
        copied = continue_from(row.pieces, lookup.match.place, min(self._most, row.remaining_tokens))
        lookup.copied = tuple(takewhile(self._allowed.__contains__, copied))
        length, rate = self._selector.choose_length(lookup.match.length, len(lookup.copied))
        return Offer(lookup.copied[:length], rate) if length else None

    @override
    def observe(self, verdict: Verdict) -> None:
        draft = verdict.proposal.draft
        lookup = self._lookups[draft.row]
        match = lookup.match.length if lookup.match else None
        if match is not None:
            self._selector.observe_copy(match, lookup.copied, draft.row.pieces[lookup.length :])
        if draft.source is DraftSource.MODEL:
            self._selector.observe_model(match, len(draft.pieces), count_accepted_pieces(verdict))
        elif draft.source is self.source and match is not None:
            self._selector.count_copy(match)

    @override
    def save(self) -> DraftSourceSelectorState:
        return self._selector.save()

    @override
    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        self._selector.restore(saved, reader)
