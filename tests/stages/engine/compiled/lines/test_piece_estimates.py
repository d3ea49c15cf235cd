"""The compiled features and estimates of drafted pieces next to those of torch."""

import copy

import pytest
import torch

from stages.contract.blocks import ENTROPY
from stages.drafting.head import AcceptanceHead, piece_features

LARGE = 4.0  # spread of the logits


def make_head(width: int) -> AcceptanceHead:
    head = AcceptanceHead(width, seed=0)
    with torch.no_grad():
        for number, weight in enumerate(head.parameters()):
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)) / 8)
    return head


@pytest.mark.parametrize(
    ("lines", "width", "size"), [(1, 192, 4096), (3, 128, 4099), (2, 37, 16), (5, 8, 3), (1, 16, 1)]
)
@pytest.mark.parametrize("masked", [False, True])
def test_they_are_those_of_torch(lines: int, width: int, size: int, *, masked: bool):
    numbers = torch.Generator().manual_seed(width)
    hidden_BW = torch.randn(lines, width, generator=numbers)
    logits_BD = torch.randn(lines, size, generator=numbers) * LARGE
    if masked and size > 2:
        logits_BD[:, 1::2] = -torch.inf
    head = make_head(width)
    for pieces_B in (logits_BD.argmax(-1), torch.zeros(lines, dtype=torch.long)):
        with torch.inference_mode():
            features_BF, estimates_B = head.estimate(hidden_BW, logits_BD, pieces_B, 2)
            want_BF = piece_features(hidden_BW, logits_BD, pieces_B, 2)
            torch.testing.assert_close(features_BF, want_BF, atol=2e-6, rtol=1e-5)
            torch.testing.assert_close(estimates_B, head(want_BF).sigmoid(), atol=1e-5, rtol=1e-5)


def test_features_of_logits_that_are_not_finite_are_not_finite():
    head, hidden_BW = make_head(16), torch.zeros(1, 16)
    for value in (torch.nan, torch.inf):
        logits_BD = torch.zeros(1, 40)
        logits_BD[0, 33] = value
        features_BF, _ = head.estimate(hidden_BW, logits_BD, torch.zeros(1, dtype=torch.long), 0)
        assert not features_BF[0, ENTROPY].isfinite()


def test_they_follow_the_weights_of_a_head_and_of_its_copy():
    head, hidden_BW, logits_BD = make_head(16), torch.ones(1, 16), torch.zeros(1, 40)
    pieces_B = torch.zeros(1, dtype=torch.long)
    _, before_B = head.estimate(hidden_BW, logits_BD, pieces_B, 0)
    copied = copy.deepcopy(head)
    head.load_state_dict(AcceptanceHead(16, seed=1).state_dict())
    _, after_B = head.estimate(hidden_BW, logits_BD, pieces_B, 0)
    assert after_B != before_B
    assert copied.estimate(hidden_BW, logits_BD, pieces_B, 0)[1] == before_B


def test_other_types_are_read_by_torch():
    head, hidden_BW, logits_BD = make_head(16), torch.ones(1, 16), torch.arange(40.0)[None] / 8
    pieces_B = torch.zeros(1, dtype=torch.long)
    with torch.inference_mode():
        compiled, by_torch = (
            head.estimate(hidden_BW.to(dtype), logits_BD.to(dtype), pieces_B, 0)
            for dtype in (torch.float32, torch.float64)
        )
    for own, other in zip(compiled, by_torch, strict=True):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-5)
