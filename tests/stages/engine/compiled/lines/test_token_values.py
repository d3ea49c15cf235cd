"""The compiled probabilities and entropies of lines next to those of float64."""

import math

import pytest
import torch

from stages.engine.compiled.lines.token_values import read_token_values

SIZES = 1, 5, 16, 17, 300, 4096, 49_152, 49_157


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("masked", [False, True])
def test_they_are_those_of_float64(size: int, spread: float, *, masked: bool):
    numbers = torch.Generator().manual_seed(size)
    logits_NV = torch.randn(4, size, generator=numbers) * spread + 30
    if masked and size > 2:
        logits_NV[:, 1::2] = -torch.inf
    before_NV = logits_NV.clone()
    log_NV = logits_NV.double().log_softmax(-1)
    probs_NV = log_NV.exp()
    entropies_N = -(probs_NV * log_NV.clamp(min=-1e4)).sum(-1)
    places = [(line, line % size, size - 1) for line in (3, 0, 0, 2)]
    found = read_token_values(logits_NV, places)
    assert torch.equal(logits_NV, before_NV)
    for (line, first, second), values in zip(places, found, strict=True):
        wanted = [float(probs_NV[line, first]), float(probs_NV[line, second]), float(entropies_N[line])]
        assert values == pytest.approx(wanted, rel=2e-5, abs=2e-6)


def test_a_certain_line_has_no_entropy():
    logits_NV = torch.full((1, 50), -200.0)
    logits_NV[0, 20] = 100.0
    ((own, other, entropy),) = read_token_values(logits_NV, [(0, 20, 3)])
    assert (own, other) == (1.0, 0.0)
    assert entropy == pytest.approx(0.0, abs=1e-6)


def test_lines_may_be_those_of_a_larger_tensor():
    logits_NV = torch.randn(6, 90, generator=torch.Generator().manual_seed(0))
    part_NV = logits_NV[1:5, 10:50]
    ((first, second, entropy),) = read_token_values(part_NV, [(2, 4, 7)])
    probs_V = part_NV[2].double().softmax(-1)
    assert (first, second) == pytest.approx((float(probs_V[4]), float(probs_V[7])), rel=1e-5)
    assert entropy == pytest.approx(-sum(float(one) * math.log(one) for one in probs_V), rel=1e-5)
