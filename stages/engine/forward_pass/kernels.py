"""The matrices of a model, and the kernels that multiply by them.

Shapes: N rows, I inputs, O outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from stages.engine.quantisation.modules import find_stored, weight_shape
from stages.engine.quantisation.stored import Codes

MANY_ROWS = 8  # number of rows that the layout of packed weights is made for

Kernel = Callable[[Tensor], Tensor]  # computes x W^T + b (N, O) of inputs (N, I), in their type


@dataclass(frozen=True)
class Matrix:
    """What a kernel is made of."""

    weight_OI: Tensor  # in the type of the inputs; on torch's meta device where only the codes are read
    bias_O: Tensor | None  # None without one
    codes: Codes | None = None  # of the weight; None if it has none

    def take(self, rows_O: Tensor) -> "Matrix":
        bias_O = None if self.bias_O is None else self.bias_O[rows_O]
        return Matrix(self.weight_OI[rows_O], bias_O, None if self.codes is None else self.codes.take(rows_O))

    def without_codes(self) -> "Matrix":
        """Return the same matrix as numbers."""
        if self.codes is None or not self.weight_OI.is_meta:
            return Matrix(self.weight_OI, self.bias_O)
        return Matrix(self.codes.dequantise(), self.bias_O)


def join_matrices(parts: Sequence[Matrix]) -> Matrix:
    """Return matrices of the same inputs as one, without codes; either all or none of them have a bias."""
    biases = [part.bias_O for part in parts if part.bias_O is not None]
    return Matrix(torch.cat([part.weight_OI for part in parts]), torch.cat(biases) if biases else None)


def read_matrix(linear: nn.Linear, codes: Codes | None = None) -> Matrix:
    """Return the matrix of a module, with these codes."""
    mapped = codes is not None and find_stored(linear) is not None
    weight_OI = torch.empty(weight_shape(linear), device="meta") if mapped else linear.weight.detach()
    return Matrix(weight_OI, None if linear.bias is None else linear.bias.detach(), codes)


def can_pack(weight: Tensor) -> bool:
    """Check whether oneDNN can pack these weights on this machine."""
    if weight.device.type != "cpu" or not weight.numel() or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:  # oneDNN computes in it from AVX-512 on
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    return weight.dtype == torch.float32


def make_kernel(matrix: Matrix) -> Kernel:
    """Make the kernel of a matrix, in oneDNN's packed layout, a copy of the weights, where there is one.

    Reading the weights bounds a product with one row, their layout one with several, and it is the faster one for both
    unless the weights fit the cache.
    """
    weight_OI, bias_O = matrix.weight_OI, matrix.bias_O
    if not can_pack(weight_OI):
        return lambda x_NI: functional.linear(x_NI, weight_OI, bias_O)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), MANY_ROWS)
    return lambda x_NI: torch.ops.mkldnn._linear_pointwise(x_NI, packed, bias_O, "none", [], "")
