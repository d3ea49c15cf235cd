"""The compiled draw next to NumPy's cumulative weights."""

import random

import numpy as np
import pytest
import torch

from stages.engine.compiled.lines.draw import NOTHING, draw
from stages.engine.compiled.lines.line import can_read
from stages.sampling.drawing import _invert

SIZES = 1, 5, 16, 255, 256, 257, 300, 1000, 49_152, 49_157


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_it_is_the_inversion_of_numpy(size: int, share: float):
    """`share`: of the weights that are 0."""
    numbers = random.Random(size)
    for seed in range(40):
        torch.manual_seed(seed)
        weights_V = torch.rand(size)
        weights_V[torch.rand(size) < share] = 0
        weights_V[numbers.randrange(size)] = 1.0
        excluded = [numbers.randrange(size) for _ in range(numbers.choice([0, 0, 1, 3]))]
        before_V, rest_V = weights_V.clone(), weights_V.clone()
        rest_V[excluded] = 0
        uniform = numbers.choice([0.0, numbers.random(), numbers.random(), 1 - 2**-24, 1 - 2**-53])
        want = int(_invert(rest_V[None], [uniform])[0]) if float(rest_V.sum()) else NOTHING
        assert draw(weights_V, uniform, excluded) == want
        assert torch.equal(weights_V, before_V), "the weights are as they were"


def test_every_index_has_its_share():
    weights_V = torch.tensor([0.125, 0.0, 0.5, 0.25, 0.125])
    drawn = [draw(weights_V, (place + 0.5) / 64) for place in range(64)]
    assert np.bincount(drawn, minlength=5).tolist() == [8, 0, 32, 16, 8]


def test_other_types_and_gaps_are_left_to_others():
    weights_V = torch.rand(20)
    assert can_read(weights_V)
    for other in (weights_V.double(), weights_V[::2], weights_V.clone().requires_grad_()):
        assert not can_read(other)
