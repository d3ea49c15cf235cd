"""Costs of the engine's passes by the number of tokens that they read, measured while the engine runs."""

from collections import deque
from statistics import median

from typing_extensions import override

from stages.drafting.costs import BlockTimes, CostModel, Curve, make_monotone

EXACT = 16  # up to this many tokens, each number has its own measurements; then numbers within an eighth share them
KEPT = 32  # measurements of a group, of which the median counts
LEAST = 4  # measurements before a group counts
FORGOTTEN = 2000  # passes after which a group that had none is forgotten, so that it is tried again
PRIOR_SLOPE = 0.03  # cost of one more token relative to a pass over one, where nothing is measured
PRIOR_DRAFTING = 0.05  # cost of a drafter pass relative to the target's over one token, until it is measured


def group_of(tokens: int) -> int:
    """Return the largest number of tokens of a number's group.

    >>> [group_of(tokens) for tokens in (1, 15, 16, 17, 18, 19, 100)]
    [1, 15, 16, 18, 18, 20, 104]
    """
    step = 1
    while tokens > EXACT * step:
        step *= 2
    return -(-tokens // step) * step


class PassCosts(CostModel):
    """The median seconds per group of passes, linear between groups; outside of what is measured, a nearly flat prior.

    >>> costs = PassCosts()
    >>> costs.verification_cost(1), round(costs.verification_cost(11), 2)
    (1.0, 1.3)
    >>> for _ in range(LEAST):
    ...     costs.observe(BlockTimes([0], 1, 0.0, 0.02))
    ...     costs.observe(BlockTimes([4], 5, 0.008, 0.03))
    >>> costs.verification_cost(1), round(costs.verification_cost(3), 3), costs.drafting_cost(1)
    (0.02, 0.025, 0.002)
    """

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}  # of the groups with enough measurements
        self._last: dict[int, int] = {}  # number of the last pass of each group
        self._drafting: deque[float] = deque(maxlen=KEPT)  # seconds of a drafter pass
        self._passes = 0
        self._curve: Curve = ((1, _prior(1)), (2, _prior(2)))
        self._drafting_cost: float | None = None  # None until it is measured

    @override
    def observe(self, block: BlockTimes) -> None:
        self._passes += 1
        if longest := max(block.lengths, default=0):
            self._drafting.append(block.drafting / longest)
        group = group_of(block.tokens)
        seconds = self._seconds.setdefault(group, deque(maxlen=KEPT))
        seconds.append(block.verifying)
        self._last[group] = self._passes
        if len(seconds) >= LEAST:
            self._medians[group] = median(seconds)
        for old in [old for old, last in self._last.items() if self._passes - last > FORGOTTEN]:
            del self._seconds[old], self._last[old]
            self._medians.pop(old, None)
        if self._medians:
            self._curve = _extend(make_monotone(sorted(self._medians.items())))
            if len(self._drafting) >= LEAST:
                self._drafting_cost = median(self._drafting)

    def is_measured(self, tokens: int) -> bool:
        """Return whether the cost of a pass over this many tokens is known."""
        return group_of(tokens) in self._medians

    @override
    def verification_curve(self) -> tuple[Curve, float]:
        return self._curve, 0.0

    @override
    def drafting_cost(self, rows: int) -> float:
        return PRIOR_DRAFTING * self.verification_cost(1) if self._drafting_cost is None else self._drafting_cost


def _prior(tokens: int) -> float:
    return 1 + PRIOR_SLOPE * (tokens - 1)


def _extend(measured: Curve) -> Curve:
    """Return the curve with a point before and one after what is measured, where costs rise as in the prior."""
    (first, low), (last, high) = measured[0], measured[-1]
    before = ((1, low * _prior(1) / _prior(first)),) if first > 1 else ()
    return (*before, *measured, (2 * last, high * _prior(2 * last) / _prior(last)))
