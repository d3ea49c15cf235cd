"""A line of numbers that compiled functions read vector by vector, whatever its length.

Shapes: V numbers of a line.
"""

import torch
from torch import Tensor

from stages.engine.compiled.llvm.emitter import FLOAT, VECTOR, VECTOR_SIZE, Emitter, Value
from stages.engine.compiled.llvm.vector_math import exponential

LOWEST_DISTANCE = -200.0  # what is further below the largest logit has probability 0 and adds no entropy


def can_read(numbers: Tensor) -> bool:
    """Return whether compiled functions read a tensor: float32 on the CPU, without gaps in its lines."""
    on_cpu = numbers.device.type == "cpu" and numbers.dtype is torch.float32
    return on_cpu and numbers.stride(-1) == 1 and not numbers.requires_grad


class Line:
    """Emits the reading of lines of one length.

    Args:
        emit: of the function.
        size: V.
        tail: address of a vector that the function may write: the end of a line, filled up.
    """

    def __init__(self, emit: Emitter, size: Value, tail: Value) -> None:
        self._emit, self._size, self._tail = emit, size, tail
        self._whole = emit.divide(size, VECTOR_SIZE)  # vectors without a number beyond the line
        self.vectors = emit.divide(emit.add(size, VECTOR_SIZE - 1), VECTOR_SIZE)

    def begin(self, start: Value) -> None:
        """Copy the numbers after the last whole vector of a line, and fill the vector up with minus infinity."""
        emit = self._emit
        emit.store(emit.floats(float("-inf")), self._tail)
        begin = emit.multiply(self._whole, VECTOR_SIZE)
        with emit.loop(begin, self._size) as place:
            number = emit.load(emit.offset(start, place, 4), FLOAT)
            emit.store(number, emit.offset(self._tail, emit.subtract(place, begin), 4))

    def load(self, start: Value, vector: Value) -> Value:
        """Return a vector of the line that was begun."""
        inside = self._emit.builder.icmp_signed("<", vector, self._whole)
        whole = self._emit.offset(start, vector, 4 * VECTOR_SIZE)
        return self._emit.load(self._emit.builder.select(inside, whole, self._tail), VECTOR)

    def sum_exponentials(self, start: Value, highest: Value) -> tuple[Value, Value]:
        """Return the sum of the exponentials of all distances from the largest number of the line that was begun, and
        the sum of these times the distance. Both are NaN if a number is.
        """
        emit, build, highest = self._emit, self._emit.builder, self._emit.spread(highest)
        total = emit.variable(VECTOR, emit.floats(0.0))
        weighted = emit.variable(VECTOR, emit.floats(0.0))
        emit.set(total, emit.floats(0.0))
        emit.set(weighted, emit.floats(0.0))
        with emit.loop(0, self.vectors) as vector:
            distance, lowest = build.fsub(self.load(start, vector), highest), emit.floats(LOWEST_DISTANCE)
            share = exponential(emit, distance)
            bounded = build.select(build.fcmp_ordered(">", distance, lowest), distance, lowest)
            emit.set(total, build.fadd(emit.get(total, VECTOR), share))
            emit.set(weighted, emit.multiply_add(share, bounded, emit.get(weighted, VECTOR)))
        return emit.total(emit.get(total, VECTOR)), emit.total(emit.get(weighted, VECTOR))
