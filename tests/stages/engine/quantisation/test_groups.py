"""Codes in groups: what is quantised, joined, and read from the blocks of GGUF files."""

import gguf
import numpy as np
import pytest
import torch
from gguf_making import quantise
from torch import nn

from stages.engine.quantisation.groups import GROUP, GroupedMatrix
from stages.engine.quantisation.layouts import FILE_KINDS, read_groups
from stages.engine.quantisation.modules import (
    QUANTISED_BITS,
    attach_groups,
    find_groups,
    has_groups,
    mean_bytes,
    round_weights,
)

OUTPUTS, INPUTS = 24, 512
HALF = 2.0**-8  # largest relative error of rounding to bfloat16


def weights(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(OUTPUTS, INPUTS, generator=generator) * torch.rand(OUTPUTS, 1, generator=generator)


def blocks_of(kind: str) -> np.ndarray:
    return quantise(weights().numpy(), kind)


KINDS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q8_0": 8}
OF_16 = {"Q2_K": 2, "Q3_K": 3, "Q6_K": 6}  # in groups of 16
TABLES = {"IQ4_NL": 8, "IQ4_XS": 8, "MXFP4": 5}  # whose codes are looked up: bits of what is found


@pytest.mark.parametrize("kind", [*KINDS, *OF_16, *TABLES])
def test_blocks_are_read_bit_for_bit(kind: str):
    rows = blocks_of(kind)
    groups = read_groups(kind, rows)
    assert groups.bits == {**KINDS, **OF_16, **TABLES}[kind]
    assert groups.size == (16 if kind in OF_16 else GROUP)
    assert kind in TABLES or int(groups.codes_OI.max()) == 2**groups.bits - 1
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert torch.equal(groups.dequantise(), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", ["IQ3_S", "TQ1_0", "F32", "BF16"])
def test_other_types_have_no_groups(kind: str):
    assert kind not in FILE_KINDS


def test_quantised_weights_are_near():
    weight_OI = weights()
    groups = GroupedMatrix.quantise(weight_OI)
    assert groups.bits == 4
    error = (groups.dequantise() - weight_OI).square().mean().sqrt() / weight_OI.square().mean().sqrt()
    assert 0.01 < error < 0.09


def test_the_range_of_a_group_is_chosen_by_its_error():
    weight_OI = torch.linspace(-1, 1, GROUP).repeat(1, 2)
    weight_OI[0, GROUP:] *= torch.where(torch.arange(GROUP) == 0, 1.2, 0.8)  # one weight far from the others
    groups = GroupedMatrix.quantise(weight_OI)
    whole = (weight_OI.unflatten(1, (-1, GROUP)).amax(2) - weight_OI.unflatten(1, (-1, GROUP)).amin(2)) / 15
    assert (groups.scale_OG <= whole * (1 + HALF)).all()
    assert groups.scale_OG[0, 1] < whole[0, 1] * (1 - HALF), "the far weight is cut"


def test_equal_weights_and_zeros_are_kept():
    weight_OI = torch.zeros(2, GROUP)
    weight_OI[1] = 0.5
    assert torch.equal(GroupedMatrix.quantise(weight_OI).dequantise(), weight_OI)


def test_rows_are_taken():
    one, order = GroupedMatrix.quantise(weights()), torch.tensor([3, 1, 2])
    assert torch.equal(one.take(order).dequantise(), one.dequantise()[order])


def linear_of(weight_OI: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = weight_OI.clone()
    return linear


def test_attached_codes_are_used_as_long_as_they_give_the_weight():
    groups = read_groups("Q4_0", blocks_of("Q4_0"))
    linear = linear_of(groups.dequantise())
    assert find_groups(linear, 4, quantise=False) is None
    attach_groups(linear, groups)
    assert find_groups(linear, 4, quantise=False) is groups
    with torch.no_grad():
        linear.weight[0, 0] += 1
    found = find_groups(linear, 4, quantise=False)
    assert found is not None
    assert found is not groups
    changed = linear.weight.detach()[0, 0]
    assert (found.dequantise()[0, 0] - changed).abs() < (groups.dequantise()[0, 0] - changed).abs()


def test_the_bytes_of_a_weight_are_those_of_its_codes():
    model = Layers(linear_of(weights()), nn.Linear(INPUTS, OUTPUTS))
    model.dtype = torch.float32
    groups = read_groups("Q4_0", blocks_of("Q4_0"))
    attach_groups(model[0], groups)
    found = {name: mean_bytes(model, name) for name in ("codes", "int4", "int8", "fastest")}
    assert found == {
        "codes": (6 / 8 + 4) / 2,
        "int4": 6 / 8,
        "int8": (6 / 8 + 10 / 8) / 2,
        "fastest": (6 / 8 + 4) / 2,
    }


def test_weights_that_do_not_fit_groups_have_none():
    assert find_groups(nn.Linear(48, 8), 4, quantise=True) is None


class Layers(nn.Sequential):
    """A model whose last module is its output layer."""

    def get_output_embeddings(self) -> nn.Module:
        return self[-1]


@pytest.mark.parametrize("weights_format", ["int4", "int8", "codes", "fastest"])
def test_modules_compute_with_rounded_weights_only_inside(weights_format: str):
    model = Layers(linear_of(weights()), nn.Linear(OUTPUTS, 8))
    before = [linear.weight for linear in model]
    rounded = {kind: GroupedMatrix.quantise(weights(), bits).dequantise() for kind, bits in QUANTISED_BITS.items()}
    with round_weights(model, weights_format):
        assert torch.equal(model[0].weight, rounded.get(weights_format, weights()))
        assert torch.equal(model[1].weight, before[1])
        assert has_groups(model) == (weights_format in QUANTISED_BITS)
    assert all(linear.weight is weight for linear, weight in zip(model, before, strict=True))
    assert not has_groups(model)
