"""The own text of a sequence as a source, in plain Python: the continuation of the last occurrence.

Known as prompt lookup (Saxena 2023) or LLMA (arXiv 2304.04487).
"""

from collections.abc import Sequence
from typing import NamedTuple

from stages.memory.counting import LONGEST
from stages.memory.options import LONGEST_MATCH, REACH

ORDERS = range(1, LONGEST + 1)  # lengths of the suffixes that are looked up, in tokens


class Match(NamedTuple):
    """The last `length` tokens also occur right before index `place` of the text."""

    place: int
    length: int


class SuffixIndex:
    """Finds earlier occurrences of the last tokens of a growing text, in constant time per token.

    Keeps, for every n-gram of 1 to 8 tokens, the index after its last occurrence that has a continuation. The older
    half of the index is dropped as a whole, so that at most `2 * reach` indices are kept per length.

    Args:
        reach: minimal number of tokens that are indexed.

    >>> index, text = SuffixIndex(), [5, 6, 7, 8, 5, 6]
    >>> index.read(text)
    >>> index.find((8, 5, 6)), text[2]
    (Match(place=2, length=2), 7)
    """

    def __init__(self, reach: int = REACH) -> None:
        self._reach, self._begin, self._known = reach, 0, 0
        self._recent: dict[tuple[int, ...], int] = {}
        self._older: dict[tuple[int, ...], int] = {}
        self._tokens: Sequence[int] = ()

    def __len__(self) -> int:
        """Number of n-grams kept, at most `2 * reach` of each length."""
        return len(self._recent) + len(self._older)

    def read(self, tokens: Sequence[int]) -> None:
        """Index the tokens that were appended to the text since the last call."""
        for place in range(self._known, len(tokens)):
            if place - self._begin == self._reach:
                self._older, self._recent, self._begin = self._recent, {}, place
            before = tuple(tokens[max(0, place - ORDERS[-1]) : place])
            for length in range(1, len(before) + 1):
                self._recent[before[-length:]] = place
        self._known, self._tokens = len(tokens), tokens

    def token_at(self, place: int) -> int:
        """Return the token of the text at a place."""
        return self._tokens[place]

    def extend_match(self, match: Match) -> Match:
        """Return a match at the end of the text with its true length: at most `LONGEST_MATCH` tokens."""
        tokens, (place, length) = self._tokens, match
        while length < min(place, LONGEST_MATCH) and tokens[place - length - 1] == tokens[-length - 1]:
            length += 1
        return Match(place, length)

    def find(self, suffix: tuple[int, ...]) -> Match | None:
        """Return the last occurrence of the longest indexed end of a suffix, at most 8 tokens; None if there is none.

        An n-gram is indexed only if its own suffixes are, so the search goes from the shortest on.
        """
        found: Match | None = None
        for length in range(1, min(len(suffix), ORDERS[-1]) + 1):
            key = suffix[-length:]
            place = self._recent.get(key) or self._older.get(key)
            if not place:
                break
            found = Match(place, length)
        return found
