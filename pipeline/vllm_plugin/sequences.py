"""Which request of an engine's batch is which, recognised by its text: the engine names none of them.

Shapes: T tokens of a text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stages.contract.blocks import SequenceState

Text = npt.NDArray[np.int32]


class EngineRow(NamedTuple):
    """A row of an engine's batch after a pass: its whole text, prompt included (T,), and how many of the last tokens
    the pass emitted; none while it reads the prompt.
    """

    text_T: Text
    emitted: int


@dataclass(frozen=True)
class Recognised:
    """A row's sequence, and the tokens that the pass emitted.

    Attributes:
        sequence: holds the text before the pass.
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

    >>> from stages.sampling.random_source import SeededRandomSource
    >>> def make(tokens):
    ...     return SequenceState(0, "id", "vllm", "", tokens, len(tokens), [], SeededRandomSource(0, 0), 100)
    >>> table = SequenceTable(make)
    >>> (first,), _ = table.recognise([EngineRow(np.array([5, 6, 7], np.int32), 1)])
    >>> first.sequence.tokens, first.emitted, first.is_new
    ([5, 6], (7,), True)
    >>> (again,), left = table.recognise([EngineRow(np.array([5, 6, 7, 8, 9], np.int32), 2)])
    >>> again.sequence is first.sequence, again.emitted, left
    (True, (8, 9), [])
    >>> _, left = table.recognise([])
    >>> left == [first.sequence]
    True

    Args:
        make: makes a sequence of the tokens of its prompt.
    """

    def __init__(self, make: Callable[[list[int]], SequenceState]) -> None:
        self._make = make
        self._known: list[_Known] = []

    def recognise(self, rows: Sequence[EngineRow]) -> tuple[list[Recognised | None], list[SequenceState]]:
        """Return the sequence of each row, None for a row that emitted nothing, and the sequences that have no row any
        more: finished, aborted or preempted.
        """
        free = dict(enumerate(self._known))
        found: list[Recognised | None] = []
        after: list[_Known] = []
        for place, row in enumerate(rows):
            if not row.emitted:
                found.append(None)
                continue
            key = _find(free, place, row)
            known = free.pop(key) if key is not None else self._enter(row)
            known.text_T = row.text_T.copy()
            found.append(Recognised(known.sequence, tuple(row.text_T[-row.emitted :].tolist()), key is None))
            after.append(known)
        self._known = after
        return found, [known.sequence for known in free.values()]

    def forget(self, sequence: SequenceState) -> None:
        """Remove a sequence that has ended; if its row continues, it is a new one."""
        self._known = [known for known in self._known if known.sequence is not sequence]

    def _enter(self, row: EngineRow) -> _Known:
        prompt_T = row.text_T[: len(row.text_T) - row.emitted].copy()
        return _Known(self._make(prompt_T.tolist()), prompt_T)


def _find(free: dict[int, _Known], place: int, row: EngineRow) -> int | None:
    """Return the key of the sequence that a row continues. Rows seldom move, so the same place is tried first."""
    for key in (place, *free):
        if key in free and free[key].continues_in(row):
            return key
    return None
