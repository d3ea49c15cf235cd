"""Linear kernels: the same numbers whichever computes them, and eight bits that do not depend on company."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from stages.engine.forward_pass.kernels import (
    DenseLinear,
    HalfLinear,
    Int8Linear,
    InTypeLinear,
    KernelMaker,
    Matrix,
    PackedLinear,
    can_halve,
    join_matrices,
    keeps_bits_in_half,
    make_hadamard,
    read_matrix,
)
from stages.engine.quantisation.groups import GroupedMatrix

halves = pytest.mark.skipif(not can_halve(torch.ones(1)), reason="this processor has no kernel for float16")
packs = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def weights(outputs: int = 24, inputs: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)


def inputs(rows: int, width: int = 40) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


@packs
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("with_bias", [True, False])
def test_packed_weights_give_what_plain_ones_give(rows: int, with_bias: bool):
    weight_OI, bias_O = weights()
    bias = bias_O if with_bias else None
    with torch.inference_mode():
        want = DenseLinear(weight_OI, bias)(inputs(rows))
        torch.testing.assert_close(PackedLinear(weight_OI, bias)(inputs(rows)), want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_eight_bits_are_near(rows: int):
    weight_OI, bias_O = weights(64, 256)
    x_NI = inputs(rows, 256)
    want = functional.linear(x_NI, weight_OI, bias_O)
    error = (Int8Linear(weight_OI, bias_O)(x_NI) - want).abs().mean() / want.abs().mean()
    assert 0 < error < 0.03


def test_eight_bits_give_a_row_the_same_outputs_in_any_batch():
    kernel, x_NI = Int8Linear(*weights(64, 256)), inputs(12, 256)
    x_NI[3] *= 1000
    together = kernel(x_NI)
    alone = torch.cat([kernel(x_NI[row : row + 1]) for row in range(12)])
    assert torch.equal(together, alone)


def test_a_row_of_zeros_stays_finite_in_eight_bits():
    assert torch.isfinite(Int8Linear(*weights())(torch.zeros(2, 40))).all()


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_a_hadamard_matrix_divided_by_the_root_of_its_size_is_a_rotation(size: int):
    signs_RR = make_hadamard(size)
    assert torch.equal(signs_RR.abs(), torch.ones(size, size, dtype=torch.float64))
    assert torch.equal(signs_RR @ signs_RR.T, size * torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("width", [256, 96, 25])
def test_a_large_input_costs_the_others_few_of_their_bits(width: int):
    """One input is a hundred times the others: without a rotation, these have about two bits."""
    weight_OI, x_NI = weights(64, width)[0], inputs(8, width)
    x_NI[:, 3] = 100
    weight_OI[:, 3] *= 0.01  # a product of the usual size, as in language models
    want_NO = functional.linear(x_NI, weight_OI)
    error = (Int8Linear(weight_OI, None)(x_NI) - want_NO).norm() / want_NO.norm()
    scale = 100 / 127
    unturned_NO = functional.linear((x_NI / scale).round() * scale, weight_OI)
    without = (unturned_NO - want_NO).norm() / want_NO.norm()
    assert error < (0.3 if width % 64 == 0 else 1.2) * without


def module_of(outputs: int = 48, width: int = 64) -> nn.Linear:
    linear = nn.Linear(width, outputs)
    linear.weight.data, linear.bias.data = weights(outputs, width)
    return linear


@halves
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_weights_in_half_precision_give_the_product_with_them(rows: int):
    weight_OI, bias_O = weights(50, 600)
    want_NO = functional.linear(inputs(rows, 600), weight_OI.half().float(), bias_O)
    torch.testing.assert_close(HalfLinear(weight_OI, bias_O)(inputs(rows, 600)), want_NO, atol=1e-4, rtol=1e-5)


@halves
@pytest.mark.skipif(not keeps_bits_in_half(), reason="on this processor a row has other last bits in a batch")
@pytest.mark.parametrize("rows", [2, 7, 33])
def test_weights_in_half_precision_give_a_row_the_same_outputs_in_every_batch(rows: int):
    kernel, x_NI = HalfLinear(*weights(50, 600)), inputs(rows, 600)
    assert torch.equal(kernel(x_NI), torch.cat([kernel(row) for row in x_NI.split(1)]))


def test_weights_beyond_the_range_of_half_precision_are_not_put_into_it():
    assert not can_halve(torch.tensor([1.0, -70000.0]))
    assert not can_halve(torch.ones(0, 4))
    assert not can_halve(torch.ones(1, device="meta"))


@packs
def test_weights_are_packed_where_onednn_packs_their_type():
    maker = KernelMaker("fastest", batch_invariant=False)
    assert isinstance(maker.make(read_matrix(module_of())), PackedLinear)
    assert isinstance(maker.make(read_matrix(module_of().double())), DenseLinear)
    assert maker.describe() == "packed/plain"


def test_the_sums_of_an_output_layer_are_not_rounded():
    kernel = KernelMaker("bfloat16", batch_invariant=False).make_output(read_matrix(module_of()))
    with torch.inference_mode():
        want_NO = functional.linear(inputs(3, 64), *weights(48, 64))
        torch.testing.assert_close(kernel(inputs(3, 64)), want_NO, atol=0.01, rtol=2**-11)
        assert not torch.equal(kernel(inputs(3, 64)).bfloat16().float(), kernel(inputs(3, 64)))


@packs
@pytest.mark.parametrize("weights_format", ["float32", "bfloat16"])
@pytest.mark.parametrize("layer", ["make", "make_output"])
def test_batch_invariant_gives_a_row_the_same_outputs_in_every_batch(weights_format: str, layer: str):
    """Wide enough that a kernel may split the sum of a row; whatever the processor."""
    made = KernelMaker(weights_format, batch_invariant=True)
    kernel, x_NI = getattr(made, layer)(read_matrix(module_of(96, 1536))), inputs(40, 1536)
    alone_NO = torch.cat([kernel(row) for row in x_NI.split(1)])
    for rows in (2, 3, 7, 8, 17, 40):
        assert torch.equal(kernel(x_NI[:rows]), alone_NO[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights_format", ["float32", "bfloat16"])
def test_a_type_of_its_own_is_that_of_the_product(weights_format: str, dtype: torch.dtype):
    made, module = KernelMaker(weights_format, batch_invariant=False), module_of().to(dtype)
    kernel = made.make(read_matrix(module))
    x_NI = inputs(3, 64).to(dtype)
    with torch.inference_mode():
        own = torch.float32 if weights_format == "float32" else torch.bfloat16
        want_NO = functional.linear(x_NI.to(own), module.weight.to(own)).to(dtype) + module.bias
        found_NO = kernel(x_NI)
    assert found_NO.dtype == dtype
    torch.testing.assert_close(found_NO, want_NO, atol=1e-4 if own == dtype == torch.float32 else 0.1, rtol=2**-7)
    assert isinstance(kernel, InTypeLinear) == (own != dtype)


def test_joined_and_taken_matrices_keep_their_codes_and_biases():
    groups = GroupedMatrix.quantise(weights(48, 64)[0])
    matrix = Matrix(*weights(48, 64), groups)
    joined, order = join_matrices([matrix, matrix]), torch.tensor([5, 0, 7])
    assert joined.groups is not None
    assert joined.bias_O is not None
    assert torch.equal(joined.groups.dequantise(), torch.cat([groups.dequantise()] * 2))
    assert joined.bias_O.shape == (96,)
    taken = joined.take(order)
    assert torch.equal(taken.weight_OI, matrix.weight_OI[order])
    assert taken.groups is not None
    assert torch.equal(taken.groups.dequantise(), groups.dequantise()[order])
    assert join_matrices([matrix, Matrix(*weights(48, 64))]).groups is None
