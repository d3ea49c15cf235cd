"""Distill: finished prompts of one target to a better drafter and a better head (paper, algorithms 2 to 4).

Drafter updates are made on a copy and gated: what would lower the expected acceptance on recent prompts that it was not
trained on is never served.
"""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from stages.blocks import Lesson
from stages.head_trainer import HeadTrainer
from stages.learner import DrafterLearner
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from stages.stage import WithoutRows
from stages.weights import Weights
from store.events import Updated


class Distill(WithoutRows):
    """Lessons to updates. A lesson carries the update that is adopted with it: the one that completes an interval, or
    a fixed number of lessons later.

    Args:
        drafter: learns the drafter's weights, possibly from lessons of other targets as well.
        head: trains this target's acceptance head.
        interleaved: train the head also on the prompts between drafter updates (algorithm 4), not only with them
            (algorithm 3).
    """

    def __init__(self, drafter: DrafterLearner, head: HeadTrainer, *, interleaved: bool) -> None:
        self.drafter, self.head, self._interleaved = drafter, head, interleaved

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
        self.head.observe(lesson.labels)
        updated = self._beside_head(self.drafter.learn(replace(lesson, labels=())))  # the rest holds no tensors
        return (*updated, *self._head_step(lesson)) if updated or self._interleaved else ()

    def _beside_head(self, updated: Updated | None) -> tuple[Updated, ...]:
        return (replace(updated, head_version=self.head.version),) if updated else ()

    def _head_step(self, lesson: Lesson) -> tuple[Updated, ...]:
        started = perf_counter()
        loss = self.head.update()
        if loss is None:
            return ()
        step = Updated(
            offset=lesson.offset,
            target=lesson.target,
            part="head",
            loss_name="cross-entropy",
            loss=loss,
            positions=self.head.batch,
            acceptance_before=None,
            acceptance_after=None,
            acceptance_floor=None,
            tokens_gained=None,
            served=True,
            reason="trained",
            seconds=(seconds := perf_counter() - started),
            waited=seconds,
            drafter_version=self.drafter.version,
            head_version=self.head.version,
        )
        return (step,)

    def restart(self) -> tuple[Updated, ...]:
        """After a drift: begin the head anew, forget its labels, and learn at the shortest interval again.

        Returns an update that was under way and is dropped.
        """
        dropped = self._beside_head(self.drafter.restart())
        self.head.reset()
        return dropped

    def wait(self) -> bool:
        """Wait until nothing is computed beside decoding, and say whether anything was. Nothing is adopted."""
        return self.drafter.wait()

    def end(self) -> tuple[Updated, ...]:
        """Behind the last lesson: wait for an update that is under way and adopt it. May be called again."""
        return self._beside_head(self.drafter.finish())

    @property
    def busy(self) -> bool:
        """Whether an update is being computed beside decoding."""
        return self.drafter.busy

    def save(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`. Waits for an update that is being computed."""
        return {"drafter": keep.once(self.drafter, lambda: self.drafter.save(keep)), "head": self.head.save(keep)}

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        kept.once(saved["drafter"], lambda value: self.drafter.restore(value, kept))
        self.head.restore(saved["head"], kept)


def weights_in(saved: Json, kept: SnapshotReader) -> Weights:
    """The drafter and the head that a `Distill` had in service when it was saved."""
    learner: list[Json] = []
    kept.once(saved["drafter"], learner.append)
    trainer, head = learner[0]["trainer"], saved["head"]
    return Weights(
        tuple(kept.tensor(number) for number in trainer["present"]),
        {name: kept.tensor(number) for name, number in head["weights"].items()},
        trainer["version"],
        head["version"],
    )


class NoDistill(WithoutRows):
    """Learn nothing: the frozen drafter."""

    drafter_version = 0
    head_version = 0
    busy = False

    def __call__(self, batch: Sequence[Lesson]) -> list[tuple[Updated, ...]]:
        """No update for any lesson."""
        return [() for _ in batch]

    def restart(self) -> tuple[Updated, ...]:
        """There is nothing that adapts."""
        return ()

    def wait(self) -> bool:
        """There is nothing under way."""
        return False

    def end(self) -> tuple[Updated, ...]:
        """There is nothing under way."""
        return ()

    def save(self, keep: SnapshotWriter) -> Json:
        """Nothing to keep."""
        return None

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """Nothing was kept."""
