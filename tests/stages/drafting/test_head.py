"""The acceptance head."""

import pytest
import torch

from stages.drafting.head import EXTRA_FEATURES, AcceptanceHead, load_head, piece_features, save_head
from store.errors import ModelError

WIDTH = 6


def features(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, WIDTH + EXTRA_FEATURES, generator=torch.Generator().manual_seed(seed))


def test_equal_seeds_give_equal_heads_and_leave_the_global_randomness_alone():
    before = torch.random.get_rng_state()
    first, same, other = (AcceptanceHead(WIDTH, seed)(features(4)) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_new_head_is_hopeful():
    chances_B = AcceptanceHead(WIDTH, 0)(features(100)).sigmoid()
    assert chances_B.shape == (100,)
    assert chances_B.min() > 0.5


def test_features_are_the_state_the_probability_the_entropy_and_the_place():
    hidden_BW = torch.arange(2.0 * WIDTH).reshape(2, WIDTH)
    found = piece_features(hidden_BW, torch.tensor([0.5, 0.0]), torch.tensor([1.0, 2.0]), index=4)
    assert torch.equal(found[:, :WIDTH], hidden_BW)
    assert found[:, WIDTH:].tolist() == [[pytest.approx(-0.6931, abs=1e-4), 1.0, 0.5], [-10.0, 2.0, 0.5]]
    assert found.shape[1] == WIDTH + EXTRA_FEATURES


def test_a_saved_head_loads_again(tmp_path):
    head, other = AcceptanceHead(WIDTH, 0), AcceptanceHead(WIDTH, 1)
    save_head(head, tmp_path / "head.safetensors")
    load_head(other, tmp_path / "head.safetensors")
    assert torch.equal(head(features(3)), other(features(3)))


def test_a_head_of_another_width_is_refused(tmp_path):
    save_head(AcceptanceHead(WIDTH, 0), tmp_path / "head.safetensors")
    with pytest.raises(ModelError, match="must be the head of a drafter of this width"):
        load_head(AcceptanceHead(WIDTH + 1, 0), tmp_path / "head.safetensors")
