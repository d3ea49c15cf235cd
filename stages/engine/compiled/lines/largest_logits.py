"""The largest logits of lines, selected by a compiled function, which teachers call between two passes.

A line of 49,152 logits is read at the speed of the second cache. To find its K largest, it is divided into chunks, each
of every 16th number of `BLOCK` vectors. The K-th largest of the chunks' maxima is a lower bound: fewer than K chunks
have numbers above it, so few numbers are left, and these are ordered by counting for each how many come before it.

Shapes: N lines, V logits of a line, K largest.
"""

from array import array
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from torch import Tensor

from stages.engine.compiled.lines.line import Line, can_read
from stages.engine.compiled.llvm.emitter import FLOAT, INT, INTS, LONG, VECTOR, VECTOR_SIZE, Emitter, Value
from stages.engine.compiled.llvm.machine import compile_call
from stages.engine.compiled.llvm.vector_math import exponential

BLOCK = 32  # vectors of a block, and numbers of a chunk
MASK = ir.IntType(VECTOR_SIZE)
HIGHEST_BIT = 1 << 31


class Selection(IntEnum):
    """Numbers of the table that `select` reads."""

    LOGITS, STRIDE, SIZE, LINES, NUMBERS, COUNT, SCALE, IDS, VALUES, SUMS, TAIL, MAXIMA, PLACES, FOUND = range(14)


