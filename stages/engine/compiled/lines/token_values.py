"""Probabilities of given tokens under the softmax of their lines, and the entropy of each line, in one compiled call.

Shapes: N lines, V logits of a line, J places.
"""

from array import array
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from itertools import chain

from llvmlite import ir
from torch import Tensor

from stages.engine.compiled.lines.line import Line
from stages.engine.compiled.llvm.emitter import FLOAT, INT, LONG, VECTOR, VECTOR_SIZE, Emitter, Value
from stages.engine.compiled.llvm.machine import compile_call
from stages.engine.compiled.llvm.vector_math import exponential, logarithm

TAIL = bytes(4 * VECTOR_SIZE)
VALUES = 3  # of a place: two probabilities and an entropy; it is given by as many integers


class TokenReading(IntEnum):
    """Numbers of the table that the compiled function reads."""

    LOGITS, STRIDE, SIZE, COUNT, PLACES, VALUES, TAIL = range(7)


def read_token_values(logits_NV: Tensor, places: Sequence[tuple[int, int, int]]) -> list[list[float]]:
    """Return per place the probabilities of its two tokens and the entropy of its line, in nats.

    >>> import torch
    >>> logits_NV = torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.25, 0.25]]).log()
    >>> [[round(value, 4) for value in values] for values in read_token_values(logits_NV, [(1, 2, 0), (1, 0, 0)])]
    [[0.25, 0.5, 1.0397], [0.5, 0.5, 1.0397]]

    Args:
        logits_NV: which `can_read` accepts. The largest of a line is finite.
        places: J times the index of a line and two ids.
    """
    given, found = array("q", chain.from_iterable(places)), array("f", bytes(4 * VALUES * len(places)))
    tail, address = array("b", TAIL), logits_NV.data_ptr()
    pointers = [one.buffer_info()[0] for one in (given, found, tail)]
    table = array("q", (address, logits_NV.stride(0), logits_NV.shape[1], len(places), *pointers))
    _compile_reading()(table.buffer_info()[0])
    values = found.tolist()
    return [values[start : start + VALUES] for start in range(0, len(values), VALUES)]


@cache
def _compile_reading() -> Callable[[int], None]:
    """Return the compiled function, which reads a table of `TokenReading`."""
    return compile_call("read_token_values", lambda emit: _Values(emit).emit_places())


class _Values:
    """Emits the reading of places."""

    def __init__(self, emit: Emitter) -> None:
        table = emit.arguments[0]
        self.emit, self.build = emit, emit.builder
        self.logits, self.stride = emit.pointer(table, TokenReading.LOGITS), emit.field(table, TokenReading.STRIDE)
        self.count, self.places = emit.field(table, TokenReading.COUNT), emit.pointer(table, TokenReading.PLACES)
        self.values = emit.pointer(table, TokenReading.VALUES)
        self.line = Line(emit, emit.field(table, TokenReading.SIZE), emit.pointer(table, TokenReading.TAIL))
        self.largest = emit.variable(VECTOR, emit.floats(0.0))

    def emit_places(self) -> None:
        """Emit the values of all places, each after the other."""
        emit = self.emit
        with emit.loop(0, self.count) as number:
            begin = emit.multiply(number, VALUES)
            line, *tokens = (self._read_integer(emit.add(begin, place)) for place in range(VALUES))
            start = emit.offset(self.logits, emit.multiply(line, self.stride), 4)
            self.line.begin(start)
            highest = self._find_largest(start)
            total, weighted = self.line.sum_exponentials(start, highest)
            for place, token in enumerate(tokens):
                distance = self.build.fsub(emit.load(emit.offset(start, token, 4), FLOAT), highest)
                self._store(self._divide(self._apply(exponential, distance), total), begin, place)
            log_total = self._apply(logarithm, total)
            self._store(self.build.fsub(log_total, self._divide(weighted, total)), begin, len(tokens))

    def _read_integer(self, number: Value) -> Value:
        return self.emit.load(self.emit.offset(self.places, number, 8), LONG, 8)

    def _store(self, value: Value, begin: Value, place: int) -> None:
        self.emit.store(value, self.emit.offset(self.values, self.emit.add(begin, place), 4))

    def _divide(self, left: Value, right: Value) -> Value:
        return self.build.fdiv(left, right)

    def _apply(self, function: Callable[[Emitter, Value], Value], number: Value) -> Value:
        """Return a function of one number."""
        return self.build.extract_element(function(self.emit, self.emit.spread(number)), ir.Constant(INT, 0))

    def _find_largest(self, start: Value) -> Value:
        """Return the largest logit of a line."""
        emit = self.emit
        emit.set(self.largest, emit.floats(float("-inf")))
        with emit.loop(0, self.line.vectors) as vector:
            numbers, old = self.line.load(start, vector), emit.get(self.largest, VECTOR)
            emit.set(self.largest, self.build.select(self.build.fcmp_ordered(">", numbers, old), numbers, old))
        name = f"llvm.vector.reduce.fmax.v{VECTOR_SIZE}f32"
        return emit.call(name, FLOAT, [emit.get(self.largest, VECTOR)])
