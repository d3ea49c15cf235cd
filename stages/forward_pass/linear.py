"""Kernels of one linear layer; the fastest one for a number of rows is chosen by measurement.

On a CPU a matrix times one row is bound by reading the weights, times several rows by the layout of the weights:
oneDNN's packed layout is fast for both, the dense layout only if the weights fit the cache. The faster one differs
between machines and sizes, so it is measured. Codes of four bits are the fastest for few rows: for more, unpacking
them for each row takes longer than reading larger numbers, so the same weights are also there in 16 bits.

Shapes: N rows, I inputs, O outputs, G groups of inputs, R inputs that are rotated together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from stages.forward_pass.measurements import Measurements
from stages.quantisation.groups import GROUP, GroupedMatrix, join_groups
from stages.quantisation.modules import FORMATS, find_groups

MANY_ROWS = 8  # number of rows that stands for several in measurements
ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)  # numbers of rows at which two kernels are compared
OUTPUTS = 16  # the kernel for four bits wants a multiple of it
ROTATED = 64  # neighbouring inputs that are rotated together in eight bits, at most
REPEATS = 15
CACHED_BYTES = 64 << 20  # larger than the last-level cache of most processors


class Kernel(Protocol):
    """Computes x W^T + b for one weight."""

    def __call__(self, x_NI: Tensor) -> Tensor:
        """Return the outputs (N, O), in the type of the inputs."""
        ...


class DenseLinear(Kernel):
    """The weights in their dense layout, not copied."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI, self._bias_O = weight_OI, bias_O

    @override
    def __call__(self, x_NI: Tensor) -> Tensor:
        return functional.linear(x_NI, self._weight_OI, self._bias_O)


class PackedLinear(Kernel):
    """oneDNN's blocked layout, a copy of the weights. CPU only."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), MANY_ROWS)
        self._bias_O = bias_O

    @override
    def __call__(self, x_NI: Tensor) -> Tensor:
        outputs_NO: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, self._packed, self._bias_O, "none", [], "")
        return outputs_NO


class Int8Linear(Kernel):
    """Weights in eight bits with one scale per output, inputs in eight bits with one scale per row, both rotated.

    A few inputs of a language model are much larger than the others, and would set the scale. A rotation of every 64
    neighbours by a Hadamard matrix spreads them out; the weights are rotated alike, so the products stay the same
    (Ashkboos et al., "QuaRot", NeurIPS 2024).

    The scale of a row depends on that row only, the sums are of integers, and so, but for their last division, are
    those of the rotation: numbers of 24 bits, added in 53. So a row has the same outputs in every batch.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._signs_RR = make_hadamard(math.gcd(weight_OI.shape[1], ROTATED)).to(weight_OI.device)
        turned_OI = self._rotate(weight_OI)
        scale_O1 = turned_OI.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        self._weight_IO = torch.round(turned_OI / scale_O1).to(torch.int8).contiguous().t()
        self._scale_O, self._bias_O = scale_O1[:, 0].contiguous(), bias_O

    @override
    def __call__(self, x_NI: Tensor) -> Tensor:
        turned_NI = self._rotate(x_NI)
        scale_N1 = torch.linalg.vector_norm(turned_NI, torch.inf, 1, keepdim=True).clamp_min_(1e-12).div_(127)
        codes_NI = turned_NI.div_(scale_N1).round_().to(torch.int8)
        outputs_NO = torch._int_mm(codes_NI, self._weight_IO).mul(scale_N1).mul_(self._scale_O)
        return (outputs_NO if self._bias_O is None else outputs_NO.add_(self._bias_O)).to(x_NI.dtype)

    def _rotate(self, x_NI: Tensor) -> Tensor:
        size = len(self._signs_RR)
        turned = (x_NI.double().reshape(-1, size) @ self._signs_RR).float()
        return turned.div_(math.sqrt(size)).view(x_NI.shape)


def make_hadamard(size: int) -> Tensor:
    """Return Sylvester's matrix of signs (R, R) in float64; the size is a power of two.

    >>> make_hadamard(2)
    tensor([[ 1.,  1.],
            [ 1., -1.]], dtype=torch.float64)
    """
    signs_RR = torch.ones(1, 1, dtype=torch.float64)
    while len(signs_RR) < size:
        signs_RR = torch.cat([torch.cat([signs_RR, signs_RR], 1), torch.cat([signs_RR, -signs_RR], 1)])
    return signs_RR


