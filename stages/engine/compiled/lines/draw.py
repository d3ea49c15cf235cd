"""Drawing one token by inversion, in one compiled call: the smallest index whose cumulative weight exceeds a share of
all weight.

Weights are added in double precision, by chunks first: only one chunk is looked at number by number.

Shapes: V weights, C chunks.
"""

from array import array
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from stages.engine.compiled.lines.compiling import CompiledCall, Floats, compiled, floats_at, integers_at
from stages.engine.compiled.lines.line import ZERO, sums_in_any_order

CHUNK = 256  # weights of a chunk
NOTHING = -1  # index where there is no weight


def draw(weights_V: Tensor, uniform: float, excluded: Sequence[int] = ()) -> int:
    """Draw an index in proportion to nonnegative weights; `NOTHING` if all are 0. `can_read` must accept the weights;
    `uniform` is in [0, 1). Excluded indices have no weight here.

    >>> import torch
    >>> weights_V = torch.tensor([0.5, 0.0, 0.25, 0.25, 0.0])
    >>> [draw(weights_V, uniform) for uniform in (0.0, 0.49, 0.5, 0.75, 1 - 2**-53)]
    [0, 0, 2, 3, 3]
    >>> [draw(weights_V, uniform, excluded=[0]) for uniform in (0.0, 0.49, 0.5)], draw(weights_V, 0.5, [0, 2, 3])
    ([2, 2, 3], -1)
    """
    index, indices = array("q", (NOTHING,)), array("q", excluded)
    draw_index(weights_V.data_ptr(), len(weights_V), uniform, *indices.buffer_info(), index.buffer_info()[0])
    return index[0]


@CompiledCall
def draw_index(weights: int, size: int, uniform: float, indices: int, count: int, index: int) -> None:
    """Draw an index with some weights at 0, which are restored: the last one first, as an index may occur twice."""
    weights_V, excluded = floats_at(weights, size), integers_at(indices, count)
    kept = np.empty(excluded.size, np.float32)
    for number in range(excluded.size):
        kept[number] = weights_V[excluded[number]]
        weights_V[excluded[number]] = ZERO
    integers_at(index, 1)[0] = _invert(weights_V, uniform)
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
