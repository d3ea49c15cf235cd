"""Chances of candidates, learned online: how often candidates like this one were emitted."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stages.contract.snapshot import State
from stages.engine.compiled.lines.compiling import compiled
from stages.memory.counting import LONGEST

OWN_EDGES = (2, 3, 4, 5, 6, 8, 12, 20, 32)  # matches of the own text of 1, 2, ..., 32 tokens
COUNT_EDGES = (2, 4, 16)  # how often the memory saw the context
SHARE_EDGES = (0.2, 0.4, 0.6, 0.8, 0.95)  # the candidate's share of these
RANKS = 3  # candidates of one context
DECAY = 0.99  # per trial: the last hundred trials of a cell decide
PRIOR_HITS, PRIOR_TRIALS = 0.6, 3.0  # candidates are judged also where they are not proposed: no need for optimism

OWN_CELLS = len(OWN_EDGES) + 1
CELLS = OWN_CELLS + LONGEST * (len(COUNT_EDGES) + 1) * (len(SHARE_EDGES) + 1) * RANKS


@compiled
def _bisect_right(edges: tuple[float, ...], number: float) -> int:
    place = 0
    while place < len(edges) and edges[place] <= number:
        place += 1
    return place


@compiled
def own_cell(length: int) -> int:
    """Return the cell of a continuation of the own text after a match of this many tokens."""
    return _bisect_right(OWN_EDGES, length)


@compiled
def memory_cell(context: int, total: int, count: int, rank: int) -> int:
    """Return the cell of a continuation that the memory knows: after a context of so many tokens, seen `total` times,
    it followed `count` times.
    """
    counts, shares = len(COUNT_EDGES) + 1, len(SHARE_EDGES) + 1
    share = _bisect_right(SHARE_EDGES, count / total) if total else 0
    place = ((context - 1) * counts + _bisect_right(COUNT_EDGES, total)) * shares + share
    return OWN_CELLS + place * RANKS + rank


Cells = npt.NDArray[np.float64]


class ChanceArrays(NamedTuple):
    """Hits and trials per cell, and those of other calibrations."""

    hits: Cells
    trials: Cells
    hits_elsewhere: Cells
    trials_elsewhere: Cells


@compiled
def chance_of(cells: ChanceArrays, cell: int) -> float:
    """Return the estimated probability that a candidate of this cell is emitted where it is judged."""
    return (cells.hits[cell] + cells.hits_elsewhere[cell]) / (cells.trials[cell] + cells.trials_elsewhere[cell])


@compiled
def count_trial(cells: ChanceArrays, cell: int, hit: bool) -> None:
    """Count a candidate whose place was decided."""
    cells.hits[cell] = DECAY * cells.hits[cell] + hit
    cells.trials[cell] = DECAY * cells.trials[cell] + 1


class Calibration:
    """Decayed hits over trials per cell.

    >>> calibration = Calibration()
    >>> round(calibration.chance(own_cell(3)), 2)
    0.2
    >>> for _ in range(50):
    ...     calibration.observe(own_cell(3), hit=True)
    >>> round(calibration.chance(own_cell(3)), 2), round(calibration.chance(own_cell(4)), 2)
    (0.96, 0.2)
    """

    def __init__(self) -> None:
        self._cells = np.stack([np.full(CELLS, PRIOR_HITS), np.full(CELLS, PRIOR_TRIALS)])  # hits and trials
        self._first = self._cells.copy()  # before anything was observed here
        self._elsewhere = np.zeros_like(self._cells)
        self.arrays = ChanceArrays(*self._cells, *self._elsewhere)  # they stay the same ones

    def chance(self, cell: int) -> float:
        return float(chance_of(self.arrays, cell))

    def observe(self, cell: int, *, hit: bool) -> None:
        """Count a candidate whose place was decided."""
        count_trial(self.arrays, cell, hit)

    def evidence(self) -> Cells:
        """Return the hits and trials of the candidates observed here, without those of the prior or of a file."""
        limit = 1 / (1 - DECAY)  # a trial moves the trials of a cell towards it
        trials, first_trials = self._cells[1], self._first[1]
        below = first_trials < limit
        left = np.where(below, (limit - trials) / np.where(below, limit - first_trials, 1.0), 0.0)
        evidence: Cells = self._cells - left * self._first
        return evidence

    def pool(self, elsewhere: Cells) -> None:
        """Add the hits and trials of other calibrations to every chance, in place of those of the last call."""
        self._elsewhere[:] = elsewhere

    @property
    def cells(self) -> list[list[float]]:
        cells: list[list[float]] = self._cells.tolist()
        return cells

    def load_cells(self, cells: Sequence[Sequence[float]]) -> None:
        self._cells[:] = cells
        self._first = self._cells.copy()

    def state_dict(self) -> State:
        return {"cells": self.cells}

    def load_state_dict(self, state: State) -> None:
        self._cells[:] = state["cells"]
