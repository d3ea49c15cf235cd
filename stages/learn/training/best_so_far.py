"""The weights that an update is compared with in the long run: the best ones that are proven, at first the baseline."""

import math
from collections.abc import Iterable
from enum import Enum

from stages.contract.snapshot import State
from stages.learn.training.betting import BettingTest


class Opinion(Enum):
    """Conclusion from the evidence about the weights in service."""

    OPEN = "neither"
    BETTER = "better than the best so far"
    WORSE = "worse than the best so far"


class Comparison:
    """Compares the weights in service with the best so far, on held-out prompts that neither was chosen by.

    The gate compares an update with the one before on few prompts, and lets small losses pass; many of them would add
    up. Here every held-out prompt counts once, and the evidence is kept over all updates.
    """

    def __init__(self) -> None:
        self._better, self._worse = BettingTest(low=-1.0), BettingTest(low=-1.0)

    def observe(self, differences: Iterable[float]) -> Opinion:
        """Add differences of acceptance per prompt, in service less best so far. A decision begins afresh."""
        finite = [value for value in differences if math.isfinite(value)]  # a drafter may have logits that are not
        for difference in (max(-1.0, min(1.0, value)) for value in finite):
            self._better.observe(difference, 0.0)
            self._worse.observe(-difference, 0.0)
            if self._better.decisive or self._worse.decisive:
                opinion = Opinion.BETTER if self._better.decisive else Opinion.WORSE
                self.restart()
                return opinion
        return Opinion.OPEN

    def restart(self) -> None:
        """Forget the evidence: other weights are in service, or the text is of another kind."""
        self._better.restart()
        self._worse.restart()

    def state_dict(self) -> State:
        """Return the evidence that the weights in service are better, and that they are worse."""
        return {"better": self._better.state_dict(), "worse": self._worse.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state."""
        self._better.load_state_dict(state["better"])
        self._worse.load_state_dict(state["worse"])
