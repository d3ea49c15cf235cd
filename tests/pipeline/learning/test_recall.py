"""Recall of an earlier version, with real models: the weights in service afterwards, and what the event reports."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from constants import constants
from event_making import make_drifted
from loop_doubles import runner_of
from replaying import config_of
from tiny_pair import TinyPair, sentences
from torch import Tensor

from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import load_models
from pipeline.config.settings import Config
from stages.engine.models.language_model import read_trained_weights
from stages.learn.training.drafter_trainer import DrafterTrainer
from store.events import Drifted, PromptCompleted, PromptReceived, Recalled, Updated, VersionPublished

AT, SINCE = 8, 5  # a fall is detected at the one prompt, and is found to have begun at the other


class OneFall:
    """Alarms once."""

    def observe(self, prompt: PromptCompleted) -> Drifted | None:
        if prompt.offset != AT:
            return None
        return make_drifted(offset=AT, target=prompt.target, changed_at=SINCE, action="recall")


def prompts() -> Iterator[PromptReceived]:
    for offset, text in enumerate(sentences(600, 620)):
        yield PromptReceived(offset, str(offset), "sums", offset + 1, text[:30])


def is_unharmed(trainer: DrafterTrainer) -> None:
    """The drafter in service stays as it is."""


def spoilt(trainer: DrafterTrainer) -> None:
    """The drafter in service loses all that it knew."""
    generator = torch.Generator().manual_seed(0)
    trainer.adopt([torch.randn(weight.shape, generator=generator) for weight in trainer.served.trained_weights])


class Run:
    """A run with an injected drift. The weights in service are copied as soon as the recall is reported."""

    def __init__(
        self, pair: TinyPair, folder: Path, harm: Callable[[DrafterTrainer], None], *, lag: int = 0, **changes: Any
    ) -> None:
        settings = {"publish__enabled": True, "publish__interval": 2, **changes}
        self.config = config_of(pair, **settings)
        (self.models,) = load_models(self.config, "", folder)
        with constants(update_lag=lag):
            loop = build_loop(self.config, (self.models,), folder)
        runner, self.folder = runner_of(loop, self.models.name), folder
        runner.learner._drift = OneFall()
        self.distill = runner.learner.distill
        self.versions: list[VersionPublished] = []
        self.later: list[PromptCompleted] = []
        self.dropped: list[Updated] = []
        for event in loop.run(prompts()):
            self.see(event, harm)

    def see(self, event: object, harm: Callable[[DrafterTrainer], None]) -> None:
        trainer = self.distill.drafter.trainer
        match event:
            case PromptCompleted(offset=offset) if offset == AT:
                harm(trainer)
                self.before = copy_weights(trainer.served.trained_weights)
            case PromptCompleted(offset=offset) if offset > AT:
                self.later.append(event)
            case Updated(served=False, reason=reason) if "drift" in reason:
                self.dropped.append(event)
            case Recalled():
                self.recalled, self.served = event, copy_weights(trainer.served.trained_weights)
                self.head = copy_weights(self.distill.head.served.parameters())
            case VersionPublished():
                self.versions.append(event)

    def weights_of(self, version: int) -> list[Tensor]:
        (found,) = [event for event in self.versions if event.version == version]
        return read_trained_weights(self.folder / found.folder, self.models.drafter)


def copy_weights(weights: Any) -> list[Tensor]:
    return [weight.detach().clone() for weight in weights]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["shared", "lora"])
def test_the_better_earlier_version_comes_back_bit_for_bit(tiny_pair: TinyPair, tmp_path: Path, lora: bool):
    run = Run(tiny_pair, tmp_path, spoilt, learn__lora_rank=4 * lora, learn__rate=5e-3, learn__method="gradient")
    recalled = run.recalled
    assert recalled.version is not None
    assert recalled.acceptance_best > recalled.acceptance_present + 0.02
    assert same(run.served, run.weights_of(recalled.version))
    assert not same(run.served, run.before)
    by_reason = {event.version: event.reason for event in run.versions}
    assert by_reason[recalled.version] != "drift", "not what was in service when the drift was detected"
    assert recalled.offset == AT + recalled.prompts <= AT + 8, "proven on the prompts that follow"
    assert len(run.later) == 11, "and the stream continues"


def test_an_update_that_is_under_way_is_dropped(tiny_pair: TinyPair, tmp_path: Path):
    """Two prompts to an update: the one handed in with the prompt before the drift."""
    run = Run(tiny_pair, tmp_path, is_unharmed, lag=1)
    assert [update.offset for update in run.dropped] == [AT - 1]
    in_place = Run(tiny_pair, tmp_path / "in place", is_unharmed)
    assert in_place.dropped == []


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({}, "recall"),
        ({"publish.enabled": False}, "reset"),
        ({"learn.enabled": False}, "none"),
        ({"drift.response": "reset"}, "reset"),
        ({"drift.response": "none", "publish.enabled": False}, "none"),
    ],
)
def test_a_drift_event_names_the_response_that_is_possible(changes: dict[str, Any], answer: str):
    assert Config().with_overrides(changes).drift_in_effect.response == answer
