"""The kernels of a model's matrices; the fastest one for a number of rows is chosen by measurement.

On a CPU a matrix times one row is bound by reading the weights, times several rows by the layout of the weights:
oneDNN's packed layout is fast for both, the dense layout only if the weights fit the cache. The faster one differs
between machines and sizes, so it is measured.

Shapes: N rows, I inputs, O outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn

from stages.engine.forward_pass.kernels import (
    KINDS,
    MANY_ROWS,
    HalfLinear,
    Kernel,
    KindsByRows,
    NeverAloneLinear,
    can_halve,
    can_pack,
    keeps_bits_in_half,
    make_in_type,
    make_kernel,
)
from stages.engine.forward_pass.measurements import Measurements
from stages.engine.quantisation.groups import GroupedMatrix, join_groups

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)  # numbers of rows at which two kernels are compared
REPEATS = 15
CACHED_BYTES = 64 << 20  # larger than the last-level cache of most processors


def pick_kinds(weight_OI: Tensor, measurements: Measurements) -> KindsByRows:
    """Return the fastest kinds for a single row and for many, and the number of rows at which the second takes over:
    that of the first measured count at which it is the faster one.
    """
    few, many = (pick_fastest(weight_OI, rows, measurements) for rows in (1, MANY_ROWS))
    between = [] if few == many else [rows for rows in ROW_COUNTS if 1 < rows < MANY_ROWS]
    for rows in between:
        if pick_fastest(weight_OI, rows, measurements) == many:
            return KindsByRows(few, many, rows)
    return KindsByRows(few, many, MANY_ROWS if between else 2)


def pick_fastest(weight_OI: Tensor, rows: int, measurements: Measurements) -> str:
    """Return the faster of `plain` and `packed` for that many rows of these weights on this machine."""
    if not can_pack(weight_OI) or not weight_OI.numel():
        return "plain"
    key = [list(weight_OI.shape), str(weight_OI.dtype), rows]
    kind: str = measurements.get_or_measure("kernel", key, lambda: _measure(weight_OI, rows))
    return kind


def _measure(weight_OI: Tensor, rows: int) -> str:
    """Time both kinds in turn, each over copies that do not fit the cache together; return that of the fastest run."""
    copies = range(max(1, min(8, CACHED_BYTES // (weight_OI.numel() * weight_OI.element_size()))))
    # random inputs would advance the generator of the run
    x_NI = torch.ones(rows, weight_OI.shape[1], dtype=weight_OI.dtype)
    kernels = {kind: [KINDS[kind](weight_OI.clone(), None) for _ in copies] for kind in ("plain", "packed")}
    seconds = dict.fromkeys(kernels, float("inf"))
    for _ in range(REPEATS):
        for kind, copied in kernels.items():
            started = perf_counter()
            for kernel in copied:
                kernel(x_NI)
            seconds[kind] = min(seconds[kind], perf_counter() - started)
    return min(seconds, key=lambda kind: seconds[kind])


@dataclass(frozen=True)
class Matrix:
    """What a kernel is made of."""

    weight_OI: Tensor  # in the type of the inputs
    bias_O: Tensor | None  # None without one
    groups: GroupedMatrix | None = None  # codes of the weight; None if it has none

    def take(self, rows_O: Tensor) -> "Matrix":
        """Return the outputs with these indices."""
        bias_O = None if self.bias_O is None else self.bias_O[rows_O]
        return Matrix(self.weight_OI[rows_O], bias_O, None if self.groups is None else self.groups.take(rows_O))


def join_matrices(parts: Sequence[Matrix]) -> Matrix:
    """Return matrices of the same inputs as one; either all or none of them have a bias."""
    biases = [part.bias_O for part in parts if part.bias_O is not None]
    weight_OI = torch.cat([part.weight_OI for part in parts])
    return Matrix(weight_OI, torch.cat(biases) if biases else None, join_groups([part.groups for part in parts]))


def read_matrix(linear: nn.Linear) -> Matrix:
    """Return the matrix of a module."""
    return Matrix(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


class KernelMaker:
    """Makes the kernels of a model's matrices in one format, each of the kind that was measured to be the fastest.

    Args:
        weights: format: `fastest` keeps the type of the weights; `float32` and `bfloat16` compute in that type; `int8`
            quantises; `plain` and `packed` name one kind.
        batch_invariant: whether a matrix has the same kernel for all numbers of rows.
        measurements: store of the measured choices.
    """

    def __init__(self, weights: str, *, batch_invariant: bool, measurements: Measurements) -> None:
        self._weights, self._batch_invariant, self._measurements = weights, batch_invariant, measurements
        self._kinds: dict[tuple[object, ...], KindsByRows] = {}  # by shape and type
        self._used: set[str] = set()

    def describe(self) -> str:
        """Return the kinds of all kernels made so far."""
        return "/".join(sorted(self._used))

    def make(self, matrix: Matrix) -> Kernel:
        """Make the kernel of a matrix."""
        weight_OI, bias_O = matrix.weight_OI, matrix.bias_O
        if self._weights in ("fastest", "float32", "bfloat16"):
            dtype = getattr(torch, self._weights, weight_OI.dtype)
            return self._make_in_type(weight_OI.to(dtype), bias_O, weight_OI.dtype)
        self._used.add(self._weights)
        return make_kernel(weight_OI, bias_O, KindsByRows(self._weights, self._weights))

    def make_output(self, matrix: Matrix) -> Kernel:
        """Make the kernel of an output layer. Its logits are not rounded to bfloat16 on the way: the two best tokens
        are often closer than that. Its weights are in float16 then, if possible, or in their own type.
        """
        if self._weights != "bfloat16":
            return self.make(matrix)
        halves = can_halve(matrix.weight_OI) and (keeps_bits_in_half() or not self._batch_invariant)
        if not halves:
            return self._make_in_type(matrix.weight_OI, matrix.bias_O, matrix.weight_OI.dtype)
        self._used.add("float16")
        return HalfLinear(matrix.weight_OI, matrix.bias_O)

    def _make_in_type(self, weight_OI: Tensor, bias_O: Tensor | None, inputs: torch.dtype) -> Kernel:
        """Make the fastest kernel in the type of the weights, for inputs of a type."""
        key = *weight_OI.shape, weight_OI.dtype
        if key not in self._kinds:
            self._kinds[key] = self._pick_kinds(weight_OI)
        kinds = self._kinds[key]
        other = weight_OI.dtype != inputs
        self._used |= {f"{kind} {_name(weight_OI.dtype)}" if other else kind for kind in (kinds.few, kinds.many)}
        made = make_in_type(weight_OI, bias_O, inputs, kinds)
        return NeverAloneLinear(made) if self._batch_invariant else made

    def _pick_kinds(self, weight_OI: Tensor) -> KindsByRows:
        """Return the fastest kinds. Of the two, the packed one alone gives a row the same bits among any others."""
        if not self._batch_invariant:
            return pick_kinds(weight_OI, self._measurements)
        kind = "packed" if can_pack(weight_OI) else "plain"
        return KindsByRows(kind, kind)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
