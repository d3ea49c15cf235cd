"""The compiled selection of the largest logits next to NumPy's sort."""

import numpy as np
import pytest
import torch

from stages.engine.compiled.lines.largest_logits import LargestLogits

SIZES = 5, 70, 300, 2048, 2113, 8191, 8192, 49_152, 49_157


def make_lines(kind: str, size: int) -> torch.Tensor:
    logits_NV = torch.randn(3, size, generator=torch.Generator().manual_seed(size)) * 3
    if kind == "many are equal":
        return logits_NV.round()
    if kind == "all are equal":
        return logits_NV * 0
    if kind == "half are masked":
        logits_NV[:, size // 2 :] = -torch.inf
    if kind == "the last are largest":
        return logits_NV.sort(-1).values
    return logits_NV


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "kind", ["all differ", "many are equal", "all are equal", "half are masked", "the last are largest"]
)
def test_the_selected_are_the_first_of_a_stable_sort(kind: str, size: int):
    logits_NV, count = make_lines(kind, size), min(64, size)
    ids, logits, sums = LargestLogits(count, 0.5)(logits_NV, range(len(logits_NV)))
    want = np.argsort(-logits_NV.numpy(), axis=1, kind="stable")[:, :count]
    assert ids.tolist() == want.tolist()
    assert logits.tolist() == np.take_along_axis(logits_NV.numpy(), want, 1).tolist()
    distances = (logits_NV - logits_NV.amax(-1, keepdim=True)).double() * 2
    assert sums[:, 0] == pytest.approx(distances.exp().sum(-1).numpy(), rel=1e-5)


def test_lines_may_be_parts_of_longer_ones_and_their_size_may_change():
    logits_NV = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    find = LargestLogits(3, 1.0)
    for size in (1000, 900, 17, 1000):
        part_NV = logits_NV[1:, :size]
        assert find(part_NV, [2, 0, 2])[0].tolist() == part_NV[[2, 0, 2]].topk(3).indices.tolist()


def test_other_types_strides_and_no_lines_are_left_to_others():
    logits_NV = torch.zeros(2, 20)
    assert LargestLogits.reads(logits_NV)
    for other in (logits_NV.double(), logits_NV.bfloat16(), logits_NV[:0], logits_NV[:, ::2]):
        assert not LargestLogits.reads(other)