class LargestLogits:
    """Selects the largest logits of lines. Not for two threads at once: its memory is used again.

    >>> import torch
    >>> logits_NV = torch.tensor([[0.2, 0.5] + [0.01] * 30]).log()
    >>> ids, logits, sums = LargestLogits(count=2, temperature=1.0)(logits_NV, lines=[0])
    >>> ids.tolist(), np.exp(logits).round(1).astype(str).tolist(), sums.round(2).tolist()
    ([[1, 0]], [['0.5', '0.2']], [[2.0]])

    Args:
        count: K.
        temperature: of the sums, above 0.
    """

    def __init__(self, count: int, temperature: float) -> None:
        self._count, self._scale = count, np.array([1 / temperature], np.float32)
        self._size = 0
        self._scratch: list[npt.NDArray[Any]] = []
        self._table = np.zeros(len(Selection), np.int64)

    @staticmethod
    def reads(logits_NV: Tensor) -> bool:
        """Return whether logits can be read: at least one line, see `can_read`."""
        return len(logits_NV) > 0 and can_read(logits_NV)

    def __call__(
        self, logits_NV: Tensor, lines: Sequence[int]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the ids of the largest logits of some lines and these logits, in descending order (N, K), of equal
        ones the first, and the sum of the exponentials of all distances from the largest, at the temperature (N, 1).

        Args:
            logits_NV: at least K per line, no NaN.
            lines: indices of N lines.
        """
        size, numbers = logits_NV.shape[1], array("q", lines)
        shape = len(numbers), self._count
        ids, values, sums = np.empty(shape, np.int32), np.empty(shape, np.float32), np.empty((shape[0], 1), np.float32)
        if size != self._size:
            self._reserve(size)
        given = logits_NV.data_ptr(), logits_NV.stride(0), size, len(numbers), numbers.buffer_info()[0]
        outputs = ids.ctypes.data, values.ctypes.data, sums.ctypes.data
        self._table[: Selection.TAIL] = (*given, self._count, self._scale.ctypes.data, *outputs)
        _compile_selection()(self._table.ctypes.data)
        return ids, values, sums

    def _reserve(self, size: int) -> None:
        """Reserve the memory that the selection of a line writes to."""
        chunks = VECTOR_SIZE * -(-size // (BLOCK * VECTOR_SIZE))
        # Numbers above the bound lie in fewer than K chunks; without so many chunks there is no bound.
        most = (BLOCK + 1) * self._count if size >= 2 * BLOCK * self._count else size
        tail, maxima = np.empty(VECTOR_SIZE, np.float32), np.empty(chunks, np.int32)
        places, found = np.empty(most + VECTOR_SIZE, np.int32), np.empty(most + VECTOR_SIZE, np.float32)
        self._size, self._scratch = size, [tail, maxima, places, found]
        self._table[Selection.TAIL :] = [one.ctypes.data for one in self._scratch]


@cache
def _compile_selection() -> Callable[[int], None]:
    """Return the compiled function, which reads a table of `Selection`."""
    return compile_call("select_largest", _emit_select)


def _emit_select(emit: Emitter) -> None:
    selection = _Selection(emit)
    with emit.loop(0, emit.field(emit.arguments[0], Selection.LINES)) as line:
        selection.emit_line(line)


class _Selection:
    """Emits the parts of the selection, in the order in which they run."""

    def __init__(self, emit: Emitter) -> None:
        table = emit.arguments[0]
        self.emit, self.build = emit, emit.builder
        self.size, self.count = emit.field(table, Selection.SIZE), emit.field(table, Selection.COUNT)
        self.logits, self.stride = emit.pointer(table, Selection.LOGITS), emit.field(table, Selection.STRIDE)
        self.numbers = emit.pointer(table, Selection.NUMBERS)
        self.ids, self.values = emit.pointer(table, Selection.IDS), emit.pointer(table, Selection.VALUES)
        self.sums = emit.pointer(table, Selection.SUMS)
        self.maxima = emit.pointer(table, Selection.MAXIMA)
        self.places, self.found = emit.pointer(table, Selection.PLACES), emit.pointer(table, Selection.FOUND)
        self.scale = emit.spread(emit.load(emit.pointer(table, Selection.SCALE), FLOAT))
        self.line = Line(emit, self.size, emit.pointer(table, Selection.TAIL))
        self.blocks = emit.divide(emit.add(self.line.vectors, BLOCK - 1), BLOCK)
        self.kept = emit.variable(LONG, emit.long(0))  # numbers that were kept of this line

    def emit_line(self, line: Value) -> None:
        """Emit the selection of a line, given by its place among the selected ones."""
        emit = self.emit
        number = emit.load(emit.offset(self.numbers, line, 8), LONG, 8)
        start = emit.offset(self.logits, emit.multiply(number, self.stride), 4)
        self.line.begin(start)
        self._find_maxima(start)
        bound = self._find_bound()
        emit.set(self.kept, emit.long(0))
        self._keep(start, bound, above=True)
        limit = emit.add(emit.get(self.kept, LONG), self.count)
        self._keep(start, bound, above=False, limit=limit)
        own = emit.multiply(line, self.count)
        self._order(emit.offset(self.ids, own, 4), emit.offset(self.values, own, 4))
        highest = emit.spread(emit.load(emit.offset(self.values, own, 4), FLOAT))
        emit.store(self._add_exponentials(start, highest), emit.offset(self.sums, line, 4))

    def _vectors_of(self, block: Value) -> tuple[Value, Value]:
        """Return the first vector of a block and the one after its last."""
        first = self.emit.multiply(block, BLOCK)
        end = self.emit.add(first, BLOCK)
        return first, self.build.select(self.build.icmp_signed("<", end, self.line.vectors), end, self.line.vectors)

    def _key(self, floats: Value) -> Value:
        """Return integers that are ordered, without signs, as these numbers are."""
        build = self.build
        bits = build.bitcast(build.fadd(floats, self.emit.floats(0.0)), INTS)  # which makes -0 equal to 0
        negative = build.icmp_signed("<", bits, self.emit.ints(0))
        return build.select(negative, build.not_(bits), build.xor(bits, self.emit.ints(HIGHEST_BIT)))

    def _find_maxima(self, start: Value) -> None:
        """Store the keys of the largest numbers of all chunks."""
        emit, build = self.emit, self.build
        largest = emit.variable(VECTOR, emit.floats(0.0))
        with emit.loop(0, self.blocks) as block:
            emit.set(largest, emit.floats(float("-inf")))
            with emit.loop(*self._vectors_of(block)) as vector:
                numbers, old = self.line.load(start, vector), emit.get(largest, VECTOR)
                emit.set(largest, build.select(build.fcmp_ordered(">", numbers, old), numbers, old))
            emit.store(self._key(emit.get(largest, VECTOR)), emit.offset(self.maxima, block, 4 * VECTOR_SIZE))

    def _find_bound(self) -> Value:
        """Return the largest key that `count` of the maxima reach, bit by bit; 0 if there are fewer maxima."""
        emit, build = self.emit, self.build
        bound, reached = emit.variable(INT, ir.Constant(INT, 0)), emit.variable(INTS, emit.ints(0))
        emit.set(bound, ir.Constant(INT, 0))
        with emit.loop(0, 32) as number:
            bit = build.lshr(ir.Constant(INT, HIGHEST_BIT), build.trunc(number, INT))
            tried = build.or_(emit.get(bound, INT), bit)
            wanted = emit.spread(tried)
            emit.set(reached, emit.ints(0))
            with emit.loop(0, self.blocks) as block:
                keys = emit.load(emit.offset(self.maxima, block, 4 * VECTOR_SIZE), INTS)
                more = build.zext(build.icmp_unsigned(">=", keys, wanted), INTS)
                emit.set(reached, build.add(emit.get(reached, INTS), more))
            total = build.sext(emit.total(emit.get(reached, INTS)), LONG)
            enough = build.icmp_signed(">=", total, self.count)
            emit.set(bound, build.select(enough, tried, emit.get(bound, INT)))
        return emit.get(bound, INT)

    def _keep(self, start: Value, bound: Value, *, above: bool, limit: Value | None = None) -> None:
        """Keep the numbers above the bound, or those equal to it while fewer than `limit` are kept."""
        emit, build, wanted = self.emit, self.build, self.emit.spread(bound)
        comparison = ">" if above else "=="
        with emit.loop(0, self.blocks) as block:
            keys = emit.load(emit.offset(self.maxima, block, 4 * VECTOR_SIZE), INTS)
            some = build.icmp_unsigned(">" if above else ">=", keys, wanted)
            with emit.condition(self._any(some)), emit.loop(*self._vectors_of(block)) as vector:
                numbers = self.line.load(start, vector)
                chosen = build.icmp_unsigned(comparison, self._key(numbers), wanted)
                with emit.condition(self._any(chosen)):
                    self._append(start, vector, build.bitcast(chosen, MASK), limit)

    def _any(self, chosen: Value) -> Value:
        return self.build.icmp_signed("!=", self.build.bitcast(chosen, MASK), ir.Constant(MASK, 0))

    def _append(self, start: Value, vector: Value, chosen: Value, limit: Value | None) -> None:
        """Append the numbers of a vector whose bits are set to those that are kept."""
        emit, build = self.emit, self.build
        left = emit.variable(MASK, ir.Constant(MASK, 0))
        emit.set(left, chosen)
        with emit.repeat() as stop:
            bits = emit.get(left, MASK)
            stop(build.icmp_signed("==", bits, ir.Constant(MASK, 0)))
            bit = emit.call(f"llvm.cttz.i{VECTOR_SIZE}", MASK, [bits, ir.Constant(ir.IntType(1), 1)])
            emit.set(left, build.and_(bits, build.sub(bits, ir.Constant(MASK, 1))))
            place = emit.add(emit.multiply(vector, VECTOR_SIZE), build.zext(bit, LONG))
            end = emit.get(self.kept, LONG)
            fits = build.icmp_signed("<", place, self.size)  # what fills the last vector up is no number of the line
            if limit is not None:
                fits = build.and_(fits, build.icmp_signed("<", end, limit))
            with emit.condition(fits):
                emit.store(build.trunc(place, INT), emit.offset(self.places, end, 4))
                emit.store(emit.load(emit.offset(start, place, 4), FLOAT), emit.offset(self.found, end, 4))
                emit.set(self.kept, emit.add(end, 1))

    def _order(self, ids: Value, values: Value) -> None:
        """Store the first `count` of the kept numbers in descending order: each at the number of those before it."""
        emit, build = self.emit, self.build
        kept, before = emit.get(self.kept, LONG), emit.variable(INTS, emit.ints(0))
        emit.store(emit.floats(float("-inf")), emit.offset(self.found, kept, 4))
        emit.store(emit.ints(HIGHEST_BIT - 1), emit.offset(self.places, kept, 4))
        with emit.loop(0, kept) as number:
            place = emit.load(emit.offset(self.places, number, 4), INT)
            value = emit.load(emit.offset(self.found, number, 4), FLOAT)
            own_place, own_value = emit.spread(place), emit.spread(value)
            emit.set(before, emit.ints(0))
            with emit.loop(0, kept, VECTOR_SIZE) as other:
                places = emit.load(emit.offset(self.places, other, 4), INTS)
                found = emit.load(emit.offset(self.found, other, 4), VECTOR)
                equal = build.fcmp_ordered("==", found, own_value)
                first = build.and_(equal, build.icmp_signed("<", places, own_place))
                comes = build.or_(build.fcmp_ordered(">", found, own_value), first)
                emit.set(before, build.add(emit.get(before, INTS), build.zext(comes, INTS)))
            rank = build.sext(emit.total(emit.get(before, INTS)), LONG)
            with emit.condition(build.icmp_signed("<", rank, self.count)):
                emit.store(place, emit.offset(ids, rank, 4))
                emit.store(value, emit.offset(values, rank, 4))

    def _add_exponentials(self, start: Value, highest: Value) -> Value:
        """Return the sum of the exponentials of all distances from the largest number."""
        emit, build = self.emit, self.build
        total = emit.variable(VECTOR, emit.floats(0.0))
        emit.set(total, emit.floats(0.0))
        with emit.loop(0, self.line.vectors) as vector:
            distance = build.fmul(build.fsub(self.line.load(start, vector), highest), self.scale)
            emit.set(total, build.fadd(emit.get(total, VECTOR), exponential(emit, distance)))
        return emit.total(emit.get(total, VECTOR))
