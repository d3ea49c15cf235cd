"""When the drafter is updated: lessons are gathered, some held out, and an update is made every so many prompts.

The spacing decides how many. An update costs time, and what it brings comes with the prompts after it: the paying
spacing waits longer after updates that will not repay themselves, and returns to the shortest interval after a drift.

One learner belongs to one set of weights: targets that share the drafter's weights share it; adapters have one each.
"""

from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

from stages.blocks import Lesson
from stages.drafter_trainer import DrafterTrainer, Step
from store.events import Updated


class Spacing(Protocol):
    """How many prompts lie between two updates. Asked and told by the learner alone, in stream order."""

    @property
    def interval(self) -> int:
        """Prompts between the last update and the next."""
        ...

    def after(self, step: Step, judged: int, prompts: int) -> None:
        """An update was made.

        Args:
            step: what came of it.
            judged: proposed tokens judged since the update before.
            prompts: completed since then.
        """
        ...

    def restart(self) -> None:
        """After a drift: what was learned about gains holds no longer."""
        ...


class FixedSpacing:
    """Always the same interval (the paper's I)."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def after(self, step: Step, judged: int, prompts: int) -> None:
        """Nothing changes."""

    def restart(self) -> None:
        """Nothing changes."""


class PayingSpacing:
    """Doubles the interval while updates do not repay themselves, halves it while they do.

    Everything is counted in target passes, estimated from sizes, so that equal seeds make equal decisions: an accepted
    token saves one pass of the batch. An update that raises the expected acceptance by g saves g passes per token
    judged, for as long as it is worth anything: the horizon.

    Args:
        shortest, longest: bounds of the interval, in prompts.
        piece_cost: target passes that one piece costs in one gradient step.
        steps: gradient steps of an update.
        horizon: prompts for which an update is taken to be worth something.
        batch: prompts that share a target pass.
    """

    SMOOTHING = 0.5  # weight of the newest gain: the gate's window is small, single gains are noisy

    def __init__(self, shortest: int, longest: int, piece_cost: float, steps: int, horizon: int, batch: int) -> None:
        self.interval, self._shortest, self._longest = shortest, shortest, longest
        self._piece_cost, self._steps, self._horizon, self._batch = piece_cost, steps, horizon, batch
        self._gain: float | None = None

    def after(self, step: Step, judged: int, prompts: int) -> None:
        """Compare what such updates bring with what they cost. Without a measured gain nothing changes."""
        if step.before is None or step.after is None:
            return
        gain = step.after - step.before if step.served else 0.0
        self._gain = gain if self._gain is None else self._gain + self.SMOOTHING * (gain - self._gain)
        saved = self._gain * self._horizon * judged / prompts / self._batch
        spent = step.pieces * self._steps * self._piece_cost
        self.interval = max(self._shortest, self.interval // 2) if saved > spent else self._wider()

    def _wider(self) -> int:
        return min(self._longest, 2 * self.interval)

    def restart(self) -> None:
        """The shortest interval, and no memory of gains."""
        self.interval, self._gain = self._shortest, None


class DrafterLearner:
    """Lessons to drafter updates.

    Args:
        trainer: trains and serves the weights.
        spacing: when.
        gate_every: each such lesson of a target is held out for the gate.
        most: fresh lessons of an update, the newest; those before them only enter the sample that is kept against
            forgetting. So an update after a longer interval costs no more.
    """

    def __init__(self, trainer: DrafterTrainer, spacing: Spacing, gate_every: int, most: int) -> None:
        self.trainer, self._spacing, self._gate_every, self._most = trainer, spacing, gate_every, most
        self._fresh: list[Lesson] = []
        self._seen: Counter[str] = Counter()  # by target: of prompts dealt in turn, every so many belong to one
        self._prompts = self._judged = 0

    @property
    def version(self) -> int:
        """Changes of the served weights so far."""
        return self.trainer.version

    def learn(self, lesson: Lesson) -> Updated | None:
        """Keep a lesson; the one that completes the interval brings an update."""
        self._seen[lesson.target] += 1
        self._prompts += 1
        self._judged += lesson.judged
        if self._seen[lesson.target] % self._gate_every == 0:
            self.trainer.hold_out(lesson)
        else:
            self._fresh.append(lesson)
        if self._prompts < self._spacing.interval or not self._fresh:
            return None
        return self._update(self._fresh)

    def _update(self, fresh: Sequence[Lesson]) -> Updated:
        started = perf_counter()
        for passed_over in fresh[: -self._most]:
            self.trainer.keep(passed_over)
        step = self.trainer.update(fresh[-self._most :])
        last, judged, prompts = fresh[-1], self._judged, self._prompts
        self._fresh, self._prompts, self._judged = [], 0, 0
        self._spacing.after(step, judged, prompts)
        gained = None if step.before is None or step.floor is None else (step.before - step.floor) * judged
        return Updated(
            offset=last.offset,
            target=last.target,
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
            seconds=perf_counter() - started,
            drafter_version=self.version,
            head_version=0,
        )

    def restart(self) -> None:
        """After a drift: learn at once again."""
        self._spacing.restart()
