"""Evidence from bets: tests that may be read after every observation, however long they run.

Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024. The tests decide which
of two sets of weights is better.
"""

import math
from collections.abc import Iterable
from enum import Enum

from stages.contract.snapshot import State

DECISIVE = 20.0  # evidence that is acted upon: under the hypothesis it is ever reached with a chance below 1/20
FRACTIONS = (0.1, 0.3, 0.6, 0.9)  # stakes, as shares of the largest stake that cannot lose everything


class BettingTest:
    """An e-process against the hypothesis that values are on average no larger than their thresholds.

    A gambler bets on every value that it exceeds its threshold, at odds that are fair under the hypothesis. The wealth
    is the evidence: its expectation stays at most 1 under the hypothesis, so that the chance to ever reach 20 is below
    1/20 (Ville's inequality), whenever one looks. The wealth is divided among four stakes, and among bets that begin
    with the first value, the second and so on; one that begins later has lost nothing on the values before, so a
    change is detected after a long past too.

    Ten values of 0.5 where 0.1 is the threshold:

    >>> test = BettingTest(low=0.0)
    >>> for _ in range(10):
    ...     test.observe(0.5, threshold=0.1)
    >>> test.evidence > DECISIVE
    True
    """

    def __init__(self, low: float) -> None:
        self._low = low
        self.restart()

    def restart(self) -> None:
        """Forget all values, as if there had been none."""
        self._wealth: tuple[float, ...] = (0.0,) * len(FRACTIONS)
        self._count = 0

    def observe(self, value: float, threshold: float) -> None:
        """Add a value. Its threshold may depend on earlier values only, and is above the smallest possible value."""
        if not self._low <= value or not self._low < threshold:
            raise ValueError(f"value and threshold must be above {self._low}, got {value} and {threshold}")
        self._count += 1
        joining = 1 / (self._count * (self._count + 1))  # the sum over all counts is 1
        win = (value - threshold) / (threshold - self._low)
        self._wealth = tuple(
            min(1e100, (wealth + joining) * (1 + fraction * win))
            for wealth, fraction in zip(self._wealth, FRACTIONS, strict=True)
        )

    @property
    def evidence(self) -> float:
        """The wealth of all bets, 1 before the first value."""
        return sum(self._wealth) / len(FRACTIONS) + 1 / (self._count + 1)

    @property
    def decisive(self) -> bool:
        return self.evidence > DECISIVE

    def state_dict(self) -> State:
        return {"wealth": self._wealth, "count": self._count}

    def load_state_dict(self, state: State) -> None:
        self._wealth, self._count = tuple(state["wealth"]), state["count"]


RATES = (0.1, 0.2, 0.4, 0.8)  # of the exponents of a `SumTest`: each is best for differences of about its size


class SumTest:
    """An e-process against the hypothesis that differences of -1 to 1, given all before them, have no positive mean.

    It needs no more than the sum and the number of the differences: for each rate r, exp(r sum - r^2 number / 2) is at
    most 1 on average under the hypothesis (Hoeffding's lemma; Howard, Ramdas, McAuliffe and Sekhon, "Time-uniform
    Chernoff bounds via nonnegative supermartingales", 2020), and so is the mean over the rates.

    Four prompts of 40 tokens, on each of which one drafter is right at ten tokens more than the other:

    >>> test = SumTest()
    >>> for _ in range(4):
    ...     test.observe(10.0, 40)
    >>> test.decisive
    True
    """

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def observe(self, total: float, count: int) -> None:
        """Add some differences: their sum and their number."""
        if not abs(total) <= count:
            raise ValueError(f"the sum of {count} differences must be from -{count} to {count}, got {total}")
        self._sum += total
        self._count += count

    @property
    def evidence(self) -> float:
        """The mean wealth; 1 before the first difference."""
        exponents = [rate * self._sum - rate**2 * self._count / 2 for rate in RATES]
        return sum(math.exp(min(200.0, exponent)) for exponent in exponents) / len(RATES)

    @property
    def decisive(self) -> bool:
        return self.evidence > DECISIVE

    def state_dict(self) -> State:
        return {"sum": self._sum, "count": self._count}

    def load_state_dict(self, state: State) -> None:
        self._sum, self._count = state["sum"], state["count"]


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
        return {"better": self._better.state_dict(), "worse": self._worse.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self._better.load_state_dict(state["better"])
        self._worse.load_state_dict(state["worse"])
