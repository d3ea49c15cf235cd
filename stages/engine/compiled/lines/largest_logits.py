"""The largest logits of lines, selected by a compiled function, which teachers call between two passes.

The K-th largest of the maxima of a line's chunks is a lower bound of the K-th largest number: few chunks, and few
numbers of them, reach it.

Shapes: N lines, V logits of a line, K largest.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray
from torch import Tensor

from stages.engine.compiled.lines.compiling import (
    CompiledCall,
    Floats,
    as_pointer,
    compiled,
    floats_at,
    integers_at,
)
from stages.engine.compiled.lines.line import (
    LOWEST_ORDER,
    can_read,
    from_order,
    largest_order,
    sum_exponentials,
    to_order,
)

CHUNK = 64


class LargestLogits:
    """Selects the largest logits of lines. Their sums are at a temperature above 0.

    >>> import torch
    >>> logits_NV = torch.tensor([[0.2, 0.5] + [0.01] * 30]).log()
    >>> ids, logits, sums = LargestLogits(count=2, temperature=1.0)(logits_NV, lines=[0])
    >>> ids.tolist(), np.exp(logits).round(1).astype(str).tolist(), sums.round(2).tolist()
    ([[1, 0]], [['0.5', '0.2']], [[2.0]])
    """

    def __init__(self, count: int, temperature: float) -> None:
        self._count, self._scale = count, 1 / temperature

    @staticmethod
    def reads(logits_NV: Tensor) -> bool:
        return len(logits_NV) > 0 and can_read(logits_NV)

    def __call__(
        self, logits_NV: Tensor, lines: Sequence[int]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the ids of the largest logits of some lines and these logits, in descending order (N, K), of equal
        ones the first, and the sum of the exponentials of all distances from the largest, at the temperature (N, 1).
        There are at least K logits per line, no NaN; `lines` are the indices of N lines.
        """
        numbers = array("q", lines)
        shape = len(numbers), self._count
        ids, values, sums = np.empty(shape, np.int32), np.empty(shape, np.float32), np.empty((shape[0], 1), np.float32)
        logits = logits_NV.data_ptr(), logits_NV.stride(0), logits_NV.shape[1]
        outputs = ids.ctypes.data, values.ctypes.data, sums.ctypes.data
        select_lines(*logits, *numbers.buffer_info(), self._count, self._scale, *outputs)
        return ids, values, sums


@CompiledCall
def select_lines(
    logits: int,
    stride: int,
    size: int,
    numbers: int,
    lines: int,
    count: int,
    scale: float,
    to_ids: int,
    to_values: int,
    to_sums: int,
) -> None:
    """Write what is selected of each line."""
    own, sums = integers_at(numbers, lines), floats_at(to_sums, lines)
    ids = carray(as_pointer(to_ids), (lines, count), dtype=np.int32)
    values = carray(as_pointer(to_values), (lines, count), dtype=np.float32)
    for number in range(lines):
        line = floats_at(logits + 4 * own[number] * stride, size)
        _select(line, ids[number], values[number])
        sums[number] = sum_exponentials(line, values[number, 0], np.float32(scale))


@compiled
def _find_maxima(line: Floats) -> npt.NDArray[np.int32]:
    """Return the largest number of each chunk of a line, by `to_order`."""
    whole = line.size // CHUNK
    maxima = np.empty((line.size + CHUNK - 1) // CHUNK, np.int32)
    for chunk in range(whole):
        largest = LOWEST_ORDER
        for index in range(CHUNK):  # a constant number of them, which is compiled to vectors
            largest = max(largest, to_order(line[chunk * CHUNK + index]))
        maxima[chunk] = largest
    if whole < maxima.size:
        maxima[whole] = largest_order(line[whole * CHUNK :])
    return maxima


@compiled
def _find_bound(maxima: npt.NDArray[np.int32], count: int) -> np.float32:
    """Return the largest number that `count` of the maxima reach, bit by bit; minus infinity if there are fewer."""
    bound = -(1 << 31)
    for bit in range(31, -1, -1):
        tried, reached = np.int32(bound + (1 << bit)), 0
        for chunk in range(maxima.size):
            reached += maxima[chunk] >= tried
        if reached >= count:
            bound += 1 << bit
    return from_order(max(np.int32(bound), LOWEST_ORDER))


@compiled
def _select(line: Floats, ids: npt.NDArray[np.int32], values: Floats) -> None:
    """Fill ids and values by insertion. Of equal numbers the first ones stay, as a line is read in its order."""
    maxima, count = _find_maxima(line), ids.size
    bound = _find_bound(maxima, count)
    selected = 0
    for chunk in range(maxima.size):
        if from_order(maxima[chunk]) < bound:
            continue
        for index in range(chunk * CHUNK, min((chunk + 1) * CHUNK, line.size)):
            value = line[index]
            if value < bound or (selected == count and value <= values[count - 1]):
                continue
            selected = min(selected + 1, count)
            rank = selected - 1
            while rank > 0 and values[rank - 1] < value:
                values[rank], ids[rank] = values[rank - 1], ids[rank - 1]
                rank -= 1
            values[rank], ids[rank] = value, index
