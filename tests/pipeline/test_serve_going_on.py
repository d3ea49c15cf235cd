"""A server that goes on serves at once what had been learned, whatever it does about learning now."""

from pathlib import Path

import pytest
import torch
from serving_tiny import assert_sound, select, serve_config, served_all, serving, texts, until
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)
from torch import Tensor

from pipeline.learner_host import past_of

LEARNING = {"learn__spacing": "fixed", "learn__interval": 2, "serve__learn_share": 4.0}


def taught(pair: TinyPair, run: Path) -> list[Tensor]:
    """A server learns live, and ends. Returns the weights that it began with."""
    with serving(serve_config(pair, serve__learn="live", **LEARNING), run) as server:
        base = [weight.clone() for weight in server.models.drafter.learning]
        until(lambda: bool(served_all(server.engine, texts(700, 703)) and server.engine.figures().drafter_version))
    return base


def in_service(pair: TinyPair, run: Path, learn: str) -> tuple[list[Tensor], tuple[int, int]]:
    """What a server that goes on serves before its learner can have said anything."""
    with serving(serve_config(pair, serve__learn=learn, **LEARNING), run, resume=True) as server:
        figures = server.engine.figures()
        weights = [weight.clone() for weight in server.models.drafter.learning]
        served_all(server.engine, texts(703, 706))
    assert_sound(run)
    return weights, (figures.drafter_version, figures.head_version)


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def test_what_was_learned_is_in_service_again(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    run = tmp_path / "run"
    base = taught(tiny_pair, run)
    for learn in ("off", "shadow", "live"):
        past = past_of(run)
        assert past is not None
        weights, versions = in_service(tiny_pair, run, learn)
        assert versions == (past.weights.drafter_version, past.weights.head_version), learn
        assert equal(weights, list(past.weights.drafter)), learn
        assert not equal(weights, base)
    first, *_, last = [
        row["drafter_version"] for row in select(run, 'SELECT drafter_version FROM prompts ORDER BY "offset"')
    ]
    assert (first, last > 0) == (0, True)


def test_what_was_only_learned_beside_is_not(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    run = tmp_path / "run"
    with serving(serve_config(tiny_pair, serve__learn="shadow", **LEARNING), run) as server:
        base = [weight.clone() for weight in server.models.drafter.learning]
        served_all(server.engine, texts(700, 706))
        until(lambda: server.engine.figures().learner_lag == 0)
    past = past_of(run)
    assert past is not None
    assert past.weights.drafter_version > 0
    weights, versions = in_service(tiny_pair, run, "off")
    assert versions == (0, 0)
    assert equal(weights, base)


@pytest.mark.parametrize("learn", ["off", "live"])
def test_offsets_go_on_behind_what_the_learner_knows(tiny_pair: TinyPair, tmp_path: Path, learn: str):  # noqa: F811
    run = tmp_path / "run"
    taught(tiny_pair, run)
    past = past_of(run)
    assert past is not None
    in_service(tiny_pair, run, learn)
    offsets = [row["offset"] for row in select(run, 'SELECT "offset" FROM prompts')]
    assert len(set(offsets)) == len(offsets)
    assert max(offsets) >= past.next_offset
