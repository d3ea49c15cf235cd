"""Probabilities of given tokens under the softmax of their lines, and the entropy of each line, in one compiled call.

Shapes: N lines, V logits of a line, J places.
"""

import math
from array import array
from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from stages.engine.compiled.lines.compiling import CompiledCall, floats_at, integers_at
from stages.engine.compiled.lines.line import exponential, from_order, largest_order, sum_weighted

VALUES = 3  # of a place: two probabilities and an entropy; it is given by as many integers


def read_token_values(logits_NV: Tensor, places: Sequence[tuple[int, int, int]]) -> list[list[float]]:
    """Return per place the probabilities of its two tokens and the entropy of its line, in nats. `can_read` must accept
    the logits, and the largest of a line is finite. Each of the J places is the index of a line and two ids.

    >>> import torch
    >>> logits_NV = torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.25, 0.25]]).log()
    >>> [[round(value, 4) for value in values] for values in read_token_values(logits_NV, [(1, 2, 0), (1, 0, 0)])]
    [[0.25, 0.5, 1.0397], [0.5, 0.5, 1.0397]]
    """
    given, outputs = array("q", chain.from_iterable(places)), array("f", bytes(4 * VALUES * len(places)))
    logits = logits_NV.data_ptr(), logits_NV.stride(0), logits_NV.shape[1]
    read_values(*logits, *given.buffer_info(), outputs.buffer_info()[0])
    values = outputs.tolist()
    return [values[start : start + VALUES] for start in range(0, len(values), VALUES)]


@CompiledCall
def read_values(logits: int, stride: int, size: int, given: int, count: int, outputs: int) -> None:
    """Write `VALUES` numbers per place."""
    places, values = integers_at(given, count), floats_at(outputs, count)
    for begin in range(0, count, VALUES):
        line = floats_at(logits + 4 * places[begin] * stride, size)
        highest = from_order(largest_order(line))
        total, weighted = sum_weighted(line, highest)
        values[begin] = exponential(line[places[begin + 1]] - highest) / total
        values[begin + 1] = exponential(line[places[begin + 2]] - highest) / total
        values[begin + 2] = math.log(total) - weighted / total
