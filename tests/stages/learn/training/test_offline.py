"""Offline training: the pass that it keeps, and the examples that it trains on."""

from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.contract.blocks import TrainingExample
from stages.learn.training.offline import OfflineTraining
from stages.learn.training.update import Step


def example(offset: int) -> TrainingExample:
    return TrainingExample(offset, "target", (1, 2), (), (), ())


class ScriptedTrainer:
    """A trainer whose one weight counts its updates, and whose acceptance after each pass is given."""

    def __init__(self, acceptances: Sequence[float | None]) -> None:
        self.served = SimpleNamespace(trained_weights=[torch.zeros(1)])
        self.loss_name, self.version = "trie", 0
        self.held: list[int] = []
        self.trained: list[list[int]] = []
        self._acceptances = list(acceptances)

    def hold_out(self, one: TrainingExample) -> None:
        self.held.append(one.offset)

    def assign(self, fresh: Sequence[TrainingExample]) -> list[TrainingExample]:
        return list(fresh)

    def attempt(self, assigned: list[TrainingExample]) -> list[TrainingExample]:
        return assigned

    def settle(self, assigned: list[TrainingExample]) -> Any:
        self.trained.append([one.offset for one in assigned])
        self.served.trained_weights[0] += 1
        return Step(0.5, 1, 1, None, None, None, served=True, reason="")

    def adopt(self, weights: list[Tensor]) -> None:
        self.served.trained_weights[0].copy_(weights[0])

    def measure_acceptance(self, weights: None, examples: Sequence[TrainingExample]) -> float | None:
        return self._acceptances.pop(0)


def train(trainer: Any, *, passes: int = 4, stop_after: int = 100) -> OfflineTraining:
    """Train on five examples, two at a time, with a sixth held out."""
    training = OfflineTraining(trainer, [example(5)], passes=passes, update_examples=2, seed=0)
    for _ in training.train([example(n) for n in range(5)], lambda: len(trainer.trained) >= stop_after):
        pass
    return training


@pytest.mark.parametrize(
    ("acceptances", "updates", "served"),
    [
        ([0.3, 0.5, 0.6], 6, 6),  # every pass is better: the last is served
        ([0.3, 0.5, 0.4], 6, 3),  # the second is worse: it is the last, and the first is served
        ([0.3, 0.2], 3, 0),  # none is better: the drafter as loaded is served
    ],
)
def test_the_best_pass_is_served(acceptances: list[float], updates: int, served: int):
    trainer = ScriptedTrainer(acceptances)
    training = train(trainer, passes=len(acceptances) - 1)
    assert training.acceptances == acceptances
    assert training.best == max(acceptances)
    assert len(trainer.trained) == updates
    assert trainer.served.trained_weights[0].item() == served


def test_a_pass_reads_every_example_once_and_none_that_is_held_out():
    trainer = ScriptedTrainer([0.1, 0.2, 0.3])
    train(trainer, passes=2)
    assert trainer.held == [5]
    passes = [list(chain(*trainer.trained[:3])), list(chain(*trainer.trained[3:]))]
    assert all(sorted(read) == [0, 1, 2, 3, 4] for read in passes)
    assert passes[0] != passes[1]
