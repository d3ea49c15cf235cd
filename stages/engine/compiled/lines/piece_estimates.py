"""What the drafter's distribution shows of a drafted piece, and the acceptance head's estimate, in one compiled call.

The numbers are those of `stages/drafting/head.py`, whose functions of torch they replace on a CPU: for one line of
4,096 logits these take more time than the drafter's pass.

Shapes: B lines, D drafter ids, W width of the drafter, F head features, H inner width of the head.
"""

import math
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
    Integers,
    as_pointer,
    compiled,
    floats_at,
    integers_at,
)
from stages.engine.compiled.lines.line import (
    ONE,
    ZERO,
    can_read,
    exponential,
    logistic,
    sum_weighted,
    sums_in_any_order,
    two_largest,
)

LOWEST_LOG = np.float32(-10.0)  # of the piece's own probability, as a feature
NORM_EPS = np.float32(1e-5)  # of `torch.nn.LayerNorm`
EXTRA = 5  # features after the hidden state, as in `piece_features`
# Among the addresses of the head's parameters: of its norm, and of its layers, each followed by its bias.
NORM_SCALE, NORM_SHIFT, WEIGHTS = range(3)


class PieceEstimates:
    """Computes features and estimates of drafted pieces."""

    def __init__(self, width: int, inner: int, layers: int) -> None:
        self._width, self._inner, self._layers = width, inner, layers

    @staticmethod
    def reads(hidden_BW: Tensor, logits_BD: Tensor) -> bool:
        return len(logits_BD) > 0 and can_read(hidden_BW) and can_read(logits_BD)

    def __call__(
        self, hidden_BW: Tensor, logits_BD: Tensor, pieces: Sequence[int], index: int, weights: Sequence[Tensor]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the head's input (B, F) and its estimates of the probability of acceptance (B,). `pieces` has the
        drafted piece of every line; `weights` are the parameters of the head, in their order; the others are as of
        `piece_features`.
        """
        lines, size = logits_BD.shape
        features = np.empty((lines, self._width + EXTRA), np.float32)
        estimates = np.empty(lines, np.float32)
        numbers, head = array("q", pieces), array("q", [weight.data_ptr() for weight in weights])
        logits = logits_BD.data_ptr(), logits_BD.stride(0), size
        hidden = hidden_BW.data_ptr(), hidden_BW.stride(0), self._width
        drafted, outputs = (*numbers.buffer_info(), index), (features.ctypes.data, estimates.ctypes.data)
        estimate_lines(head.buffer_info()[0], self._inner, self._layers, *logits, *hidden, *drafted, *outputs)
        return features, estimates


@CompiledCall
def estimate_lines(
    head: Integers,
    inner: int,
    layers: int,
    logits: int,
    logits_stride: int,
    size: int,
    hidden: int,
    hidden_stride: int,
    width: int,
    drafted: int,
    lines: int,
    index: int,
    to_features: int,
    to_estimates: int,
) -> None:
    """Write the features and the estimate of each line."""
    pieces, estimates = integers_at(drafted, lines), floats_at(to_estimates, lines)
    for number in range(lines):
        features = floats_at(to_features + 4 * number * (width + EXTRA), width + EXTRA)
        features[:width] = floats_at(hidden + 4 * number * hidden_stride, width)
        line = floats_at(logits + 4 * number * logits_stride, size)
        _read_distribution(line, pieces[number], index, features[width:])
        estimates[number] = _estimate(head, width, inner, layers, features)


@compiled
def _read_distribution(logits: Floats, piece: int, index: int, features: Floats) -> None:
    first, second = two_largest(logits)
    total, weighted = sum_weighted(logits, first)
    log_total, share = math.log(total), ONE / total
    own_log = logits[piece] - first - log_total
    features[0] = max(own_log, LOWEST_LOG)
    features[1] = log_total - weighted * share
    features[2] = index / 8
    features[3] = share
    features[4] = share - exponential(second - first) * share


@compiled
def _estimate(head: Integers, width: int, inner: int, layers: int, features: Floats) -> np.float32:
    inputs = features.copy()
    _normalise(inputs[:width], floats_at(head[NORM_SCALE], width), floats_at(head[NORM_SHIFT], width))
    state, added = np.empty(inner, np.float32), np.empty(inner, np.float32)
    _multiply(head, 0, inputs, state)
    for layer in range(1, layers + 1):
        _multiply(head, layer, state, added)
        state += _activate(added)
    output = np.empty(1, np.float32)
    _multiply(head, layers + 1, _activate(state), output)
    return logistic(output[0])


@compiled
def _activate(state: Floats) -> Floats:
    """Return `x / (1 + exp(-x))` (SiLU) of each number."""
    outputs = np.empty_like(state)
    for index in range(state.size):
        outputs[index] = state[index] * logistic(state[index])
    return outputs


@sums_in_any_order
def _normalise(numbers: Floats, scale: Floats, shift: Floats) -> None:
    """Apply `torch.nn.LayerNorm`, in place."""
    total = ZERO
    for index in range(numbers.size):
        total += numbers[index]
    mean, squares = total / np.float32(numbers.size), ZERO
    for index in range(numbers.size):
        squares += (numbers[index] - mean) ** 2
    spread = math.sqrt(squares / np.float32(numbers.size) + NORM_EPS)
    for index in range(numbers.size):
        numbers[index] = (numbers[index] - mean) / spread * scale[index] + shift[index]


@sums_in_any_order
def _multiply(head: Integers, layer: int, inputs: Floats, outputs: Floats) -> None:
    weights = carray(as_pointer(head[WEIGHTS + 2 * layer]), (outputs.size, inputs.size), dtype=np.float32)
    bias = floats_at(head[WEIGHTS + 2 * layer + 1], outputs.size)
    for row in range(outputs.size):
        total = bias[row]
        for column in range(inputs.size):
            total += weights[row, column] * inputs[column]
        outputs[row] = total
