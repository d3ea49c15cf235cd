"""Whether enough of the drafter's drafts are rejected for its training to pay."""

from stages.contract.blocks import SoftTarget, TrainingExample
from stages.contract.snapshot import State
from stages.learn.training.betting import BettingTest

# Largest thresholds: a drafter with more rejected tokens is trained whatever it costs. The higher one is to begin with:
# the shipped drafter has .23 in the first four prompts of the default run, where every source is tried, then .14.
LARGEST_TO_BEGIN, LARGEST_TO_END = 0.4, 0.25
SMALLEST_SHARE = 0.001  # where training costs nothing


class UsageTest:
    """Decides whether training can gain little, by bets on rejected tokens of the drafter's drafts per emitted token.

    Few are rejected where the drafter is rarely used, and where it is good. While they are taken to be many, the bets
    are that their share is below the one at which training breaks even; while they are taken to be rare, that it is
    above. Evidence of 20 changes the decision and begins afresh, so each decision is wrong with a chance below 1/20.

    Args:
        rare: what is taken to be true before there is evidence.
    """

    def __init__(self, *, rare: bool) -> None:
        self.rare = rare  # whether rejected tokens are rare
        self.restart()

    def observe(self, rejected: float, tokens: int, break_even: float) -> bool:
        """Add a completed prompt. Returns whether the decision changed.

        Args:
            rejected: number of tokens of the drafter's drafts that were judged and rejected.
            tokens: tokens of the completion; with none nothing is learned.
            break_even: share of the tokens at which training breaks even, known before the prompt.
        """
        if not tokens:
            return False
        largest = LARGEST_TO_BEGIN if self.rare else LARGEST_TO_END
        share, threshold = min(1.0, rejected / tokens), min(largest, max(SMALLEST_SHARE, break_even))
        sign = 1.0 if self.rare else -1.0
        self._test.observe(sign * share, sign * threshold)
        if not self._test.decisive:
            return False
        self.rare = not self.rare
        self.restart()
        return True

    def take_as_rare(self) -> None:
        """Take rejected tokens to be rare, until there is new evidence."""
        self.rare = True
        self.restart()

    def restart(self) -> None:
        """Forget the evidence, not the decision."""
        self._test = BettingTest(low=0.0 if self.rare else -1.0)

    def state_dict(self) -> State:
        """Return the state for a checkpoint."""
        return {"rare": self.rare, "test": self._test.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state."""
        self.rare = state["rare"]
        self.restart()
        self._test.load_state_dict(state["test"])


def count_tokens(example: TrainingExample) -> int:
    """Count the tokens of a completion that have soft targets."""
    return sum(
        int(one.depth == 0) if isinstance(one, SoftTarget) else len(one.positions) for one in example.soft_targets
    )
