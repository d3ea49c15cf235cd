"""The acceptance rate: accepted over judged tokens, with its count and an interval.

The pages, the plots, the curves in MLflow, the progress and the summary compute it here. SQL recipes and the metrics of
a server have the two counts instead.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import Protocol, Self

Z = 1.959964  # standard deviations of a normal distribution on either side of 95% of it
FEW = 30  # judged tokens below which the interval is about as wide as the differences of interest


class Counted(Protocol):
    """A value with the counts of judged and accepted tokens, such as a completed prompt."""

    @property
    def judged(self) -> int:
        """Tokens that were accepted or rejected."""

    @property
    def accepted(self) -> int:
        """Tokens that were accepted, of those that were judged."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """An acceptance rate.

    >>> some = Acceptance(accepted=30, judged=40)
    >>> some.rate, [round(end, 3) for end in some.interval]
    (0.75, [0.598, 0.858])
    >>> str(some), str(Acceptance())
    ('0.750 (0.60 to 0.86, 40 judged)', '- (none judged)')
    """

    accepted: int = 0
    judged: int = 0

    @classmethod
    def sum_over(cls, parts: Iterable[Counted]) -> Self:
        """Return the acceptance over all parts together."""
        judged = accepted = 0
        for part in parts:
            judged, accepted = judged + part.judged, accepted + part.accepted
        return cls(accepted, judged)

    @property
    def rate(self) -> float | None:
        """Accepted / judged; None if nothing was judged."""
        return self.accepted / self.judged if self.judged else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's score interval of 95%; None if nothing was judged.

        It takes tokens as independent. Tokens of one prompt are alike, so the true interval is rather wider. Source:
        E. B. Wilson, Journal of the American Statistical Association 22 (1927), 209-212.
        """
        if not self.judged:
            return None
        rate, spread = self.accepted / self.judged, Z * Z / self.judged
        middle = rate + spread / 2
        half = Z * sqrt(rate * (1 - rate) / self.judged + spread / self.judged / 4)
        return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))

    @property
    def is_vague(self) -> bool:
        """Whether so few tokens were judged that the rate is mostly noise."""
        return self.judged < FEW

    def __str__(self) -> str:
        if (interval := self.interval) is None:
            return "- (none judged)"
        return f"{self.rate:.3f} ({interval[0]:.2f} to {interval[1]:.2f}, {self.judged:,} judged)"
