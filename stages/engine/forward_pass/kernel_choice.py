"""The kernels of a model's matrices; the fastest one for a number of rows is chosen by measurement.

On a CPU a matrix times one row is bound by reading the weights, times several rows by the layout of the weights:
oneDNN's packed layout is fast for both, the dense layout only if the weights fit the cache. The faster one differs
between machines and sizes, so it is measured. Codes of four bits are the fastest for few rows: for more, unpacking
them for each row takes longer than reading larger numbers, so the same weights are also there in 16 bits.

Shapes: N rows, I inputs, O outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn

from stages.engine.forward_pass.kernels import (
    KINDS,
    MANY_ROWS,
    ByRowsLinear,
    HalfLinear,
    Int4Linear,
    Kernel,
    KindsByRows,
    NeverAloneLinear,
    can_halve,
    can_pack,
    keeps_bits_in_half,
    make_in_type,
    make_kernel,
    make_many,
)
from stages.engine.forward_pass.measurements import Measurements
from stages.engine.quantisation.groups import GroupedMatrix, join_groups
from stages.engine.quantisation.modules import FORMATS, find_groups

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


def pick_layout_of_codes(groups: GroupedMatrix, measurements: Measurements) -> tuple[str, int]:
    """Return the faster layout for many rows of a matrix of this shape, and the number of rows from which on it is
    faster than codes; 1: always.

    The layouts are `float16` (`HalfLinear`) and `bfloat16`, of the weights that the kernel for codes computes with.
    """
    key = [list(groups.codes_OI.shape), groups.planes, list(ROW_COUNTS)]
    layout, many_from = measurements.get_or_measure("codes", key, lambda: _measure_codes(groups))
    return str(layout), int(many_from)


def _measure_codes(groups: GroupedMatrix) -> tuple[str, int]:
    weight_OI = groups.round_as_kernel()
    layouts = ["float16", "bfloat16"] if can_halve(weight_OI) else ["bfloat16"]
    copies = range(_count_copies(2 * weight_OI.numel()))
    kernels: dict[str, list[Kernel]] = {"codes": [Int4Linear(groups, None) for _ in copies]}
    for layout in layouts:
        kernels[layout] = [make_many(layout, weight_OI.clone(), None, torch.float32) for _ in copies]
    seconds = [_time_kernels(kernels, torch.ones(rows, weight_OI.shape[1])) for rows in ROW_COUNTS]
    layout = min(layouts, key=lambda kind: seconds[ROW_COUNTS.index(MANY_ROWS)][kind])
    first = 1 + max((place for place, found in enumerate(seconds) if found["codes"] < found[layout]), default=-1)
    return layout, ROW_COUNTS[first] if first < len(ROW_COUNTS) else 2 * ROW_COUNTS[-1]


def _measure(weight_OI: Tensor, rows: int) -> str:
    """Time both kinds; return the kind of the fastest run."""
    copies = _count_copies(weight_OI.numel() * weight_OI.element_size())
    x_NI = torch.ones(
        rows, weight_OI.shape[1], dtype=weight_OI.dtype
    )  # random inputs would advance the generator of the run
    kernels = {kind: [KINDS[kind](weight_OI.clone(), None) for _ in range(copies)] for kind in ("plain", "packed")}
    seconds = _time_kernels(kernels, x_NI)
    return min(seconds, key=lambda kind: seconds[kind])


def _count_copies(size: int) -> int:
    """Return how many copies of weights of that many bytes do not fit the cache together, but 8 at most."""
    return max(1, min(8, CACHED_BYTES // size))


def _time_kernels(kernels: Mapping[str, Sequence[Kernel]], x_NI: Tensor) -> dict[str, float]:
    """Time all kinds in turn, each over its copies; return the seconds of the fastest run of each."""
    seconds = dict.fromkeys(kernels, float("inf"))
    for _ in range(REPEATS):
        for kind, ones in kernels.items():
            started = perf_counter()
            for one in ones:
                one(x_NI)
            seconds[kind] = min(seconds[kind], perf_counter() - started)
    return seconds


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


class KernelMaker:
    """Makes the kernels of a model's matrices in one format, each of the kind that was measured to be the fastest.

    Args:
        weights: format: `fastest` keeps the type of the weights; `float32` and `bfloat16` compute in that type; `int8`
            and `int4` quantise; `plain` and `packed` name one kind.
        batch_invariant: whether a matrix has the same kernel for all numbers of rows.
        quantise: whether `int4` quantises weights that have no codes. Otherwise they are computed in float16.
        measurements: store of the measured choices.
    """

    def __init__(self, weights: str, *, batch_invariant: bool, quantise: bool, measurements: Measurements) -> None:
        self._weights, self._batch_invariant, self._quantise = weights, batch_invariant, quantise
        self._measurements = measurements
        self._kinds: dict[tuple[object, ...], KindsByRows] = {}  # by shape and type
        self._used: set[str] = set()

    def describe(self) -> str:
        """Return the kinds of all kernels made so far."""
        return "/".join(sorted(self._used))

    def read(self, linear: nn.Linear, *, codes: bool = True) -> Matrix:
        """Return the matrix of a module, with its codes if the format uses them and they are wanted."""
        weight_OI, bias_O = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        groups = find_groups(linear, quantise=self._quantise) if codes and self._weights == "int4" else None
        return Matrix(weight_OI, bias_O, groups if groups is not None and groups.has_kernel else None)

    def make(self, matrix: Matrix) -> Kernel:
        """Make the kernel of a matrix."""
        weight_OI, bias_O = matrix.weight_OI, matrix.bias_O
        if self._weights == "int4":
            if matrix.groups is not None:
                return self._make_from_codes(matrix.groups, bias_O, weight_OI.dtype)
            return self._make_precise(matrix)
        if self._weights in ("fastest", "float32", "bfloat16"):
            dtype = getattr(torch, self._weights, weight_OI.dtype)
            return self._make_in_type(weight_OI.to(dtype), bias_O, weight_OI.dtype)
        self._used.add(self._weights)
        return make_kernel(weight_OI, bias_O, KindsByRows(self._weights, self._weights))

    def make_output(self, matrix: Matrix) -> Kernel:
        """Make the kernel of an output layer. Its logits are not rounded to bfloat16 on the way: the two best tokens
        are often closer than that.
        """
        return self._make_precise(matrix) if self._weights in FORMATS else self.make(matrix)

    def _make_precise(self, matrix: Matrix) -> Kernel:
        """Make a kernel that rounds neither inputs nor sums: weights in float16 if possible, or in their own type."""
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

    def _make_from_codes(self, groups: GroupedMatrix, bias_O: Tensor | None, inputs: torch.dtype) -> Kernel:
        """Make the kernel for codes for few rows, and one of the same weights for more."""
        if self._batch_invariant:
            self._used.add("int4")
            return Int4Linear(groups, bias_O)
        layout, many_from = pick_layout_of_codes(groups, self._measurements)
        self._used |= {layout} if many_from == 1 else {"int4", layout}
        many = make_many(layout, groups.round_as_kernel(), bias_O, inputs)
        return many if many_from == 1 else ByRowsLinear(Int4Linear(groups, bias_O), many, many_from)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
