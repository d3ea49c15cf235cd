"""A detector of falls with a stated time between false alarms: a sum of bets on the ranks of values."""

from bisect import bisect_right
from collections import Counter, deque
from dataclasses import dataclass, field

REFERENCE = 64  # values before a beginning that the later ones are ranked among
BEGINNINGS = 24  # newest beginnings that are bet on
POWERS = (0.1, 0.3)  # what is bet on: that a value lies among the lowest share s of those before with chance s**power
LARGEST = 1e30  # of a wealth, so that it stays finite


@dataclass
class _Beginning:
    """Bets that the values fell with a certain one."""

    before: list[float]  # the values before it, sorted
    gaps: Counter[int] = field(default_factory=Counter)  # how many of the later values lie in each gap between these
    seen: int = 0  # number of the later values
    wealth: list[float] = field(default_factory=lambda: [1.0] * len(POWERS))  # of the bets with each power

    def observe(self, value: float) -> float:
        """Add a value. Returns the wealth."""
        slots, gap = len(self.before) + 1, bisect_right(self.before, value)
        fair = (1 + self.gaps[gap]) / (slots + self.seen)  # that a value lies there if nothing changed
        for number, power in enumerate(POWERS):
            chance = ((gap + 1) / slots) ** power - (gap / slots) ** power
            self.wealth[number] = min(LARGEST, self.wealth[number] * chance / fair)
        self.gaps[gap] += 1
        self.seen += 1
        return sum(self.wealth) / len(POWERS)


class RankDetector:
    """An e-detector (Shin, Ramdas and Rinaldo, arXiv 2203.03532): the sum of the wealths of bets, of which one begins
    with every value.

    A bet ranks the later values among those before its beginning. If all are exchangeable, the chance of every rank is
    known whatever their distribution (Polya's urn), so the bets are fair, and the sum reaches a threshold of A after A
    values at the earliest on average. It is exact where the reference is the whole past, and measured where it is the
    newest values (`benchmarks/notes/drift.md`), which a slow rise must not hide a fall from. Equal values count as
    higher ones.

    >>> detector = RankDetector(interval=10_000, grace=10)
    >>> values = [0.40, 0.50] * 20 + [0.25, 0.30] * 10
    >>> found = []
    >>> for number, value in enumerate(values):
    ...     detector.update(value)
    ...     found += [number] * detector.drift_detected
    >>> found[0]  # the fall begins at 40
    44

    Args:
        interval: values between two false alarms, at least, on average.
        grace: values at first that are not looked at.
    """

    def __init__(self, interval: float, grace: int) -> None:
        self._interval, self._grace, self._count, self._sum = interval, grace, 0, 0.0
        self._past: deque[float] = deque(maxlen=REFERENCE)
        self._beginnings: deque[_Beginning] = deque(maxlen=BEGINNINGS)

    @property
    def drift_detected(self) -> bool:
        """Whether the sum has reached the threshold."""
        return self._sum >= self._interval

    def update(self, x: float) -> None:
        """Bet on the rank of a value, then add it to those before."""
        self._count += 1
        if self._count <= self._grace:
            return
        self._beginnings.append(_Beginning(sorted(self._past)))
        self._sum = sum(one.observe(x) for one in self._beginnings)
        self._past.append(x)
