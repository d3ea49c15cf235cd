"""The target's hidden state as a feature: its reduction, and the weights that read it."""

from pathlib import Path

import pytest
import torch

from stages.drafting.target_states import FEATURES, SCALE, SIZE, StateProjection, TargetStates, state_features
from store.errors import ModelError

CPU = torch.device("cpu")


def new_layer(*targets: str, outputs: int = 5, seed: int = 0) -> TargetStates:
    layer = TargetStates(targets, outputs, CPU).requires_grad_(False)
    for weight in layer.weights:
        weight.normal_(generator=torch.Generator().manual_seed(seed))
    return layer


def test_a_state_is_reduced_alike_whatever_its_batch_and_differently_for_each_target():
    hidden_NW = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    one, other = (StateProjection(name, 96) for name in ("one", "other"))
    assert torch.equal(one(hidden_NW)[3:4], one(hidden_NW[3:4]))
    assert not torch.equal(one(hidden_NW), other(hidden_NW))
    features_NF = state_features(one(hidden_NW)) / SCALE
    assert features_NF.shape == (64, FEATURES)
    assert float(features_NF[:, :SIZE].std()) == pytest.approx(1, abs=0.05)
    assert not one(torch.full((1, 96), torch.nan)).any()


def test_weights_are_found_again_by_target(tmp_path: Path):
    layer = new_layer("one", "other")
    layer.weights[1].mul_(2)
    layer.write(tmp_path)
    again = TargetStates(["third", "other"], 5, CPU).requires_grad_(False)
    again.load(tmp_path)
    assert not again.weights[0].any(), "a target without weights of its own begins with zeros"
    states_NS = StateProjection("other", 8)(torch.randn(3, 8))
    assert torch.equal(again.compute_logits("other", states_NS), layer.compute_logits("other", states_NS))


def test_weights_of_another_drafter_are_refused(tmp_path: Path):
    new_layer("one", outputs=7).write(tmp_path)
    with pytest.raises(ModelError, match="must hold weights of"):
        new_layer("one").load(tmp_path)
    (tmp_path / "target_states.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match="must hold the weights of target states"):
        new_layer("one").load(tmp_path)
