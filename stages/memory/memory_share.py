"""What the memory of one worker gives to the memories of the others.

Counts of a table are sums over texts: a table that learns the texts of another has the sum of both counts, in whatever
order. A text is far smaller than its counts, and nothing is counted twice. The chances of a calibration are pooled:
hits and trials of all workers are added, without the prior, which each has once.
"""

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
