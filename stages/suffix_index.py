"""Where the end of a growing text stood before: what a lookup copies from."""

from collections.abc import Sequence
from typing import NamedTuple

NGRAMS = range(2, 9)  # pieces of a suffix that is looked up
LONGEST_MATCH = 32  # beyond this a longer match says no more
REACH = 4096  # pieces of a text that are remembered at least


class Match(NamedTuple):
    """The text's last `length` pieces also stand right before index `place`."""

    place: int
    length: int


class SuffixIndex:
    """Where the last pieces of a growing text stood before, in constant time per piece.

    Keeps, for every n-gram of 2 to 8 pieces, the place behind its last occurrence. The older half of what is kept is
    dropped as a whole, so that no more than `2 * reach` places are known.

    Args:
        reach: pieces that are remembered at least.

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
        """N-grams kept, at most `2 * reach` of each length."""
        return len(self._recent) + len(self._older)

    def read(self, pieces: Sequence[int]) -> None:
        """Take in what was appended to the text since the last call."""
        for place in range(self._known, len(pieces)):
            if place - self._begin == self._reach:
                self._older, self._recent, self._begin = self._recent, {}, place
            before = tuple(pieces[max(0, place - NGRAMS[-1]) : place])
            for length in NGRAMS[: max(0, len(before) - 1)]:
                self._recent[before[-length:]] = place
        self._known = len(pieces)

    def find(self, pieces: Sequence[int]) -> Match | None:
        """The last earlier place of the longest suffix, of 8 pieces at most, that is known; `pieces` as last read."""
        suffix = tuple(pieces[-NGRAMS[-1] :])
        for length in reversed(NGRAMS[: max(0, len(suffix) - 1)]):
            place = self._recent.get(suffix[-length:]) or self._older.get(suffix[-length:])
            if place:
                return Match(place, _match_length(pieces, place, length))
        return None


def _match_length(pieces: Sequence[int], place: int, known: int) -> int:
    """How many pieces before `place` are those at the end, `known` of them for certain."""
    length = known
    while length < min(place, LONGEST_MATCH) and pieces[place - length - 1] == pieces[-length - 1]:
        length += 1
    return length


def continuation(pieces: Sequence[int], place: int, count: int) -> tuple[int, ...]:
    """What followed at `place`; where the text ends, the repetition goes round.

    >>> continuation([7, 8, 9, 8, 9], 3, 5)
    (8, 9, 8, 9, 8)
    """
    period = len(pieces) - place
    return tuple(pieces[place + number % period] for number in range(count))
