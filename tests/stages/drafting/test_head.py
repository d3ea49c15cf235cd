"""The acceptance head."""

import pytest
import torch
from safetensors.torch import save_file

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


def test_features_are_the_state_and_five_numbers_of_the_piece():
    hidden_BW = torch.arange(2.0 * WIDTH).reshape(2, WIDTH)
    probs_BD = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]])
    found = piece_features(hidden_BW, probs_BD.log() + 3, torch.tensor([2, 1]), index=4)
    assert torch.equal(found[:, :WIDTH], hidden_BW)
    log_quarter, log_two = -1.3863, 0.6931
    near = [pytest.approx(number, abs=1e-4) for number in (log_quarter, 1.5 * log_two, 0.5, 0.5, 0.25)]
    assert found[:, WIDTH:].tolist() == [near, [-10.0, 0.0, 0.5, 1.0, 1.0]]
    assert found.shape[1] == WIDTH + EXTRA_FEATURES


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_features_of_a_distribution_that_is_not_finite_are_not(wrong: float):
    logits_BD = torch.tensor([[0.0, 1.0, wrong], [0.0, 1.0, -torch.inf]])
    found = piece_features(torch.zeros(2, WIDTH), logits_BD, torch.tensor([1, 1]), index=0)
    assert found[:, WIDTH:].isfinite().all(-1).tolist() == [False, True]


def test_a_drafter_of_one_piece_has_features():
    found = piece_features(torch.zeros(1, WIDTH), torch.tensor([[2.0]]), torch.tensor([0]), index=0)
    assert found[0, WIDTH:].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_a_saved_head_loads_again(tmp_path):
    head, other = AcceptanceHead(WIDTH, 0), AcceptanceHead(WIDTH, 1)
    save_head(head, tmp_path / "head.safetensors")
    load_head(other, tmp_path / "head.safetensors")
    assert torch.equal(head(features(3)), other(features(3)))


def test_a_head_of_an_older_release_loads_and_does_not_look_at_what_it_did_not_know(tmp_path):
    """It had three features after the state: the piece's log probability, the entropy, and the index."""
    head, other = AcceptanceHead(WIDTH, 0), AcceptanceHead(WIDTH, 1)
    weights = head.state_dict()
    weights["enter.weight"] = weights["enter.weight"][:, : WIDTH + 3].contiguous()
    save_file(weights, tmp_path / "head.safetensors")
    load_head(other, tmp_path / "head.safetensors")
    assert torch.equal(other.enter.weight[:, : WIDTH + 3], weights["enter.weight"])
    assert not other.enter.weight[:, WIDTH + 3 :].any()
    changed = features(4)
    changed[:, WIDTH + 3 :] += 1
    assert torch.equal(other(features(4)), other(changed))
    changed[:, WIDTH] += 1
    assert not torch.equal(other(features(4)), other(changed))


def test_a_head_of_another_width_is_refused(tmp_path):
    save_head(AcceptanceHead(WIDTH, 0), tmp_path / "head.safetensors")
    with pytest.raises(ModelError, match="must be the head of a drafter of this width"):
        load_head(AcceptanceHead(WIDTH + 1, 0), tmp_path / "head.safetensors")
