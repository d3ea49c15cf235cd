"""Distill: completed prompts of one target update the drafter and the acceptance head (paper, algorithms 2 to 4).

Drafter updates are computed on a copy and gated: an update that lowers the expected acceptance on recent held-out
prompts is never served.
"""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from typing_extensions import override

from stages.contract.blocks import AcceptanceLabel, TrainingExample
from stages.contract.snapshot import State
from stages.learn.training.head_trainer import HeadTrainer
from stages.learn.training.least_squares_sums import LeastSquaresSums
from stages.learn.training.scheduler import UpdateScheduler
from stages.learn.training.weight_update import Weights
from store.events import Updated


class Distiller:
    """The interface of online distillation. This implementation learns nothing: the drafter is frozen."""

    @property
    def drafter_version(self) -> int:
        """Number of drafter updates served."""
        return 0

    @property
    def head_version(self) -> int:
        """Number of steps and resets of the head."""
        return 0

    @property
    def held_out_acceptance(self) -> tuple[float | None, float | None]:
        """Acceptance on held-out prompts of the drafter in service and as loaded, where an update has measured it."""
        return None, None

    @property
    def busy(self) -> bool:
        """Whether an update is being computed in parallel with decoding; a snapshot would wait for it."""
        return False

    def wants_example(self, offset: int) -> bool:
        """Return whether the drafter learns from the prompt at an offset of the stream, if it is admitted now."""
        return True

    def learn(self, example: TrainingExample) -> tuple[Updated, ...]:
        """Learn from a completed prompt and return the updates that followed; prompts come in stream order. Without
        soft targets only the head learns.
        """
        return ()

    def update_if_due(self) -> tuple[Updated, ...]:
        """Learn what waits for an update, if one is due now that time has become free; return the updates."""
        return ()

    def reset_head(self) -> tuple[Updated, ...]:
        """After a drift: reset the head, drop its labels, and learn at the shortest interval again.

        Returns the update in progress, if one was dropped.
        """
        return ()

    def wait(self) -> bool:
        """Block until no update is being computed, for callers that need exclusive use of the machine.

        Returns whether one was. No update is adopted.
        """
        return False

    def end(self) -> tuple[Updated, ...]:
        """After the last example: wait for the update in progress and adopt it. May be called again."""
        return ()

    def state_dict(self) -> State:
        return None

    def load_state_dict(self, state: State) -> None:
        """Continue from a state."""


class Distill(Distiller):
    """Examples to updates. An update is adopted with the example that completes an interval, or a fixed number of
    examples later.

    Args:
        head: trains this target's acceptance head after each prompt with enough labels (the paper's algorithm 4), and
            after each update of the drafter in closed form, which shows its acceptance at all tokens of some texts.
    """

    def __init__(self, drafter: UpdateScheduler, head: HeadTrainer) -> None:
        self.drafter, self.head = drafter, head

    @property
    @override
    def drafter_version(self) -> int:
        return self.drafter.version

    @property
    @override
    def head_version(self) -> int:
        return self.head.version

    @property
    @override
    def held_out_acceptance(self) -> tuple[float | None, float | None]:
        return self.drafter.trainer.held_out_acceptance

    @property
    @override
    def busy(self) -> bool:
        return self.drafter.busy

    @override
    def wants_example(self, offset: int) -> bool:
        return self.drafter.wants_example(offset)

    @override
    def learn(self, example: TrainingExample) -> tuple[Updated, ...]:
        self.head.observe(example.labels)
        without_tensors = replace(example, labels=())
        updated = self._add_head_version(self.drafter.add(without_tensors)) if example.soft_targets else ()
        lessons = self.drafter.take_labels(example.target)
        steps = self._head_step(example, lessons) if example.labels or lessons else ()
        # Last: a step of the head takes ten times as long while an update has one of two cores.
        return (*updated, *steps, *self.update_if_due()) if example.soft_targets else steps

    @override
    def update_if_due(self) -> tuple[Updated, ...]:
        updated = self._add_head_version(self.drafter.update_if_due())
        lessons = [label for one in updated for label in self.drafter.take_labels(one.target)]
        return (*updated, *self._head_step(updated[0], lessons)) if lessons else updated

    def _add_head_version(self, updated: Updated | None) -> tuple[Updated, ...]:
        return (replace(updated, head_version=self.head.version),) if updated else ()

    def _head_step(self, last: TrainingExample | Updated, lessons: Sequence[AcceptanceLabel]) -> tuple[Updated, ...]:
        started = perf_counter()
        loss = self.head.study(lessons) if lessons else self.head.update()
        if loss is None:
            return ()
        step = Updated(
            offset=last.offset,
            target=last.target,
            part="head",
            loss_name="cross-entropy",
            loss=loss,
            positions=self.head.batch,
            acceptance_before=None,
            acceptance_after=None,
            acceptance_baseline=None,
            tokens_gained=None,
            served=True,
            reason="trained",
            seconds=(seconds := perf_counter() - started),
            waited=seconds,
            drafter_version=self.drafter.version,
            head_version=self.head.version,
        )
        return (step,)

    @override
    def reset_head(self) -> tuple[Updated, ...]:
        dropped = self._add_head_version(self.drafter.restart())
        self.head.reset()
        return dropped

    @override
    def wait(self) -> bool:
        return self.drafter.wait()

    @override
    def end(self) -> tuple[Updated, ...]:
        return self._add_head_version(self.drafter.finish())

    @override
    def state_dict(self) -> State:
        """Return the state; waits for an update that is being computed. Targets may share the drafter's scheduler."""
        return {"drafter": self.drafter, "head": self.head.state_dict()}

    @override
    def load_state_dict(self, state: State) -> None:
        self.drafter.load_state_dict(state["drafter"])
        self.head.load_state_dict(state["head"])


def read_weights(state: State) -> Weights:
    """Read the weights of the drafter and the head that were in service when the state of a `Distill` was saved."""
    trainer, head = state["drafter"]["trainer"], state["head"]
    return Weights(tuple(trainer["served"]), head["weights"], trainer["version"], head["version"])


def read_sums(state: State) -> LeastSquaresSums | None:
    """Read the sums of the state of a `Distill`; None if it learned by gradient."""
    trainer = state["drafter"]["trainer"]
    return LeastSquaresSums.from_state(trainer["sums"]) if "sums" in trainer else None
