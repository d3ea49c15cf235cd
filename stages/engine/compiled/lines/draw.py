"""Drawing one token by inversion, in one compiled call: the smallest index whose cumulative weight exceeds a share of
all weight.

Weights are added in double precision, by chunks first: only one chunk is looked at number by number.

Shapes: V weights, C chunks.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from torch import Tensor

from stages.engine.compiled.lines.compiling import (
    Floats,
    Integers,
    compile_call,
    compiled,
    doubles_at,
    floats_at,
    integers_at,
)
from stages.engine.compiled.lines.line import ZERO, sums_in_any_order

CHUNK = 256  # weights of a chunk
NOTHING = -1  # index where there is no weight
# Places in the table that the compiled function reads: sizes, and addresses of what it reads and writes.
WEIGHTS, SIZE, UNIFORM, EXCLUDED, EXCLUDED_COUNT, INDEX = range(6)


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
    index, point, indices = array("q", (NOTHING,)), array("d", (uniform,)), array("q", excluded)
    addresses = [numbers.buffer_info()[0] for numbers in (point, indices, index)]
    table = array("q", (weights_V.data_ptr(), len(weights_V), *addresses[:2], len(indices), addresses[2]))
    compile_draw()(table.buffer_info()[0])
    return index[0]


@cache
def compile_draw() -> Callable[[int], None]:
    """Compile the function, or load it."""
    return compile_call(_draw)


def _draw(table: Integers) -> None:
    """Draw an index with some weights at 0, which are restored: the last one first, as an index may occur twice."""
    weights_V = floats_at(table[WEIGHTS], table[SIZE])
    excluded = integers_at(table[EXCLUDED], table[EXCLUDED_COUNT])
    kept = np.empty(excluded.size, np.float32)
    for number in range(excluded.size):
        kept[number] = weights_V[excluded[number]]
        weights_V[excluded[number]] = ZERO
    integers_at(table[INDEX], 1)[0] = _invert(weights_V, doubles_at(table[UNIFORM], 1)[0])
    for number in range(excluded.size - 1, -1, -1):
        weights_V[excluded[number]] = kept[number]


@sums_in_any_order
def _add_up(weights_V: Floats) -> float:
    total = 0.0
    for index in range(weights_V.size):
        total += np.float64(weights_V[index])
    return total


@compiled
def _invert(weights_V: Floats, uniform: float) -> int:
    """Return the first index whose cumulative weight exceeds the share: its chunk first. Rounding must lead neither
    beyond the last chunk with a weight, nor beyond its last weight.
    """
    sums_C = np.empty((weights_V.size + CHUNK - 1) // CHUNK)
    total = 0.0
    for chunk in range(sums_C.size):
        total += _add_up(weights_V[chunk * CHUNK : (chunk + 1) * CHUNK])
        sums_C[chunk] = total
    if total <= 0:
        return NOTHING
    point, chunk = uniform * total, 0
    while sums_C[chunk] <= point and sums_C[chunk] < total:
        chunk += 1
    edge = sums_C[chunk - 1] if chunk > 0 else 0.0
    added, last = 0.0, NOTHING
    for index in range(chunk * CHUNK, min((chunk + 1) * CHUNK, weights_V.size)):
        added += np.float64(weights_V[index])
        if weights_V[index] > 0:
            last = index
        if edge + added > point:
            return index
    return last
