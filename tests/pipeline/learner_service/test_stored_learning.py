"""Closed-form learning of a stopped run: prompts are unlearned, and the sums of two runs are merged."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from constants import NO_GATE
from learner_hosting import learn_from, make_config, make_learner_config, make_service, run_local_learner
from replaying import Command, StoppingDisplay, config_of
from tiny_pair import TinyPair

import pipeline
from pipeline.learner_service.stored_learning import find_learner, unlearn
from pipeline.run.committer import last_snapshot
from pipeline.run.folder import CONFIG
from pipeline.run.replay import Replay
from stages.distill import read_sums, read_weights
from stages.learn.training.least_squares_sums import LeastSquaresSums
from store.log.partitions import LEARNER, partition_folder

LEARNING = {
    "learn__method": "least-squares", "learn__spacing": "fixed", "draft__sources": ("model",), "commit__seconds": 1e-9,
}  # fmt: skip
pytestmark = pytest.mark.constants(update_lag=0, gate_every=NO_GATE)


def make_stopped(pair: TinyPair, folder: Path, **changes: object) -> Path:
    """Make a run that was stopped after eight prompts."""
    with StoppingDisplay(8) as display:
        assert Replay(config_of(pair, **LEARNING | changes), folder).run(display)["stopped"]
    return folder


def read_learned(run: Path) -> tuple[LeastSquaresSums, list[torch.Tensor]]:
    """Read the sums and the drafter's weights of the last commit."""
    distill = find_learner(last_snapshot(run))["distill"]
    sums, weights = read_sums(distill), read_weights(distill)
    assert isinstance(sums, LeastSquaresSums)
    return sums, list(weights.drafter)


def difference(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(left, right, strict=True))


def test_a_run_that_unlearned_every_prompt_has_the_weights_of_one_that_learned_nothing(
    tiny_pair: TinyPair, tmp_path: Path, omnidraft: Command
):
    run, ignorant = make_stopped(tiny_pair, tmp_path / "run"), tmp_path / "ignorant"
    make_stopped(tiny_pair, ignorant, learn__interval=1000)
    before, loaded = read_learned(run)[1], read_learned(ignorant)[1]
    assert difference(before, loaded) > 1e-4
    typed = omnidraft("memory", "forget", run, "--learned", "--prompt", 0, "--json")
    assert typed.status == 0, typed.err
    unlearn(run, lambda example: True)
    sums, weights = read_learned(run)
    assert difference(weights, loaded) < 1e-6
    assert float(sums.products_WD.abs().max()) < 1e-6
    assert omnidraft("replay", "--resume", run).status == 0


def test_merged_runs_have_the_sums_of_both(tiny_pair: TinyPair, tmp_path: Path):
    run, other = make_stopped(tiny_pair, tmp_path / "run"), make_stopped(tiny_pair, tmp_path / "other", seed=1)
    (own, before), (theirs, unchanged) = read_learned(run), read_learned(other)
    assert pipeline.merge_learning(run, other) == 1
    sums, weights = read_learned(run)
    torch.testing.assert_close(sums.states_WW, own.states_WW + theirs.states_WW)
    torch.testing.assert_close(sums.products_WD, own.products_WD + theirs.products_WD)
    assert difference(weights, before) > 0
    assert difference(read_learned(other)[1], unchanged) == 0


def test_the_learner_of_a_server_unlearns_a_tenant(tiny_pair: TinyPair, tmp_path: Path):
    """Of eight prompts two are of another tenant; the service without them has the same sums."""
    config = make_config(tiny_pair, **LEARNING | {"learn__interval": 1, "draft__stop": "never"})
    finished = run_local_learner(config, tmp_path / "local", 8).finished
    marked = [
        replace(one, example=replace(one.example, scope=7 if number in (2, 5) else 3))
        for number, one in enumerate(finished)
        if one.example
    ]
    for name, seen in (("run", marked), ("ignorant", [one for one in marked if one.example.scope == 3])):
        run = tmp_path / name
        with make_service(make_learner_config(config, run)) as service:
            learn_from(service, seen)
            service.pause(0.0)
        (run / CONFIG).write_text(config.to_json(), encoding="utf-8")
    assert unlearn(tmp_path / "run", lambda example: example.scope == 7) == 2
    assert unlearn(tmp_path / "run", lambda example: example.scope == 7) == 0
    learned = [read_learned(partition_folder(tmp_path / name, LEARNER)) for name in ("run", "ignorant")]
    torch.testing.assert_close(learned[0][0].products_WD, learned[1][0].products_WD, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(learned[0][0].states_WW, learned[1][0].states_WW, atol=1e-9, rtol=1e-9)


def test_what_gradient_steps_learned_is_not_taken_apart(tiny_pair: TinyPair, tmp_path: Path, omnidraft: Command):
    run = make_stopped(tiny_pair, tmp_path / "run", learn__method="gradient")
    typed = omnidraft("memory", "forget", run, "--learned", "--prompt", "0")
    assert typed.status == 2
    assert "least-squares" in typed.err
    with pytest.raises(pipeline.UsageError, match="least-squares"):
        pipeline.merge_learning(run, run)
