"""Intervals, in prompts, between updates of the drafter."""

from typing_extensions import override

from stages.contract.snapshot import State
from stages.learn.training.update import Step

LONGEST_INTERVAL = 64  # prompts: what an update could gain is forgotten by a stream that changes
HORIZON = 1000  # prompts: a longer benefit is not counted on
EXPLORED = 0.02  # largest share of the target passes that updates may cost while they gain nothing
UNPROVEN = 0.25  # the same after the first one, until one gains: a large drafter's first ones took a third of the time
USELESS = 2  # updates in a row after which they gain nothing: the first one on a new text has few examples


class UpdateInterval:
    """Decides on the number of prompts between two updates: here a constant one (the paper's I). Called by the learner
    only, in stream order.
    """

    is_exploring = False  # whether updates gain nothing: then some prompts are enough

    def __init__(self, interval: int) -> None:
        self.interval = interval  # prompts between the last update and the next

    def is_due(self, tokens: int, prompts: int, *, free: bool = False) -> bool:
        """Return whether an update is due so many emitted tokens and completed prompts after the last one. `free`: it
        would cost nothing now.
        """
        return prompts >= self.interval

    def observe_update(self, step: Step, tokens: int, prompts: int) -> None:
        """Adjust the interval after an update, given the prompts completed since the previous one, and the tokens
        emitted in blocks without a copied draft.
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
    many prompts as are left, or as there were so far since the last drift, whichever are more, at most `horizon`. Of a
    stream of unknown length only the latter count: a short one must not pay for a long one. Tokens of blocks whose
    draft was copied do not count: there the model drafts little, however good it becomes.

    Until an update gains, the next one waits until the last one took at most `UNPROVEN` of the time, and where updates
    gain nothing, `EXPLORED`; after a drift, and at the beginning, the first one waits for nothing.

    The gain is that of the acceptance at every token that the target emits, whatever drafted it. If the drafter's own
    drafts counted, one of low acceptance would hardly be used, so hardly be trained, and would stay low.

    Args:
        piece_cost: cost of one piece in one gradient step, in target passes.
        batch: prompts that share a target pass.
        longest: the longest interval; one below the shortest counts as that.
        horizon: maximum number of prompts over which an update's benefit is counted.
        prompts: of the whole stream, as far as is known.
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
        prompts: int = 0,
    ) -> None:
        super().__init__(interval)
        self._shortest, self._longest, self._horizon = interval, max(interval, longest), horizon
        self._steps, self._piece_cost, self._batch = steps, piece_cost, batch
        self._gain: float | None = None
        self._seen, self._left = 0, prompts  # prompts up to the last update, and after it
        self._spent = 0.0  # by the last update
        self._useless = 0  # updates in a row that gained nothing

    @property
    def is_exploring(self) -> bool:  # type: ignore[override]
        return self._useless >= USELESS

    @override
    def is_due(self, tokens: int, prompts: int, *, free: bool = False) -> bool:
        if free:
            return prompts >= self._shortest
        proven = self._gain is not None and not self._useless
        share = EXPLORED if self.is_exploring else UNPROVEN
        return (proven or self._spent <= share * tokens / self._batch) and super().is_due(tokens, prompts)

    @override
    def observe_update(self, step: Step, tokens: int, prompts: int) -> None:
        """Compare the smoothed savings of an update with its cost. Without a measured gain the interval stays."""
        self._seen, self._left = self._seen + prompts, self._left - prompts
        self._spent = step.pieces * self._steps * self._piece_cost
        gain = 0.0
        if step.served:
            if step.before is None or step.after is None:
                return
            gain = step.after - step.before
        self._useless = 0 if gain > 0 else self._useless + 1
        self._gain = gain if self._gain is None else self._gain + self.SMOOTHING * (gain - self._gain)
        saved = self._gain * min(self._horizon, max(self._seen, self._left)) * tokens / prompts / self._batch
        wider = min(self._longest, 2 * self.interval)
        self.interval = max(self._shortest, self.interval // 2) if saved > self._spent else wider

    @override
    def restart(self) -> None:
        self.interval, self._gain, self._spent, self._seen, self._useless = self._shortest, None, 0.0, 0, 0

    @override
    def state_dict(self) -> State:
        counts = (self._seen, self._left, self._useless)
        return {"interval": self.interval, "gain": self._gain, "spent": self._spent, "counts": counts}

    @override
    def load_state_dict(self, state: State) -> None:
        self.interval, self._gain, self._spent = state["interval"], state["gain"], state["spent"]
        self._seen, self._left, self._useless = state["counts"]
