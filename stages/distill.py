"""Distill: finished prompts to a better drafter and a better head (paper, algorithms 2 to 4).

Drafter updates are made on a copy and gated: what would lower the expected acceptance on recent prompts that it was not
trained on is never served.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from stages.blocks import Lesson
from stages.drafter_trainer import DrafterTrainer
from stages.head_trainer import HeadTrainer
from stages.stage import WithoutRows
from store.events import Updated


@dataclass(frozen=True)
class Schedule:
    """When to learn.

    Attributes:
        interval: prompts between drafter updates (the paper's I).
        interleaved: train the head on the prompts in between as well (algorithm 4), not only with the drafter
            (algorithm 3).
        gate_every: each such lesson is held out for the gate.
    """

    interval: int
    interleaved: bool
    gate_every: int


class Distill(WithoutRows):
    """Lessons to updates. The lesson that completes an interval carries the update.

    Args:
        drafter: trains and serves the drafter's weights.
        head: trains the acceptance head.
        schedule: when.
    """

    def __init__(self, drafter: DrafterTrainer, head: HeadTrainer, schedule: Schedule) -> None:
        self.drafter, self.head, self._schedule = drafter, head, schedule
        self._fresh: deque[Lesson] = deque()
        self._seen = 0

    @property
    def drafter_version(self) -> int:
        """Updates served so far."""
        return self.drafter.version

    @property
    def head_version(self) -> int:
        """Steps and resets of the head so far."""
        return self.head.version

    def __call__(self, batch: Sequence[Lesson]) -> list[tuple[Updated, ...]]:
        """Learn from finished prompts, in stream order."""
        return [self._learn(lesson) for lesson in batch]

    def _learn(self, lesson: Lesson) -> tuple[Updated, ...]:
        self._seen += 1
        self.head.observe(lesson.labels)
        if self._seen % self._schedule.gate_every == 0:
            self.drafter.hold_out(lesson)
        else:
            self._fresh.append(lesson)
        if self._seen % self._schedule.interval == 0 and self._fresh:
            fresh, self._fresh = list(self._fresh), deque()
            return (self._drafter_step(fresh), *self._head_step(lesson.offset))
        return self._head_step(lesson.offset) if self._schedule.interleaved else ()

    def _drafter_step(self, fresh: Sequence[Lesson]) -> Updated:
        started = perf_counter()
        step = self.drafter.update(fresh)
        return Updated(
            offset=fresh[-1].offset,
            part="drafter",
            loss_name=self.drafter.loss_name,
            loss=step.loss,
            positions=step.positions,
            acceptance_before=step.before,
            acceptance_after=step.after,
            served=step.served,
            reason=step.reason,
            seconds=perf_counter() - started,
            drafter_version=self.drafter.version,
            head_version=self.head.version,
        )

    def _head_step(self, offset: int) -> tuple[Updated, ...]:
        started = perf_counter()
        loss = self.head.update()
        if loss is None:
            return ()
        step = Updated(
            offset=offset,
            part="head",
            loss_name="cross-entropy",
            loss=loss,
            positions=self.head.batch,
            acceptance_before=None,
            acceptance_after=None,
            served=True,
            reason="trained",
            seconds=perf_counter() - started,
            drafter_version=self.drafter.version,
            head_version=self.head.version,
        )
        return (step,)

    def reset_head(self) -> None:
        """After a drift: begin the head anew and forget its labels."""
        self.head.reset()


class NoDistill(WithoutRows):
    """Learn nothing: the frozen drafter."""

    drafter_version = 0
    head_version = 0

    def __call__(self, batch: Sequence[Lesson]) -> list[tuple[Updated, ...]]:
        """No update for any lesson."""
        return [() for _ in batch]

    def reset_head(self) -> None:
        """There is nothing that adapts."""
