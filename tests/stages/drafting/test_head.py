"""The acceptance head."""

import pytest
import torch

from stages.drafting.head import EXTRA_FEATURES, AcceptanceHead, load_head, piece_features, save_head

WIDTH = 6


def features(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, WIDTH + EXTRA_FEATURES, generator=torch.Generator().manual_seed(seed))


def test_equal_seeds_give_equal_heads_and_leave_the_global_randomness_alone():
    before = torch.random.get_rng_state()
    first, same, other = (AcceptanceHead(WIDTH, seed)(features(4)) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_features_are_the_state_and_five_numbers_of_the_piece():
    hidden_BW = torch.arange(2.0 * WIDTH).reshape(2, WIDTH)
    probs_BD = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]])
    found = piece_features(hidden_BW, probs_BD.log() + 3, torch.tensor([2, 1]), index=4)
    assert torch.equal(found[:, :WIDTH], hidden_BW)
    log_quarter, log_two = -1.3863, 0.6931
    near = [pytest.approx(number, abs=1e-4) for number in (log_quarter, 1.5 * log_two, 0.5, 0.5, 0.25)]
    assert found[:, WIDTH:].tolist() == [near, [-10.0, 0.0, 0.5, 1.0, 1.0]]
    assert found.shape[1] == WIDTH + EXTRA_FEATURES


def test_a_saved_head_loads_again(tmp_path):
    head, other = AcceptanceHead(WIDTH, 0), AcceptanceHead(WIDTH, 1)
    save_head(head, tmp_path / "head.safetensors")
    load_head(other, tmp_path / "head.safetensors")
    assert torch.equal(head(features(3)), other(features(3)))
