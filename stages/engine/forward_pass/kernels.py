"""Kernels of one linear layer: dense, packed by oneDNN, in eight bits, in 16 bits.

Shapes: N rows, I inputs, O outputs, R inputs that are rotated together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from stages.engine.quantisation.groups import GroupedMatrix, join_groups

MANY_ROWS = 8  # number of rows that the layout of packed weights is made for
ROTATED = 64  # neighbouring inputs that are rotated together in eight bits, at most


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


class NeverAloneLinear(Kernel):
    """Another kernel, which computes a single row next to a copy of itself.

    oneDNN sums a single row of more than 1,024 inputs in another order than several (measured with AVX-512), so that
    its last bits would depend on whether there are others.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    @override
    def __call__(self, x_NI: Tensor) -> Tensor:
        return self._kernel(x_NI.repeat(2, 1))[:1] if len(x_NI) == 1 else self._kernel(x_NI)


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


class InTypeLinear(Kernel):
    """A kernel whose weights have another type than the inputs: these are rounded to it."""

    def __init__(self, kernel: Kernel, dtype: torch.dtype, bias_O: Tensor | None) -> None:
        self._kernel, self._dtype, self._bias_O = kernel, dtype, bias_O

    @override
    def __call__(self, x_NI: Tensor) -> Tensor:
        outputs_NO = self._kernel(x_NI.to(self._dtype)).to(x_NI.dtype)
        return outputs_NO if self._bias_O is None else outputs_NO.add_(self._bias_O)


class HalfLinear(Kernel):
    """Weights in float16; inputs, sums and outputs in float32. x86 CPUs only, see `can_halve`.

    A row has the same outputs in every batch if `keeps_bits_in_half` is true.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight_OI.float().contiguous(), None)
        self._bias_O = bias_O

    @override
    def __call__(self, x_NI: Tensor) -> Tensor:
        sums_NO: Tensor = torch.ops.quantized.linear_dynamic_fp16(x_NI.float().contiguous(), self._packed)
        outputs_NO = sums_NO.to(x_NI.dtype)
        return outputs_NO if self._bias_O is None else outputs_NO.add_(self._bias_O)


def can_pack(weight: Tensor) -> bool:
    """Check whether oneDNN can pack these weights on this machine."""
    if weight.device.type != "cpu" or not weight.numel() or not torch.backends.mkldnn.is_available():
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


def keeps_bits_in_half() -> bool:
    """Check whether a row multiplied by weights in float16 has the same bits in every batch.

    With AVX2 it has not (measured with widths 576 to 1,536); where this is true, a test compares the bits.
    """
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


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
    """Makes the kernels of a model's matrices in one format.

    oneDNN's packed layout is used where there is one: reading the weights bounds a product with one row, their layout
    one with several, and it is the faster one for both unless the weights fit the cache.

    Args:
        weights: format: `fastest` keeps the type of the weights; `float32` and `bfloat16` compute in that type; `int8`
            quantises.
        batch_invariant: whether a row must have the same outputs whatever other rows there are.
    """

    def __init__(self, weights: str, *, batch_invariant: bool) -> None:
        self._weights, self._batch_invariant = weights, batch_invariant
        self._used: set[str] = set()

    def describe(self) -> str:
        """Return the kinds of all kernels made so far."""
        return "/".join(sorted(self._used))

    def make(self, matrix: Matrix) -> Kernel:
        """Make the kernel of a matrix."""
        if self._weights == "int8":
            self._used.add("int8")
            return Int8Linear(matrix.weight_OI, matrix.bias_O)
        dtype = getattr(torch, self._weights, matrix.weight_OI.dtype)
        return self._make_in_type(matrix.weight_OI.to(dtype), matrix)

    def make_output(self, matrix: Matrix) -> Kernel:
        """Make the kernel of an output layer. Its logits are not rounded to bfloat16 on the way: the two best tokens
        are often closer than that. Its weights are in float16 then, if possible, or in their own type.
        """
        if self._weights != "bfloat16":
            return self.make(matrix)
        if not can_halve(matrix.weight_OI) or (self._batch_invariant and not keeps_bits_in_half()):
            return self._make_in_type(matrix.weight_OI, matrix)
        self._used.add("float16")
        return HalfLinear(matrix.weight_OI, matrix.bias_O)

    def _make_in_type(self, weight_OI: Tensor, matrix: Matrix) -> Kernel:
        """Make a kernel in the type of the weights, for inputs in the type of the matrix."""
        kind, made = ("packed", PackedLinear) if can_pack(weight_OI) else ("plain", DenseLinear)
        same_type = weight_OI.dtype == matrix.weight_OI.dtype
        self._used.add(kind if same_type else f"{kind} {str(weight_OI.dtype).removeprefix('torch.')}")
        kernel: Kernel = made(weight_OI, matrix.bias_O if same_type else None)
        if not same_type:
            kernel = InTypeLinear(kernel, weight_OI.dtype, matrix.bias_O)
        return NeverAloneLinear(kernel) if self._batch_invariant else kernel
