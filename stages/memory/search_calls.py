"""Calls of the compiled search from Python: a table of integers in, the trees or the predictions out.

Shapes: B rows of a batch, N candidates.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import carray

from stages.engine.compiled.lines.compiling import CompiledCall, as_pointer, compiled
from stages.memory.calibration import CELLS, ChanceArrays
from stages.memory.counting import CONTINUATIONS, TableArrays
from stages.memory.ngram_table import FIRST_SLOTS, SLOT_BYTES, NgramTable
from stages.memory.options import Integers, SearchedRows, Sources, observe_rows
from stages.memory.tree_growth import FOUND_FIELDS, Curve, grow_rows

# Places in the table: of what is searched, of the batch, and of what is particular to a call.
TABLE, SLOTS, CHANCES, ENDS, END_COUNT, ORDER, OWN = 0, 6, 7, 11, 12, 13, 14
TEXTS, LINES, CAPACITY, ROW_NUMBERS, ROWS, NODES, WIDTH, OTHERS = 15, 16, 17, 18, 19, 20, 21, 22


class RowNumbers(NamedTuple):
    """Of the rows of a batch: the line of each text, its length, the hash of no token, and the limit of the depth."""

    lines: Sequence[int]
    lengths: Sequence[int]
    first: Sequence[int]
    depths: Sequence[int]


@compiled
def _read_sources(table: Integers) -> Sources:
    slots = table[SLOTS]
    continuations = slots * CONTINUATIONS
    arrays = TableArrays(
        carray(as_pointer(table[TABLE]), (slots,), dtype=np.uint64),
        carray(as_pointer(table[TABLE + 1]), (continuations,), dtype=np.int32),
        carray(as_pointer(table[TABLE + 2]), (continuations,), dtype=np.uint32),
        carray(as_pointer(table[TABLE + 3]), (slots,), dtype=np.uint32),
        carray(as_pointer(table[TABLE + 4]), (slots,), dtype=np.uint32),
        carray(as_pointer(table[TABLE + 5]), (slots,), dtype=np.uint32),
    )
    chances = ChanceArrays(
        carray(as_pointer(table[CHANCES]), (CELLS,), dtype=np.float64),
        carray(as_pointer(table[CHANCES + 1]), (CELLS,), dtype=np.float64),
        carray(as_pointer(table[CHANCES + 2]), (CELLS,), dtype=np.float64),
        carray(as_pointer(table[CHANCES + 3]), (CELLS,), dtype=np.float64),
    )
    ends = carray(as_pointer(table[ENDS]), (table[END_COUNT],), dtype=np.int64)
    return Sources(arrays, chances, ends, table[ORDER], table[OWN] != 0)


@compiled
def _read_batch(table: Integers) -> SearchedRows:
    rows, numbers = table[ROWS], table[ROW_NUMBERS]
    return SearchedRows(
        carray(as_pointer(table[TEXTS]), (table[LINES], table[CAPACITY]), dtype=np.int32),
        carray(as_pointer(numbers), (rows,), dtype=np.int64),
        carray(as_pointer(numbers + 8 * rows), (rows,), dtype=np.int64),
        carray(as_pointer(numbers + 16 * rows), (rows,), dtype=np.uint64),
        carray(as_pointer(numbers + 24 * rows), (rows,), dtype=np.int64),
        table[NODES],
        table[WIDTH],
    )


@CompiledCall
def _grow(table: Integers) -> None:
    points, most = table[OTHERS], table[ROWS] * table[NODES]
    costs = carray(as_pointer(table[OTHERS + 2]), (points + 1,), dtype=np.float64)
    curve = Curve(carray(as_pointer(table[OTHERS + 1]), (points,), dtype=np.int64), costs[:points], costs[points])
    fields = carray(as_pointer(table[OTHERS + 3]), (most, FOUND_FIELDS), dtype=np.int64)
    chances = carray(as_pointer(table[OTHERS + 4]), (most, 2), dtype=np.float64)
    count = carray(as_pointer(table[OTHERS + 5]), (1,), dtype=np.int64)
    count[0] = grow_rows(_read_sources(table), _read_batch(table), curve, fields, chances)


@CompiledCall
def _observe(table: Integers) -> None:
    emitted = carray(as_pointer(table[OTHERS]), (table[OTHERS + 1],), dtype=np.int64)
    counts = carray(as_pointer(table[OTHERS + 2]), (table[ROWS],), dtype=np.int64)
    predicted = carray(as_pointer(table[OTHERS + 3]), (table[ROWS],), dtype=np.int64)
    observe_rows(_read_sources(table), _read_batch(table), emitted, counts, predicted)


def compile_search() -> None:
    """Compile the search and the table, or load them: before the first draft, and during work that nobody times."""
    _grow.prepare()
    _observe.prepare()
    table = NgramTable(FIRST_SLOTS * SLOT_BYTES)
    table.learn((1, 2), 0)


class Search:
    """The compiled search over a table, a calibration and the texts of rows. `texts` returns a line of tokens per row;
    a longer array may replace it. `own`: whether the own texts are a source. A tree has at most `nodes` candidates, and
    `width` after one place.
    """

    def __init__(
        self,
        table: NgramTable,
        chances: ChanceArrays,
        texts: Callable[[], npt.NDArray[np.int32]],
        ends: Sequence[int],
        *,
        own: bool,
        nodes: int,
        width: int,
    ) -> None:
        self._table, self._chances, self._texts = table, chances, texts
        self._ends, self._own, self._limits = np.array(ends, np.int64), own, (nodes, width)
        self._listed: TableArrays | None = None  # for which the numbers of the sources were listed
        self._sources: tuple[int, ...] = ()

    def grow(
        self, rows: RowNumbers, curve: tuple[Sequence[tuple[int, float]], float]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return the candidates of all rows, row by row and depth first: token, source, context, seen, row, parent and
        depth of each (N, 7), and its chance and survival (N, 2).
        """
        points, around = curve
        count, most = array("q", (0,)), len(rows.lines) * self._limits[0]
        fields, chances = np.empty((most, FOUND_FIELDS), np.int64), np.empty((most, 2))
        sizes = array("q", [size for size, _ in points])
        costs = array("d", [*(cost for _, cost in points), around])
        others = (
            len(points), _address(sizes), _address(costs), fields.ctypes.data, chances.ctypes.data, _address(count),
        )  # fmt: skip
        self._call(_grow, rows, others)
        return fields[: count[0]].tolist(), chances[: count[0]].tolist()

    def observe(self, rows: RowNumbers, emitted: Sequence[Sequence[int]]) -> list[int]:
        """Count the hits and trials of all options at the places of emitted tokens. Returns per row how many of its
        tokens the table alone held for the likeliest.
        """
        joined = array("q", [token for own in emitted for token in own])
        counts, predicted = array("q", map(len, emitted)), array("q", bytes(8 * len(emitted)))
        others = _address(joined), len(joined), _address(counts), _address(predicted)
        self._call(_observe, rows, others)
        return predicted.tolist()

    def _call(self, function: CompiledCall, rows: RowNumbers, others: Sequence[int]) -> None:
        table, texts = self._table.arrays, self._texts()
        if table is not self._listed:
            addresses = [one.ctypes.data for one in (*table, *self._chances)]
            listed = *addresses[:6], len(table.hashes), *addresses[6:], self._ends.ctypes.data, len(self._ends)
            self._listed, self._sources = table, (*listed, self._table.order, int(self._own))
        numbers = array("q", [number for column in rows for number in column])
        batch = texts.ctypes.data, *texts.shape, _address(numbers), len(rows.lines), *self._limits
        given = array("q", (*self._sources, *batch, *others))
        function(_address(given))


def _address(numbers: "array[Any]") -> int:
    return numbers.buffer_info()[0]