class Int4Linear(Kernel):
    """Codes in groups of 32, inputs in bfloat16, sums in float32, outputs rounded to bfloat16.

    Every output is a sum in the order of the inputs, whatever the number of rows: a row has the same outputs in every
    batch. CPU only.
    """

    def __init__(self, groups: GroupedMatrix, bias_O: Tensor | None) -> None:
        codes_OJ, both_GO2 = groups.split_planes()
        self._outputs, self._bias_O, self._planes = len(codes_OJ), bias_O, groups.planes
        missing = -len(codes_OJ) % OUTPUTS
        codes_OJ = functional.pad(codes_OJ, (0, 0, 0, missing)).to(torch.int32)
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_OJ, 2)
        self._both_GO2 = functional.pad(both_GO2, (0, 0, 0, missing)).contiguous()

    @override
    def __call__(self, x_NI: Tensor) -> Tensor:
        inputs_NJ = x_NI.bfloat16().contiguous() if self._planes == 1 else x_NI.bfloat16().repeat(1, self._planes)
        padded_NO = torch.ops.aten._weight_int4pack_mm_for_cpu(inputs_NJ, self._codes, GROUP, self._both_GO2)
        outputs_NO: Tensor = padded_NO[:, : self._outputs].to(x_NI.dtype)
        return outputs_NO if self._bias_O is None else outputs_NO + self._bias_O


class InTypeLinear(Kernel):
    """A kernel whose weights have another type than the inputs: these are rounded to it, and the outputs come from it.

    Args:
        kernel: for inputs of that type.
        dtype: of its weights.
        bias_O: added to the outputs in the type of the inputs.
    """

    def __init__(self, kernel: Kernel, dtype: torch.dtype, bias_O: Tensor | None) -> None:
        self._kernel, self._dtype, self._bias_O = kernel, dtype, bias_O

    @override
    def __call__(self, x_NI: Tensor) -> Tensor:
        outputs_NO = self._kernel(x_NI.to(self._dtype)).to(x_NI.dtype)
        return outputs_NO if self._bias_O is None else outputs_NO.add_(self._bias_O)


class HalfLinear(Kernel):
    """Weights in float16; inputs, sums and outputs in float32. x86 CPUs only, see `can_halve`.

    A row has the same outputs in every batch.

    Args:
        weight_OI: of any type.
        bias_O: in the type of the inputs.
        rounds: whether inputs and outputs are rounded to bfloat16, as `Int4Linear` rounds them.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, *, rounds: bool = False) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight_OI.float().contiguous(), None)
        self._bias_O, self._rounds = bias_O, rounds

    @override
    def __call__(self, x_NI: Tensor) -> Tensor:
        inputs_NI = (x_NI.bfloat16() if self._rounds else x_NI).float().contiguous()
        sums_NO: Tensor = torch.ops.quantized.linear_dynamic_fp16(inputs_NI, self._packed)
        outputs_NO = (sums_NO.bfloat16() if self._rounds else sums_NO).to(x_NI.dtype)
        return outputs_NO if self._bias_O is None else outputs_NO.add_(self._bias_O)


class ByRowsLinear(Kernel):
    """One kernel for few rows, another from some number of rows on."""

    def __init__(self, few: Kernel, many: Kernel, many_from: int = 2) -> None:
        self._few, self._many, self._many_from = few, many, many_from

    @override
    def __call__(self, x_NI: Tensor) -> Tensor:
        return self._few(x_NI) if x_NI.shape[0] < self._many_from else self._many(x_NI)


KINDS: dict[str, type[DenseLinear | PackedLinear | Int8Linear]] = {
    "plain": DenseLinear,
    "packed": PackedLinear,
    "int8": Int8Linear,
}


def can_pack(weight: Tensor) -> bool:
    """Check whether oneDNN can pack these weights on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:  # oneDNN computes in it from AVX-512 on
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    return weight.dtype == torch.float32


def can_halve(weight_OI: Tensor) -> bool:
    """Check whether torch computes with weights in float16 here, and these weights are in its range."""
    if weight_OI.device.type != "cpu" or torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    return weight_OI.numel() > 0 and float(weight_OI.abs().max()) <= torch.finfo(torch.float16).max


