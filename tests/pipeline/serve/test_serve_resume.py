"""A resumed server serves the learned weights at once, whatever its setting of learning is now."""

from pathlib import Path

import pytest
import torch
from serving_tiny import assert_sound, complete_all, run_server, select, serve_config, texts, wait_until
from tiny_pair import TinyPair
from torch import Tensor

from pipeline.learner_service.service import read_learner_checkpoint

LEARNING = {"learn__spacing": "fixed", "learn__interval": 2}


def learn_live(pair: TinyPair, run: Path) -> list[Tensor]:
    """Run a server that learns live. Returns the weights that it began with."""
    with run_server(serve_config(pair, serve__learn="live", **LEARNING), run) as server:
        base = [weight.clone() for weight in server.models.drafter.trained_weights]
        wait_until(
            lambda: bool(complete_all(server.engine, texts(700, 703)) and server.engine.read_status().drafter_version)
        )
    return base


def resume_server(pair: TinyPair, run: Path, learn: str) -> tuple[list[Tensor], tuple[int, int]]:
    """Resume a server. Returns the weights and versions that it serves before its learner can have changed them."""
    with run_server(serve_config(pair, serve__learn=learn, **LEARNING), run, resume=True) as server:
        status = server.engine.read_status()
        weights = [weight.clone() for weight in server.models.drafter.trained_weights]
        complete_all(server.engine, texts(703, 706))
    assert_sound(run)
    return weights, (status.drafter_version, status.head_version)


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


@pytest.mark.slow
def test_learned_weights_are_in_service_again(tiny_pair: TinyPair, tmp_path: Path):
    run = tmp_path / "run"
    base = learn_live(tiny_pair, run)
    for learn in ("off", "shadow", "live"):
        checkpoint = read_learner_checkpoint(run)
        assert checkpoint is not None
        weights, versions = resume_server(tiny_pair, run, learn)
        assert versions == (checkpoint.weights.drafter_version, checkpoint.weights.head_version), learn
        assert equal(weights, list(checkpoint.weights.drafter)), learn
        assert not equal(weights, base)
    first, *_, last = [
        row["drafter_version"] for row in select(run, 'SELECT drafter_version FROM prompts ORDER BY "offset"')
    ]
    assert (first, last > 0) == (0, True)


@pytest.mark.sweep
def test_shadow_weights_are_not_put_into_service(tiny_pair: TinyPair, tmp_path: Path):
    run = tmp_path / "run"
    with run_server(serve_config(tiny_pair, serve__learn="shadow", **LEARNING), run) as server:
        base = [weight.clone() for weight in server.models.drafter.trained_weights]
        complete_all(server.engine, texts(700, 706))
        wait_until(lambda: server.engine.read_status().learner_lag == 0)
    checkpoint = read_learner_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.weights.drafter_version > 0
    weights, versions = resume_server(tiny_pair, run, "off")
    assert versions == (0, 0)
    assert equal(weights, base)


@pytest.mark.representatives("live")
@pytest.mark.slow
@pytest.mark.parametrize("learn", ["off", "live"])
def test_offsets_resume_after_those_of_the_learner(tiny_pair: TinyPair, tmp_path: Path, learn: str):
    run = tmp_path / "run"
    learn_live(tiny_pair, run)
    checkpoint = read_learner_checkpoint(run)
    assert checkpoint is not None
    resume_server(tiny_pair, run, learn)
    offsets = [row["offset"] for row in select(run, 'SELECT "offset" FROM prompts')]
    assert len(set(offsets)) == len(offsets)
    assert max(offsets) >= checkpoint.next_offset
