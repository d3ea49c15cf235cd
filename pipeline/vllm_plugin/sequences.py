"""Which request of an engine's batch is which, recognised by its text: the engine names none of them.

Shapes: T tokens of a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stages.contract.blocks import SequenceState
from stages.sampling.random_source import SeededRandomSource

Text = npt.NDArray[np.int32]


class EngineRow(NamedTuple):
    """A row of an engine's batch after a pass: its whole text, prompt included (T,), and how many of the last tokens
    the pass emitted, at least one.
    """

    text_T: Text
    emitted: int


@dataclass(frozen=True)
class Recognised:
    """A row's sequence, and the tokens that the pass emitted.

    Attributes:
        sequence: holds the whole text.
        emitted: the new tokens.
        is_new: whether it was not there at the last step.
    """

    sequence: SequenceState
    emitted: tuple[int, ...]
    is_new: bool


@dataclass
class _Known:
    sequence: SequenceState
    text_T: Text

    def continues_in(self, row: EngineRow) -> bool:
        known = len(row.text_T) - row.emitted
        return len(self.text_T) == known and np.array_equal(self.text_T, row.text_T[:known])


class SequenceTable:
    """The sequences in flight, in the order of the engine's batch.

    A row is the sequence whose text is the row's without the tokens of the last pass. Sequences of equal text are
    interchangeable: the same may follow both. A row that continues none is a new sequence; so a chat whose next turn
    begins with all of the last one is never taken for its continuation.

    >>> table = SequenceTable(longest=100)
    >>> (first,), _ = table.recognise([EngineRow(np.array([5, 6, 7], np.int32), 1)])
    >>> first.sequence.prompt_length, first.emitted, first.is_new
    (2, (7,), True)
    >>> (again,), left = table.recognise([EngineRow(np.array([5, 6, 7, 8, 9], np.int32), 2)])
    >>> again.sequence is first.sequence, again.emitted, left
    (True, (8, 9), [])
    >>> _, left = table.recognise([])
    >>> left == [first.sequence]
    True

    Args:
        longest: maximum number of tokens of a text.
    """

    def __init__(self, longest: int) -> None:
        self._longest, self._seen = longest, 0
        self._known: list[_Known] = []

    def recognise(self, rows: Sequence[EngineRow]) -> tuple[list[Recognised], list[SequenceState]]:
        """Return the sequence of each row, and those that have no row any more: finished, aborted or preempted.

        The sequences' texts and numbers of remaining tokens are up to date afterwards.
        """
        free = dict(enumerate(self._known))
        found: list[Recognised] = []
        after: list[_Known] = []
        for place, row in enumerate(rows):
            key = _find(free, place, row)
            known = free.pop(key) if key is not None else self._make(row)
            emitted = tuple(row.text_T[-row.emitted :].tolist())
            self._append(known, row.text_T, emitted)
            found.append(Recognised(known.sequence, emitted, key is None))
            after.append(known)
        self._known = after
        return found, [known.sequence for known in free.values()]

    def _make(self, row: EngineRow) -> _Known:
        prompt_T = row.text_T[: len(row.text_T) - row.emitted].copy()
        tokens, offset = prompt_T.tolist(), self._seen
        self._seen += 1
        rng = SeededRandomSource(0, offset)
        sequence = SequenceState(offset, str(offset), "vllm", "", tokens, len(tokens), [], rng, self._longest)
        return _Known(sequence, prompt_T)

    def _append(self, known: _Known, text_T: Text, emitted: tuple[int, ...]) -> None:
        known.text_T = text_T.copy()
        known.sequence.tokens.extend(emitted)
        # One more token follows every draft.
        known.sequence.remaining_tokens = max(0, self._longest - len(text_T) - 1)


def _find(free: dict[int, _Known], place: int, row: EngineRow) -> int | None:
    """Return the key of the sequence that a row continues. Rows seldom move, so the same place is tried first."""
    for key in (place, *free):
        if key in free and free[key].continues_in(row):
            return key
    return None
