"""Trains a drafter on a fixed set of examples, in passes of updates that the gate accepts or refuses."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from time import perf_counter

from torch import Tensor

from stages.contract.blocks import TrainingExample
from stages.learn.training.drafter_trainer import DrafterTrainer
from stages.learn.training.update import make_event
from store.events import Updated


class OfflineTraining:
    """Trains on examples in random order, and keeps the weights of the pass that is best on the held-out ones.

    Args:
        trainer: trains and serves the weights; nothing may be held out or trained yet.
        held_out: examples for the gate and for the choice of the pass; never trained on.
        passes: maximum number of passes; training ends early after a pass that does not raise the acceptance.
    """

    def __init__(
        self,
        trainer: DrafterTrainer,
        held_out: Sequence[TrainingExample],
        *,
        passes: int,
        update_examples: int,
        seed: int,
    ) -> None:
        self._trainer, self._held_out, self._passes = trainer, tuple(held_out), passes
        self._update_examples, self._random = update_examples, Random(seed)
        for example in self._held_out:
            trainer.hold_out(example)
        # expected acceptance on the held-out examples, as loaded and after each pass
        self.acceptances = [self._measure()]
        self._best = self._copy_weights()

    @property
    def best(self) -> float:
        """The highest expected acceptance so far."""
        return max(self.acceptances)

    def train(self, examples: Sequence[TrainingExample], stop: Callable[[], bool] = lambda: False) -> Iterator[Updated]:
        """Yield the updates; their offsets count the examples read, repetitions too. When the iterator is exhausted,
        the best weights are in service.

        `stop` is called after every update; True ends the training after it.
        """
        read = 0
        for _ in range(self._passes):
            ordered = self._random.sample(examples, len(examples))
            for start in range(0, len(ordered), self._update_examples):
                fresh, began = ordered[start : start + self._update_examples], perf_counter()
                step = self._trainer.settle(self._trainer.attempt(self._trainer.assign(fresh)))
                read += len(fresh)
                seconds, trainer = perf_counter() - began, self._trainer
                update = make_event(
                    step, fresh[-1], trainer.loss_name, trainer.version, seconds=seconds, waited=seconds
                )
                yield replace(update, offset=read - 1)
                if stop():
                    break
            acceptance = self._measure()
            improved = acceptance > self.best
            self.acceptances.append(acceptance)
            if improved:
                self._best = self._copy_weights()
            if not improved or stop():
                break
        if self.acceptances[-1] < self.best:
            self._trainer.adopt(self._best)

    def _measure(self) -> float:
        acceptance = self._trainer.measure_acceptance(None, self._held_out)
        if acceptance is None:
            raise ValueError("the held-out examples must have soft targets within the drafter's context")
        return acceptance

    def _copy_weights(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self._trainer.served.trained_weights]
