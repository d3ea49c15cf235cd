"""A line of numbers that compiled functions read vector by vector, whatever its length.

Shapes: V numbers of a line.
"""

import torch
from torch import Tensor

from stages.compiled.llvm.emitter import FLOAT, VECTOR, VECTOR_SIZE, Emitter, Value


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
