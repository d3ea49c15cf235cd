"""What the memory of one worker of a run gives to the memories of the others, and its exchange between them.

Counts of a table are sums over texts: a table that learns the texts of another has the sum of both counts, in whatever
order. A text is far smaller than its counts, and nothing is counted twice. The chances of a calibration are pooled:
hits and trials of all workers are added, without the prior, which each has once.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from stages.memory.calibration import ObservedCells


@dataclass(frozen=True)
class LearnedText:
    """A text that was learned, with the arguments of `NgramTable.learn`: its tokens, the first counted one, the scope.

    Of what precedes the counted tokens it has no more than the longest context.
    """

    tokens: tuple[int, ...]
    begin: int
    scope: int


@dataclass(frozen=True)
class MemoryShare:
    """Texts, and per cell of the calibration the hits and trials of one or several workers; without cells, none.

    >>> one = MemoryShare((LearnedText((7, 8), 1, 0),), ObservedCells([1.0, 2.0], [4.0, 4.0]))
    >>> add_cells([one, MemoryShare(), one])
    ObservedCells(hits=[2.0, 4.0], trials=[8.0, 8.0])
    """

    texts: tuple[LearnedText, ...] = ()
    cells: ObservedCells | None = None


def add_cells(shares: Iterable[MemoryShare]) -> ObservedCells | None:
    """Return the sums of the hits and trials; None if no share has any."""
    cells = [share.cells for share in shares if share.cells]
    if not cells:
        return None
    hits = [sum(values) for values in zip(*(one.hits for one in cells), strict=True)]
    return ObservedCells(hits, [sum(values) for values in zip(*(one.trials for one in cells), strict=True)])


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
        self._shares: dict[str, MemoryShare] = {}  # by worker, without texts

    def receive(self, worker: str, share: MemoryShare) -> None:
        """Keep what a worker learned since its last share, and its hits and trials instead of those of that share."""
        self._texts.extend((worker, text) for text in share.texts)
        self._received += len(share.texts)
        self._shares[worker] = MemoryShare(cells=share.cells)

    def take(self, worker: str) -> MemoryShare:
        """Return what the other workers learned since the worker's last call, and the sums of their hits and trials.

        The sums are those of workers that were not removed, added in the order of their names.
        """
        missed = min(self._received - self._taken.get(worker, 0), len(self._texts))
        self._taken[worker] = self._received
        newest = list(self._texts)[len(self._texts) - missed :]
        others = [share for name, share in sorted(self._shares.items()) if name != worker]
        return MemoryShare(tuple(text for name, text in newest if name != worker), add_cells(others))

    def remove(self, worker: str) -> None:
        """Forget a worker; its texts stay."""
        self._taken.pop(worker, None)
        self._shares.pop(worker, None)
