"""What the memory of one worker of a run gives to the memories of the others, and its exchange between them.

Counts of a table are sums over texts: a table that learns the texts of another has the sum of both counts, in whatever
order. A text is far smaller than its counts, and nothing is counted twice. The chances of a calibration are pooled:
hits and trials of all workers are added, without the prior, which each has once.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from stages.memory.calibration import Cells


@dataclass(frozen=True)
class LearnedText:
    """A text that was learned, with the arguments of `NgramTable.learn`: its tokens, the first counted one, the scope.

    Of what precedes the counted tokens it has no more than the longest context.
    """

    tokens: tuple[int, ...]
    begin: int
    scope: int


@dataclass(frozen=True, eq=False)
class MemoryShare:
    """Texts, and per cell of the calibration the hits and trials of one or several workers; without cells, none."""

    texts: tuple[LearnedText, ...] = ()
    cells: Cells | None = None


KEPT_TEXTS = 4096  # the newest; a worker that joins learns them


class MemoryExchange:
    """The texts of all workers, newest last, and the newest hits and trials of each. Used by one thread.

    >>> exchange = MemoryExchange()
    >>> exchange.receive("a", MemoryShare((LearnedText((7, 8), 1, 0),)))
    >>> exchange.take("a").texts, exchange.take("b").texts, exchange.take("b").texts
    ((), (LearnedText(tokens=(7, 8), begin=1, scope=0),), ())
    """

    def __init__(self) -> None:
        self._texts: deque[tuple[str, LearnedText]] = deque(maxlen=KEPT_TEXTS)
        self._received = 0  # number of texts
        self._taken: dict[str, int] = {}  # by worker: number of texts up to which it has all
        self._cells: dict[str, Cells] = {}  # by worker

    def receive(self, worker: str, share: MemoryShare) -> None:
        """Keep what a worker learned since its last share, and its hits and trials instead of those of that share."""
        self._texts.extend((worker, text) for text in share.texts)
        self._received += len(share.texts)
        if share.cells is not None:
            self._cells[worker] = share.cells

    def take(self, worker: str) -> MemoryShare:
        """Return what the other workers learned since the worker's last call, and the sums of their hits and trials.

        The sums are those of workers that were not removed, added in the order of their names.
        """
        missed = min(self._received - self._taken.get(worker, 0), len(self._texts))
        self._taken[worker] = self._received
        newest = list(self._texts)[len(self._texts) - missed :]
        others = [cells for name, cells in sorted(self._cells.items()) if name != worker]
        texts = tuple(text for name, text in newest if name != worker)
        return MemoryShare(texts, np.sum(others, axis=0) if others else None)

    def remove(self, worker: str) -> None:
        """Forget a worker; its texts stay."""
        self._taken.pop(worker, None)
        self._cells.pop(worker, None)
