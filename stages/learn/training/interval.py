"""Intervals, in prompts, between updates of the drafter."""

from typing_extensions import override

from stages.contract.snapshot import State
from stages.learn.training.betting import UsageTest
from stages.learn.training.update import Step

LONGEST_INTERVAL = 64  # prompts: what an update could gain is forgotten by a stream that changes
HORIZON = 1000  # prompts: a longer benefit is not counted on
REPLAYED = 2  # pieces that an update reads per piece of its new examples: it takes as many old ones
# Share of the rejected tokens that an update is hoped to turn into accepted ones. With a drafter that knew nothing of
# its target, seven updates raised .19 to .40, so each won .04 of them; with one distilled from it, they won nothing.
# So it is halved where updates gain nothing.
HOPED_GAIN = 0.05
# Where rejected tokens are rare an update is an exploration. At once the longest interval it took a tenth of the time
# of the fastest real target (SmolLM2 in four bits, benchmarks/notes/learning.md).
TO_EXPLORE = 4
# Largest cost of an exploration, as a share of the target passes of plain decoding since the last update: at 256
# prompts of 40 tokens it would still take 2% of the fastest target's time.
EXPLORED = 0.01


class UpdateInterval:
    """Decides on the number of prompts between two updates: here a constant one (the paper's I). Called by the learner
    only, in stream order.
    """

    is_exploring = False  # whether updates are far apart because they can gain little: then some prompts are enough

    def __init__(self, interval: int) -> None:
        self.interval = interval  # prompts between the last update and the next

    def is_due(self, prompts: int) -> bool:
        """Return whether an update is due so many prompts after the last one."""
        return prompts >= self.interval

    def observe_prompt(self, rejected: float, tokens: int, pieces: int) -> None:
        """Adjust the interval to the number of rejected tokens of the drafter's drafts in a completed prompt, given
        the tokens of its completion and the pieces of its whole text, which an update reads.
        """

    def observe_update(self, step: Step, judged: int, prompts: int) -> None:
        """Adjust the interval after an update, given the proposed tokens judged since the previous one and the prompts
        completed since.
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
    accepted token saves one pass of the batch. An update that raises the expected acceptance by g saves g passes per
    judged token during the horizon: as many prompts as there were so far, at most `horizon`. The rest
    of a stream is of unknown length, and a short one must not pay for a long one; after a drift, the new text counts as
    a new stream.

    A drafter that is rarely used gains little by any update, and so does one whose drafts are mostly accepted. Bets on
    its rejected tokens (`UsageTest`) decide whether they are rare: so few that even if every update turned a hoped
    share of them into accepted ones, it would not repay itself. Then the interval is `TO_EXPLORE` times the longest,
    through drifts too, until there are more, and doubles with each such update that is not served; it is longer where
    the update would take more than `EXPLORED` of the time. Where other sources draft too, it begins so, and returns to
    it after an update that leaves the smoothed gain at nothing: then half the share is hoped for, at first
    `HOPED_GAIN`, and more rejected tokens are needed.

    Args:
        piece_cost: cost of one piece in one gradient step, in target passes.
        batch: prompts that share a target pass.
        longest: the longest interval while rejected tokens are not rare; one below the shortest counts as that.
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
        others_draft: bool = False,
        longest: int = LONGEST_INTERVAL,
        horizon: int = HORIZON,
    ) -> None:
        self._shortest, self._longest = interval, max(interval, longest)
        self.interval = TO_EXPLORE * self._longest if others_draft else self._shortest
        self._steps, self._horizon, self._piece_cost, self._batch = steps, horizon, piece_cost, batch
        self._gain: float | None = None
        self._seen = self._prompts = 0  # prompts: up to the last update, and all
        self._usage, self._hoped, self._others_draft = UsageTest(rare=others_draft), HOPED_GAIN, others_draft
        self._since = (0, 0, 0)  # prompts, tokens and pieces since the last update

    @property
    def is_exploring(self) -> bool:  # type: ignore[override]
        return self._usage.rare

    @override
    def observe_prompt(self, rejected: float, tokens: int, pieces: int) -> None:
        self._prompts += 1
        prompts_before, tokens_before, pieces_before = self._since
        self._since = prompts_before + 1, tokens_before + tokens, pieces_before + pieces
        spent = self._foresee_cost(pieces)
        saved = self._hoped * min(self._horizon, self._prompts) * max(1, tokens) / self._batch  # if all were rejected
        if self._usage.observe(rejected, tokens, spent / saved):
            self.interval = TO_EXPLORE * self._longest if self._usage.rare else self._shortest

    def _foresee_cost(self, pieces: float) -> float:
        """Return what an update costs where prompts have this many pieces, in target passes."""
        return self._shortest * REPLAYED * pieces * self._steps * self._piece_cost

    @override
    def is_due(self, prompts: int) -> bool:
        """Return whether an update is due; one that may gain nothing must be a small share of the passes since the last
        one, too.
        """
        if not super().is_due(prompts):
            return False
        observed, tokens, pieces = self._since
        if not self._usage.rare or not observed:
            return True
        return self._foresee_cost(pieces / observed) <= EXPLORED * tokens / self._batch

    @override
    def observe_update(self, step: Step, judged: int, prompts: int) -> None:
        """Compare the smoothed savings of an update with its cost. Without a measured gain no interval changes."""
        self._seen += prompts
        self._since = (0, 0, 0)
        if step.before is None or step.after is None:
            return
        gain = step.after - step.before if step.served else 0.0
        self._gain = gain if self._gain is None else self._gain + self.SMOOTHING * (gain - self._gain)
        if self._usage.rare:
            self.interval *= 1 if step.served else 2
            return
        if self._others_draft and self._gain <= 0:
            self._hoped /= 2
            self._usage.take_as_rare()
            self.interval = TO_EXPLORE * self._longest
            return
        horizon = min(self._horizon, self._seen)
        saved = self._gain * horizon * judged / prompts / self._batch
        spent = step.pieces * self._steps * self._piece_cost
        wider = min(self._longest, 2 * self.interval)
        self.interval = max(self._shortest, self.interval // 2) if saved > spent else wider

    @override
    def restart(self) -> None:
        """Return to the shortest interval unless the drafter is rarely used, and forget gains, hopes and the prompts so
        far.
        """
        self.interval = TO_EXPLORE * self._longest if self._usage.rare else self._shortest
        self._gain, self._hoped, self._seen, self._prompts = None, HOPED_GAIN, 0, 0
        self._usage.restart()

    @override
    def state_dict(self) -> State:
        return {
            "interval": self.interval,
            "gain": self._gain,
            "hoped": self._hoped,
            "usage": self._usage.state_dict(),
            "prompts": self._prompts,
            "seen": self._seen,
            "since": self._since,
        }

    @override
    def load_state_dict(self, state: State) -> None:
        self.interval, self._gain, self._hoped = state["interval"], state["gain"], state["hoped"]
        self._prompts, self._seen, self._since = state["prompts"], state["seen"], tuple(state["since"])
        self._usage.load_state_dict(state["usage"])
