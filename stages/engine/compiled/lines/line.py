"""What compiled functions read of a line of logits, vector by vector: its largest number, sums of exponentials.

Loops over lines are compiled to vectors: sums may be added up in any order, and the largest number is found among
integers, since Numba's comparisons of floats in a loop are not.
"""

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from stages.engine.compiled.lines.compiling import Floats, compiled
from stages.engine.compiled.llvm.vector_math import EXPONENTIAL, HIGHEST, LN2_HIGH, LN2_LOW, LOWEST

LOWEST_DISTANCE = np.float32(-200.0)  # what is further below the largest logit has probability 0 and adds no entropy
ZERO, ONE = np.float32(0.0), np.float32(1.0)
_LOWEST, _HIGHEST, _PER_LN2 = np.float32(LOWEST), np.float32(HIGHEST), np.float32(1 / math.log(2))
_LN2_HIGH, _LN2_LOW = np.float32(LN2_HIGH), np.float32(LN2_LOW)
_C0, _C1, _C2, _C3, _C4, _C5 = (np.float32(factor) for factor in EXPONENTIAL)
LOWEST_ORDER = np.int32(-0x7F800001)  # `to_order` of minus infinity

# Sums in any order; no comparison is simplified, so that what is not a number stays so.
sums_in_any_order = njit(error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


def can_read(numbers: Tensor) -> bool:
    """Return whether compiled functions read a tensor: float32 on the CPU, without gaps in its lines."""
    on_cpu = numbers.device.type == "cpu" and numbers.dtype is torch.float32
    return on_cpu and numbers.stride(-1) == 1 and not numbers.requires_grad


def _swap_order(builder: Any, bits: Any) -> Any:
    """Turn bits of a float into an integer of the same order, or back."""
    return builder.xor(bits, builder.and_(builder.ashr(bits, bits.type(31)), bits.type(0x7FFFFFFF)))


@intrinsic
def to_order(typing_context: Any, number: Any) -> Any:
    """Return an integer that is ordered as a number of float32 is, but for -0 before 0."""
    bits = ir.IntType(32)
    return types.int32(types.float32), lambda _context, builder, _signature, arguments: _swap_order(
        builder, builder.bitcast(arguments[0], bits)
    )


@intrinsic
def from_order(typing_context: Any, order: Any) -> Any:
    """Return the number of which `to_order` made an integer."""
    return types.float32(types.int32), lambda _context, builder, _signature, arguments: builder.bitcast(
        _swap_order(builder, arguments[0]), ir.FloatType()
    )


@intrinsic
def _power_of_two(typing_context: Any, power: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        bits = ir.IntType(32)
        exponent = builder.add(builder.fptosi(arguments[0], bits), bits(127))
        return builder.bitcast(builder.shl(exponent, bits(23)), ir.FloatType())

    return types.float32(types.float32), emit


@compiled
def exponential(x: np.float32) -> np.float32:
    """Return e to a power of at most `HIGHEST`; see the one of `vector_math.py`."""
    bounded = max(_LOWEST, x)
    power = np.rint(bounded * _PER_LN2)
    rest = bounded - power * _LN2_HIGH - power * _LN2_LOW
    value = ((((_C0 * rest + _C1) * rest + _C2) * rest + _C3) * rest + _C4) * rest + _C5
    value = (value * (rest * rest) + rest + ONE) * _power_of_two(power)
    return ZERO if x < _LOWEST else value if x >= _LOWEST else x  # what is not a number is none of them


@compiled
def logistic(x: np.float32) -> np.float32:
    """Return `1 / (1 + exp(-x))`."""
    return ONE / (ONE + exponential(min(-x, _HIGHEST)))


@compiled
def largest_order(line: Floats) -> np.int32:
    """Return the largest number of a line, by `to_order`."""
    largest = LOWEST_ORDER
    for index in range(line.size):
        largest = max(largest, to_order(line[index]))
    return largest


@compiled
def two_largest(line: Floats) -> tuple[np.float32, np.float32]:
    """Return the largest and the second largest number of a line; of one number, the second is minus infinity."""
    first, second, count = largest_order(line), LOWEST_ORDER, 0
    for index in range(line.size):
        order = to_order(line[index])
        count += order == first
        second = max(second, order if order < first else LOWEST_ORDER)
    return from_order(first), from_order(first if count > 1 else second)


@sums_in_any_order
def sum_exponentials(line: Floats, highest: np.float32, scale: np.float32) -> np.float32:
    """Return the sum of the exponentials of all scaled distances from the largest number of a line."""
    total = ZERO
    for index in range(line.size):
        total += exponential((line[index] - highest) * scale)
    return total


@sums_in_any_order
def sum_weighted(line: Floats, highest: np.float32) -> tuple[np.float32, np.float32]:
    """Return the sum of the exponentials of all distances from the largest number of a line, and the sum of these times
    the distance. Both are NaN if a number is.
    """
    total = weighted = ZERO
    for index in range(line.size):
        distance = line[index] - highest
        share = exponential(distance)
        total += share
        weighted += share * (max(distance, LOWEST_DISTANCE))
    return total, weighted
