"""Which sequence the request of each row of an engine's batch has, and which have ended.

Shapes: T tokens of a text.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stages.contract.blocks import SequenceState

Text = npt.NDArray[np.int32]


class RowRequest(NamedTuple):
    """What an engine knows of a request."""

    name: str  # its id
    longest: int  # number of tokens of its text, prompt included, at which it ends
    ends: frozenset[int] = frozenset()  # ids at which it ends, in addition to those of the model
    ignores_ends: bool = False  # whether it does not end at those of the model
    departure: str = "cancelled"  # why it ended, if it is gone before any of these: a reason of `PromptCompleted`


class EngineRow(NamedTuple):
    """A row of an engine's batch after a pass."""

    text_T: Text  # its whole text, prompt included (T,)
    emitted: int  # how many of the last tokens the pass emitted; none while it reads the prompt
    request: RowRequest
    verified: int | None = None  # how many drafted tokens the pass read; None if not known


@dataclass(frozen=True)
class Recognised:
    """A row's sequence, and the tokens that the pass emitted."""

    sequence: SequenceState  # holds the text before the pass
    emitted: tuple[int, ...]
    is_new: bool  # whether it was not there at the last step
    has_returned: bool  # whether it was paused: if it was preempted, the pass has read its text again
    limit: int  # number of tokens after which it ends, the new ones included


class Departed(NamedTuple):
    """A sequence that has no row any more, and why it ended."""

    sequence: SequenceState
    finish: str


@dataclass
class _Known:
    sequence: SequenceState
    text_T: Text
    request: RowRequest

    def continues_in(self, row: EngineRow) -> bool:
        known = len(row.text_T) - row.emitted
        return len(self.text_T) == known and bool((self.text_T == row.text_T[:known]).all())


class SequenceTable:
    """The sequences in flight, in the order of the engine's batch.

    A row is the sequence of its request's id, which also returns after a preemption: until then `reading` is set, and
    nothing is drafted for it. A row that does not continue the text of its sequence is a new one.

    >>> from stages.sampling.random_source import SeededRandomSource
    >>> def make(tokens, request):
    ...     return SequenceState(0, "id", "vllm", "", tokens, len(tokens), [], SeededRandomSource(0, 0), 100)
    >>> table = SequenceTable(make)
    >>> request = RowRequest("a", 90)
    >>> (first,), _ = table.recognise([EngineRow(np.array([5, 6, 7], np.int32), 1, request)])
    >>> first.sequence.tokens, first.emitted, first.is_new
    ([5, 6], (7,), True)
    >>> (again,), left = table.recognise([EngineRow(np.array([5, 6, 7, 8, 9], np.int32), 2, request)])
    >>> again.sequence is first.sequence, again.emitted, left
    (True, (8, 9), [])
    >>> _, left = table.recognise([])
    >>> left == [Departed(first.sequence, "cancelled")]
    True
    """

    def __init__(self, make: Callable[[list[int], RowRequest], SequenceState]) -> None:
        self._make = make
        self._known: list[_Known] = []

    def recognise(
        self, rows: Sequence[EngineRow], waiting: Collection[str] = ()
    ) -> tuple[list[Recognised | None], list[Departed]]:
        """Return the sequence of each row, and the sequences that have ended. `waiting` are the ids of requests that
        have not ended, whether they are in the batch or were preempted. Returns per row its sequence, None for a row
        that emitted nothing; and the sequences without a row that do not wait: finished or aborted.
        """
        before = {known.request.name: known for known in self._known}
        found: list[Recognised | None] = []
        after: list[_Known] = []
        for row in rows:
            if not row.emitted:
                found.append(None)
                continue
            known = before.get(row.request.name)
            if is_new := known is None or not known.continues_in(row):
                prompt_T = row.text_T[: len(row.text_T) - row.emitted].copy()
                known = _Known(self._make(prompt_T.tolist(), row.request), prompt_T, row.request)
            else:
                del before[row.request.name]
            limit = max(1, row.request.longest - len(known.text_T))
            has_returned, known.sequence.reading = known.sequence.reading, False
            known.text_T = row.text_T.copy()
            found.append(
                Recognised(known.sequence, tuple(row.text_T[-row.emitted :].tolist()), is_new, has_returned, limit)
            )
            after.append(known)
        alive = {*waiting} - {known.request.name for known in after}
        paused = [known for name, known in before.items() if name in alive]
        for known in paused:
            known.sequence.reading = True
        self._known = after + paused
        ended = [known for name, known in before.items() if name not in alive]
        return found, [Departed(known.sequence, known.request.departure) for known in ended]

    def pause(self) -> None:
        """Let nothing be drafted for any sequence until its next tokens."""
        for known in self._known:
            known.sequence.reading = True

    @property
    def paused(self) -> int:
        """Number of sequences that were preempted or paused."""
        return sum(known.sequence.reading for known in self._known)

    def forget(self, sequence: SequenceState) -> None:
        """Remove a sequence that has ended; if its row continues, it is a new one."""
        self._known = [known for known in self._known if known.sequence is not sequence]