@dataclass(frozen=True)
class KindsByRows:
    """Kinds of kernels (keys of `KINDS`) for few rows and for many.

    Attributes:
        few, many: the kinds.
        many_from: number of rows from which on the second is used.
    """

    few: str
    many: str
    many_from: int = 2


def make_kernel(weight_OI: Tensor, bias_O: Tensor | None, kinds: KindsByRows) -> Kernel:
    """Make one kernel for few rows and another for many, or one for all."""
    first = KINDS[kinds.few](weight_OI, bias_O)
    if kinds.few == kinds.many:
        return first
    return ByRowsLinear(first, KINDS[kinds.many](weight_OI, bias_O), kinds.many_from)


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


def make_many(layout: str, weight_OI: Tensor, bias_O: Tensor | None, inputs: torch.dtype) -> Kernel:
    """Make the kernel of a layout for many rows. It rounds inputs and outputs to bfloat16, as that for codes does.

    Args:
        layout: `float16` or `bfloat16`.
        weight_OI: in float32.
        bias_O: in the type of the inputs.
        inputs: their type.
    """
    if layout == "float16":
        return HalfLinear(weight_OI, bias_O, rounds=True)
    rounded_OI = weight_OI.bfloat16()
    kind = "packed" if can_pack(rounded_OI) else "plain"
    return _make_in_type(rounded_OI, bias_O, inputs, KindsByRows(kind, kind))


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
    """What a kernel is made of.

    Attributes:
        weight_OI: in the type of the inputs.
        bias_O: None without one.
        groups: codes of the weight; None if it has none.
    """

    weight_OI: Tensor
    bias_O: Tensor | None
    groups: GroupedMatrix | None = None

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
        one_kernel: whether a matrix has the same kernel for all numbers of rows.
        quantise: whether `int4` quantises weights that have no codes. Otherwise they are computed in float16.
        measurements: store of the measured choices.
    """

    def __init__(self, weights: str, *, one_kernel: bool, quantise: bool, measurements: Measurements) -> None:
        self._weights, self._one_kernel, self._quantise = weights, one_kernel, quantise
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
        return Matrix(weight_OI, bias_O, groups)

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
        if not can_halve(matrix.weight_OI):
            return self._make_in_type(matrix.weight_OI, matrix.bias_O, matrix.weight_OI.dtype)
        self._used.add("float16")
        return HalfLinear(matrix.weight_OI, matrix.bias_O)

    def _make_in_type(self, weight_OI: Tensor, bias_O: Tensor | None, inputs: torch.dtype) -> Kernel:
        """Make the fastest kernel in the type of the weights, for inputs of a type."""
        key = *weight_OI.shape, weight_OI.dtype
        if key not in self._kinds:
            kind = pick_fastest(weight_OI, MANY_ROWS, self._measurements) if self._one_kernel else ""
            self._kinds[key] = KindsByRows(kind, kind) if kind else pick_kinds(weight_OI, self._measurements)
        kinds = self._kinds[key]
        other = weight_OI.dtype != inputs
        self._used |= {f"{kind} {_name(weight_OI.dtype)}" if other else kind for kind in (kinds.few, kinds.many)}
        return _make_in_type(weight_OI, bias_O, inputs, kinds)

    def _make_from_codes(self, groups: GroupedMatrix, bias_O: Tensor | None, inputs: torch.dtype) -> Kernel:
        """Make the kernel for codes for few rows, and one of the same weights for more."""
        if self._one_kernel:
            self._used.add("int4")
            return Int4Linear(groups, bias_O)
        layout, many_from = pick_layout_of_codes(groups, self._measurements)
        self._used |= {layout} if many_from == 1 else {"int4", layout}
        many = make_many(layout, groups.round_as_kernel(), bias_O, inputs)
        return many if many_from == 1 else ByRowsLinear(Int4Linear(groups, bias_O), many, many_from)


def _make_in_type(weight_OI: Tensor, bias_O: Tensor | None, inputs: torch.dtype, kinds: KindsByRows) -> Kernel:
    """Make a kernel in the type of the weights for inputs of a type."""
    if weight_OI.dtype == inputs:
        return make_kernel(weight_OI, bias_O, kinds)
    return InTypeLinear(make_kernel(weight_OI, None, kinds), weight_OI.dtype, bias_O)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
