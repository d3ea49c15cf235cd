"""Kernels: the product of a module, in either layout; matrices that are joined and taken apart."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from stages.engine.forward_pass.kernels import can_pack, join_matrices, make_kernel, read_matrix
from stages.engine.quantisation.groups import GroupedMatrix


def module_of(outputs: int = 48, width: int = 64, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, outputs, bias=bias)


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.inference_mode()
def test_a_kernel_multiplies_as_its_module(rows: int, bias: bool, dtype: torch.dtype):
    module = module_of(bias=bias).to(dtype)
    assert can_pack(module.weight) == (dtype == torch.float32 and torch.backends.mkldnn.is_available())
    x_NI = torch.randn(rows, 64, dtype=dtype)
    expected_NO = functional.linear(x_NI, module.weight, module.bias)
    torch.testing.assert_close(make_kernel(read_matrix(module))(x_NI), expected_NO, atol=1e-5, rtol=1e-5)


def test_joined_matrices_keep_their_biases_and_taken_ones_their_codes():
    module = module_of()
    codes = GroupedMatrix.quantise(module.weight)
    matrix = read_matrix(module, codes)
    joined, order = join_matrices([matrix, matrix]), torch.tensor([5, 0, 7])
    assert joined.codes is None
    assert joined.bias_O is not None
    assert joined.bias_O.shape == (96,)
    taken = matrix.take(order)
    assert torch.equal(taken.weight_OI, matrix.weight_OI[order])
    assert taken.codes is not None
    assert torch.equal(taken.codes.dequantise(), codes.dequantise()[order])
