"""Drawing one token by inversion, in one compiled call: the smallest index whose cumulative weight exceeds a share of
all weight.

Weights are added in double precision, by chunks first: only one chunk is looked at number by number.

Shapes: V weights, C chunks.
"""

from array import array
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache

import numpy as np
from llvmlite import ir
from torch import Tensor

from stages.engine.compiled.llvm.emitter import DOUBLE, FLOAT, LONG, VECTOR, VECTOR_SIZE, Emitter, Value
from stages.engine.compiled.llvm.machine import compile_call

CHUNK = 16  # vectors of a chunk
NOTHING = -1  # index where there is no weight
DOUBLES = ir.VectorType(DOUBLE, VECTOR_SIZE)


class Drawing(IntEnum):
    """Numbers of the table that the compiled function reads."""

    WEIGHTS = 0  # address
    SIZE = 1  # V
    UNIFORM = 2  # address of the number in [0, 1)
    EXCLUDED = 3  # address of the indices that have no weight
    EXCLUDED_COUNT = 4
    KEPT = 5  # address where their weights are meanwhile
    SUMS = 6  # address of the cumulative sums of chunks
    INDEX = 7  # address of the result


def draw(weights_V: Tensor, uniform: float, excluded: Sequence[int] = ()) -> int:
    """Draw an index in proportion to nonnegative weights; `NOTHING` if all are 0.

    >>> import torch
    >>> weights_V = torch.tensor([0.5, 0.0, 0.25, 0.25, 0.0])
    >>> [draw(weights_V, uniform) for uniform in (0.0, 0.49, 0.5, 0.75, 1 - 2**-53)]
    [0, 0, 2, 3, 3]
    >>> [draw(weights_V, uniform, excluded=[0]) for uniform in (0.0, 0.49, 0.5)], draw(weights_V, 0.5, [0, 2, 3])
    ([2, 2, 3], -1)

    Args:
        weights_V: which `can_read` accepts.
        uniform: in [0, 1).
        excluded: indices that have no weight here.
    """
    chunks = -(-len(weights_V) // (CHUNK * VECTOR_SIZE))
    numbers, point, indices = array("q", (NOTHING,)), array("d", (uniform,)), array("q", excluded)
    kept, sums = array("f", bytes(4 * len(indices))), np.empty(chunks, np.float64)
    given = weights_V.data_ptr(), len(weights_V), point.buffer_info()[0], indices.buffer_info()[0], len(indices)
    table = array("q", (*given, kept.buffer_info()[0], sums.ctypes.data, numbers.buffer_info()[0]))
    _compile_inversion()(table.buffer_info()[0])
    return numbers[0]


@cache
def _compile_inversion() -> Callable[[int], None]:
    """Return the compiled function, which reads a table of `Drawing`."""
    return compile_call("draw_index", lambda emit: _Inversion(emit).emit_draw())


def _constant(value: float) -> Value:
    return ir.Constant(DOUBLE, value)


class _Inversion:
    """Emits the parts of a draw, in the order in which they run."""

    def __init__(self, emit: Emitter) -> None:
        table = emit.arguments[0]
        self.emit, self.build = emit, emit.builder
        self.weights, self.size = emit.pointer(table, Drawing.WEIGHTS), emit.field(table, Drawing.SIZE)
        self.uniform = emit.load(emit.pointer(table, Drawing.UNIFORM), DOUBLE, 8)
        self.excluded, self.count = emit.pointer(table, Drawing.EXCLUDED), emit.field(table, Drawing.EXCLUDED_COUNT)
        self.kept, self.sums = emit.pointer(table, Drawing.KEPT), emit.pointer(table, Drawing.SUMS)
        self.index = emit.pointer(table, Drawing.INDEX)
        self.length = emit.long(CHUNK * VECTOR_SIZE)
        self.chunks = emit.divide(emit.add(self.size, CHUNK * VECTOR_SIZE - 1), self.length)
        self.total = emit.variable(DOUBLE, _constant(0.0))
        self.vector = emit.variable(DOUBLES, ir.Constant(DOUBLES, [0.0] * VECTOR_SIZE))
        self.found = emit.variable(LONG, emit.long(NOTHING))
        self.last = emit.variable(LONG, emit.long(NOTHING))

    def emit_draw(self) -> None:
        """Emit the draw of one index, from moving what is excluded out of the weights to restoring it."""
        self._move_excluded(exclude=True)
        self._add_chunks()
        total = self.emit.get(self.total, DOUBLE)
        with self.emit.condition(self.build.fcmp_ordered(">", total, _constant(0.0))):
            point = self.build.fmul(self.uniform, total)
            chunk = self._find_chunk(point, total)
            self._find_in_chunk(chunk, point)
        self._move_excluded(exclude=False)
        self.emit.store(self.emit.get(self.found, LONG), self.index, 8)

    def _move_excluded(self, *, exclude: bool) -> None:
        """Keep the weights of the excluded indices elsewhere and set them to 0, or restore them: the last one first, as
        an index may occur twice.
        """
        emit = self.emit
        with emit.loop(0, self.count) as number:
            place = number if exclude else emit.subtract(emit.subtract(self.count, 1), number)
            index = emit.load(emit.offset(self.excluded, place, 8), LONG, 8)
            weight, kept = emit.offset(self.weights, index, 4), emit.offset(self.kept, place, 4)
            if exclude:
                emit.store(emit.load(weight, FLOAT), kept)
                emit.store(ir.Constant(FLOAT, 0.0), weight)
            else:
                emit.store(emit.load(kept, FLOAT), weight)

    def _weight(self, place: Value) -> Value:
        """Return a weight in double precision."""
        return self.build.fpext(self.emit.load(self.emit.offset(self.weights, place, 4), FLOAT), DOUBLE)

    def _add_chunks(self) -> None:
        """Store the cumulative sums of the chunks."""
        emit, build = self.emit, self.build
        emit.set(self.total, _constant(0.0))
        with emit.loop(0, self.chunks) as chunk:
            begin, end = self._range_of(chunk)
            whole = emit.add(begin, emit.multiply(emit.divide(emit.subtract(end, begin), VECTOR_SIZE), VECTOR_SIZE))
            emit.set(self.vector, ir.Constant(DOUBLES, [0.0] * VECTOR_SIZE))
            with emit.loop(begin, whole, VECTOR_SIZE) as place:
                wide = build.fpext(emit.load(emit.offset(self.weights, place, 4), VECTOR), DOUBLES)
                emit.set(self.vector, build.fadd(emit.get(self.vector, DOUBLES), wide))
            own = emit.total(emit.get(self.vector, DOUBLES))
            emit.set(self.total, build.fadd(emit.get(self.total, DOUBLE), own))
            with emit.loop(whole, end) as place:
                emit.set(self.total, build.fadd(emit.get(self.total, DOUBLE), self._weight(place)))
            emit.store(emit.get(self.total, DOUBLE), emit.offset(self.sums, chunk, 8), 8)

    def _range_of(self, chunk: Value) -> tuple[Value, Value]:
        begin = self.emit.multiply(chunk, self.length)
        end = self.emit.add(begin, self.length)
        return begin, self.build.select(self.build.icmp_signed("<", end, self.size), end, self.size)

    def _find_chunk(self, point: Value, total: Value) -> Value:
        """Return the first chunk whose cumulative sum exceeds the point, or reaches all weight: rounding must not lead
        beyond the last chunk that has some.
        """
        emit, build, chunk = self.emit, self.build, self.last
        emit.set(chunk, emit.long(0))
        with emit.repeat() as stop:
            edge = emit.load(emit.offset(self.sums, emit.get(chunk, LONG), 8), DOUBLE, 8)
            stop(build.or_(build.fcmp_ordered(">", edge, point), build.fcmp_ordered(">=", edge, total)))
            emit.set(chunk, emit.add(emit.get(chunk, LONG), 1))
        return emit.get(chunk, LONG)

    def _find_in_chunk(self, chunk: Value, point: Value) -> None:
        """Find the first index of a chunk whose cumulative weight exceeds the point, else its last with a weight."""
        emit, build = self.emit, self.build
        first = build.icmp_signed("==", chunk, emit.long(0))
        before = emit.subtract(build.select(first, emit.long(1), chunk), 1)
        edge = build.select(first, _constant(0.0), emit.load(emit.offset(self.sums, before, 8), DOUBLE, 8))
        begin, end = self._range_of(chunk)
        emit.set(self.found, emit.long(NOTHING))
        emit.set(self.total, _constant(0.0))
        with emit.loop(begin, end) as place:
            weight = self._weight(place)
            emit.set(self.total, build.fadd(emit.get(self.total, DOUBLE), weight))
            reached = build.fcmp_ordered(">", build.fadd(edge, emit.get(self.total, DOUBLE)), point)
            open_still = build.icmp_signed("==", emit.get(self.found, LONG), emit.long(NOTHING))
            with emit.condition(build.and_(reached, open_still)):
                emit.set(self.found, place)
            with emit.condition(build.fcmp_ordered(">", weight, _constant(0.0))):
                emit.set(self.last, place)
        with emit.condition(build.icmp_signed("==", emit.get(self.found, LONG), emit.long(NOTHING))):
            emit.set(self.found, emit.get(self.last, LONG))
