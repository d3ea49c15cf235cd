"""Intervals, in prompts, between updates of the drafter."""

from typing_extensions import override

from stages.contract.snapshot import State
from stages.learn.training.update import Step

LONGEST_INTERVAL = 64  # prompts: what an update could gain is forgotten by a stream that changes
HORIZON = 1000  # prompts: a longer benefit is not counted on


class UpdateInterval:
    """Decides on the number of prompts between two updates: here a constant one (the paper's I). Called by the learner
    only, in stream order.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval  # prompts between the last update and the next

    def is_due(self, prompts: int) -> bool:
        """Return whether an update is due so many prompts after the last one."""
        return prompts >= self.interval

    def observe_update(self, step: Step, tokens: int, prompts: int) -> None:
        """Adjust the interval after an update, given the tokens emitted and the prompts completed since the previous
        one.
        """

    def restart(self) -> None:
        """Forget the measured gains after a drift."""

    def state_dict(self) -> State:
        return None

    def load_state_dict(self, state: State) -> None:
        """Continue from a state."""


class BreakEvenInterval(UpdateInterval):
    """Doubles the interval while updates cost more than they save, halves it while they save more.

    Costs and savings are counted in target passes, estimated from sizes, so that equal seeds make equal decisions. An
    update that raises the expected acceptance by g saves g passes of the batch per emitted token during the horizon: as
    many prompts as there were so far, at most `horizon`. The rest of a stream is of unknown length, and a short one
    must not pay for a long one; after a drift, the new text counts as a new stream.

    What counts is the acceptance at every token that the target emits, whatever drafted it. If the drafter's own drafts
    counted, one of low acceptance would hardly be used, so hardly be trained, and would stay low.

    Args:
        piece_cost: cost of one piece in one gradient step, in target passes.
        batch: prompts that share a target pass.
        longest: the longest interval; one below the shortest counts as that.
        horizon: maximum number of prompts over which an update's benefit is counted.
    """

    SMOOTHING = 0.5  # weight of the newest gain: the gate's window is small, single gains are noisy

    def __init__(
        self,
        interval: int,
        steps: int,
        piece_cost: float,
        batch: int,
        *,
        longest: int = LONGEST_INTERVAL,
        horizon: int = HORIZON,
    ) -> None:
        super().__init__(interval)
        self._shortest, self._longest, self._horizon = interval, max(interval, longest), horizon
        self._steps, self._piece_cost, self._batch = steps, piece_cost, batch
        self._gain: float | None = None
        self._seen = 0  # prompts up to the last update

    @override
    def observe_update(self, step: Step, tokens: int, prompts: int) -> None:
        """Compare the smoothed savings of an update with its cost. Without a measured gain the interval stays."""
        self._seen += prompts
        if step.before is None or step.after is None:
            return
        gain = step.after - step.before if step.served else 0.0
        self._gain = gain if self._gain is None else self._gain + self.SMOOTHING * (gain - self._gain)
        saved = self._gain * min(self._horizon, self._seen) * tokens / prompts / self._batch
        spent = step.pieces * self._steps * self._piece_cost
        wider = min(self._longest, 2 * self.interval)
        self.interval = max(self._shortest, self.interval // 2) if saved > spent else wider

    @override
    def restart(self) -> None:
        self.interval, self._gain, self._seen = self._shortest, None, 0

    @override
    def state_dict(self) -> State:
        return {"interval": self.interval, "gain": self._gain, "seen": self._seen}

    @override
    def load_state_dict(self, state: State) -> None:
        self.interval, self._gain, self._seen = state["interval"], state["gain"], state["seen"]
