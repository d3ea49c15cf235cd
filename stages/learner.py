"""When the drafter is updated: lessons are gathered, some held out, and an update is made every so many prompts.

The spacing decides how many. An update costs time, and what it brings comes with the prompts after it: the paying
spacing waits longer after updates that will not repay themselves, and returns to the shortest interval after a drift.

An update may be computed beside decoding. It is then adopted with a lesson that is fixed when it is handed in, however
soon it is done, so that equal seeds make equal decisions whatever else the machine does.

One learner belongs to one set of weights: targets that share the drafter's weights share it; adapters have one each.
"""

from collections import Counter
from concurrent.futures import Future, wait
from dataclasses import dataclass
from time import perf_counter

from stages.blocks import Lesson
from stages.drafter_trainer import DrafterTrainer
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from stages.spacing import Spacing
from stages.training import Assignment, Attempt, Step
from stages.worker import Worker
from store.events import Updated


@dataclass
class _Pending:
    """An update that was handed to the worker.

    Attributes:
        result: the attempt and the seconds that it took.
        last: the newest lesson that it learns from.
        judged, prompts: since the update before.
        lessons_left: which of the coming lessons adopts it.
        waited: seconds for which the loop stood still for it.
    """

    result: Future[tuple[Attempt, float]]
    last: Lesson
    judged: int
    prompts: int
    lessons_left: int
    waited: float


class DrafterLearner:
    """Lessons to drafter updates, of which at most one is under way.

    Args:
        trainer: trains and serves the weights.
        spacing: when.
        gate_every: each such lesson of a target is held out for the gate.
        most: fresh lessons of an update, the newest; those before them only enter the sample that is kept against
            forgetting. So an update after a longer interval costs no more.
        lag: lessons from the one that completes an interval to the one that adopts the update; 0: the same lesson.
        worker: computes it.
    """

    def __init__(
        self, trainer: DrafterTrainer, spacing: Spacing, gate_every: int, most: int, lag: int, worker: Worker
    ) -> None:
        self.trainer, self._spacing, self._gate_every, self._most = trainer, spacing, gate_every, most
        self._lag, self._worker = lag, worker
        self._fresh: list[Lesson] = []
        self._seen: Counter[str] = Counter()  # by target: of prompts dealt in turn, every so many belong to one
        self._prompts = self._judged = 0
        self._pending: _Pending | None = None

    @property
    def version(self) -> int:
        """Changes of the served weights so far."""
        return self.trainer.version

    def learn(self, lesson: Lesson) -> Updated | None:
        """Adopt an update whose time has come, then keep the lesson; the one that completes the interval hands in.

        Raises:
            Exception: whatever the update raised, where it would have been adopted.
        """
        updated = self._adopt_due()
        self._keep(lesson)
        if self._pending is None and self._fresh and self._prompts >= self._spacing.interval:
            self._hand_in()
            updated = updated if self._lag else self.finish()
        return updated

    def _adopt_due(self) -> Updated | None:
        if self._pending is None:
            return None
        self._pending.lessons_left -= 1
        return None if self._pending.lessons_left else self.finish()

    def _keep(self, lesson: Lesson) -> None:
        self._seen[lesson.target] += 1
        self._prompts += 1
        self._judged += lesson.judged
        if self._seen[lesson.target] % self._gate_every == 0:
            self.trainer.hold_out(lesson)
        else:
            self._fresh.append(lesson)

    def _hand_in(self) -> None:
        started, fresh = perf_counter(), self._fresh
        for passed_over in fresh[: -self._most]:
            self.trainer.keep(passed_over)
        assignment = self.trainer.assign(fresh[-self._most :])
        result = self._worker.submit(lambda: _timed(self.trainer, assignment))
        waited = perf_counter() - started
        self._pending = _Pending(result, fresh[-1], self._judged, self._prompts, self._lag, waited)
        self._fresh, self._prompts, self._judged = [], 0, 0

    def wait(self) -> bool:
        """Wait until nothing is under way, and leave it to be adopted where it is due. Says whether anything was."""
        if self._pending:
            wait([self._pending.result])
        return self._pending is not None

    def finish(self) -> Updated | None:
        """Wait for an update that is under way and adopt it. None if there is none. Raises as `learn`."""
        if self._pending is None:
            return None
        attempt, seconds, pending = self._collect(self._pending)
        started = perf_counter()
        step = self.trainer.settle(attempt)
        self._spacing.after(step, pending.judged, pending.prompts)
        settling = perf_counter() - started
        pending.waited += settling
        return self._told(step, pending, seconds + settling)

    def restart(self) -> Updated | None:
        """After a drift: learn at once again. An update that is under way learned of what was, and is dropped.

        Raises as `learn`.
        """
        dropped = None
        if self._pending:
            attempt, seconds, pending = self._collect(self._pending)
            step = self.trainer.drop(attempt, "a drift was noticed while it was under way")
            dropped = self._told(step, pending, seconds)
        self._spacing.restart()
        return dropped

    @property
    def busy(self) -> bool:
        """Whether an update is being computed."""
        return self._pending is not None and not self._pending.result.done()

    def save(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`. Waits for an update that is being computed."""
        self.wait()
        return {
            "trainer": self.trainer.save(keep),
            "spacing": self._spacing.save(),
            "fresh": [keep.lesson(lesson) for lesson in self._fresh],
            "seen": dict(self._seen),
            "counts": [self._prompts, self._judged],
            "pending": self._pending and self._save_pending(self._pending, keep),
        }

    def _save_pending(self, pending: _Pending, keep: SnapshotWriter) -> Json:
        attempt, seconds = pending.result.result()
        return {
            "attempt": self.trainer.save_attempt(attempt, keep),
            "seconds": seconds,
            "last": keep.lesson(pending.last),
            "counts": [pending.judged, pending.prompts, pending.lessons_left, pending.waited],
        }

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        self.trainer.restore(saved["trainer"], kept)
        self._spacing.restore(saved["spacing"])
        self._fresh = [kept.lesson(number) for number in saved["fresh"]]
        self._seen = Counter(saved["seen"])
        self._prompts, self._judged = saved["counts"]
        self._pending = self._restored_pending(saved["pending"], kept) if saved["pending"] else None

    def _restored_pending(self, saved: Json, kept: SnapshotReader) -> _Pending:
        done: Future[tuple[Attempt, float]] = Future()
        done.set_result((self.trainer.restored_attempt(saved["attempt"], kept), saved["seconds"]))
        return _Pending(done, kept.lesson(saved["last"]), *saved["counts"])

    def _collect(self, pending: _Pending) -> tuple[Attempt, float, _Pending]:
        started, self._pending = perf_counter(), None
        attempt, seconds = pending.result.result()
        pending.waited += perf_counter() - started
        return attempt, seconds, pending

    def _told(self, step: Step, pending: _Pending, seconds: float) -> Updated:
        gained = None if step.before is None or step.floor is None else (step.before - step.floor) * pending.judged
        return Updated(
            offset=pending.last.offset,
            target=pending.last.target,
            part="drafter",
            loss_name=self.trainer.loss_name,
            loss=step.loss,
            positions=step.positions,
            acceptance_before=step.before,
            acceptance_after=step.after,
            acceptance_floor=step.floor,
            tokens_gained=gained,
            served=step.served,
            reason=step.reason,
            seconds=seconds,
            waited=pending.waited,
            drafter_version=self.version,
            head_version=0,
        )


def _timed(trainer: DrafterTrainer, assignment: Assignment) -> tuple[Attempt, float]:
    started = perf_counter()
    return trainer.attempt(assignment), perf_counter() - started
