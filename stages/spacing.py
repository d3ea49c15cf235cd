"""How many prompts lie between two updates of the drafter."""

from typing import Protocol

from stages.snapshot import Json
from stages.training import Step


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

    def save(self) -> Json:
        """See `stages.snapshot`."""
        ...

    def restore(self, saved: Json) -> None:
        """See `stages.snapshot`."""
        ...


class FixedSpacing:
    """Always the same interval (the paper's I)."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def after(self, step: Step, judged: int, prompts: int) -> None:
        """Nothing changes."""

    def restart(self) -> None:
        """Nothing changes."""

    def save(self) -> Json:
        """Nothing to keep."""
        return None

    def restore(self, saved: Json) -> None:
        """Nothing was kept."""


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

    def save(self) -> Json:
        """See `stages.snapshot`."""
        return [self.interval, self._gain]

    def restore(self, saved: Json) -> None:
        """See `stages.snapshot`."""
        self.interval, self._gain = saved
