"""Whether the drafter is used enough for its training to pay."""

from dataclasses import dataclass

from stages.contract.blocks import SoftTarget, TrainingExample
from stages.contract.snapshot import Saved, SnapshotReader
from stages.training.betting import BettingState, BettingTest

LARGEST_SHARE = 0.25  # a drafter that is used more than this is always trained
SMALLEST_SHARE = 0.001  # where training costs nothing


@dataclass(frozen=True)
class UsageState:
    """Saved state of a `UsageTest`."""

    rare: bool
    evidence: BettingState


class UsageTest:
    """Decides whether the drafter is rarely used, by bets on the share of a prompt's tokens that its drafts judge.

    While it is taken to be used, the bets are that the share is below the one at which training breaks even; while it
    is taken to be rarely used, that it is above. Evidence of 20 changes the decision and begins afresh, so each
    decision is wrong with a chance below 1/20.

    Args:
        rare: what is taken to be true before there is evidence.

    Attributes:
        rare: whether the drafter is rarely used.
    """

    def __init__(self, *, rare: bool) -> None:
        self.rare = rare
        self.restart()

    def observe(self, judged: int, tokens: int, break_even: float) -> bool:
        """Add a completed prompt. Returns whether the decision changed.

        Args:
            judged: tokens of the drafter's drafts that were judged.
            tokens: tokens of the completion; with none nothing is learned.
            break_even: share of the tokens at which training breaks even, known before the prompt.
        """
        if not tokens:
            return False
        share, threshold = min(1.0, judged / tokens), min(LARGEST_SHARE, max(SMALLEST_SHARE, break_even))
        sign = 1.0 if self.rare else -1.0
        self._test.observe(sign * share, sign * threshold)
        if not self._test.decisive:
            return False
        self.rare = not self.rare
        self.restart()
        return True

    def restart(self) -> None:
        """Forget the evidence, not the decision."""
        self._test = BettingTest(low=0.0 if self.rare else -1.0)

    def save(self) -> UsageState:
        """Return the state to save."""
        return UsageState(self.rare, self._test.save())

    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        """Restore the state that `save` returned."""
        state = reader.decode(UsageState, saved)
        self.rare = state.rare
        self.restart()
        self._test.restore(state.evidence, reader)


def count_tokens(example: TrainingExample) -> int:
    """Count the tokens of a completion that have soft targets."""
    return sum(
        int(one.depth == 0) if isinstance(one, SoftTarget) else len(one.positions) for one in example.soft_targets
    )
