"""Rates with their intervals: acceptance on a run's own prompts, and what versions reach on the probe.

The pages, the plots, the curves in MLflow, the progress and the summary compute the acceptance rate here. SQL recipes
and the metrics of a server have its two counts instead.

The probe is a fixed set of prompts, the same for all versions of a target and a drafter's vocabulary. Its prompts are
the sample: tokens of one prompt are alike, so an interval over tokens would be too narrow. A rate is a ratio of two
sums over prompts; its variance is that of the linearised ratio (W. G. Cochran, Sampling Techniques, 3rd ed., 1977,
section 6.3), and the interval uses Student's t distribution.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Protocol, Self

Z = 1.959964  # standard deviations of a normal distribution on either side of 95% of it
FEW = 30  # judged tokens below which the interval is about as wide as the differences of interest
FEWEST = 5  # prompts of a probe: of fewer, their differences cannot be estimated


class Counted(Protocol):
    """A value with the counts of judged and accepted tokens, such as a completed prompt."""

    @property
    def judged(self) -> int: ...

    @property
    def accepted(self) -> int: ...


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

    def __str__(self) -> str:
        if (interval := self.interval) is None:
            return "- (none judged)"
        return f"{self.rate:.3f} ({interval[0]:.2f} to {interval[1]:.2f}, {self.judged:,} judged)"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval of 95%."""

    value: float
    low: float
    high: float


def estimate_ratio(parts: Sequence[float], wholes: Sequence[float]) -> Estimate | None:
    """Estimate sum(parts) / sum(wholes), which have one entry per prompt.

    None for fewer than `FEWEST` prompts or a sum of zero.

    >>> found = estimate_ratio([2, 4, 3, 3, 3], [10, 10, 10, 10, 10])
    >>> found.value, round(found.low, 2), round(found.high, 2)
    (0.3, 0.21, 0.39)
    """
    if len(wholes) < FEWEST or not sum(wholes):
        return None
    return _with_interval(sum(parts) / sum(wholes), _residuals(parts, wholes))


def estimate_difference(
    parts: Sequence[float], wholes: Sequence[float], other_parts: Sequence[float], other_wholes: Sequence[float]
) -> Estimate | None:
    """Estimate how much larger the second ratio is than the first, measured on the same prompts in the same order.

    None if the numbers of prompts differ, for fewer than `FEWEST` prompts, or if a sum of wholes is zero.
    """
    if len(parts) != len(other_parts) or len(parts) < FEWEST or not sum(wholes) or not sum(other_wholes):
        return None
    first, second = _residuals(parts, wholes), _residuals(other_parts, other_wholes)
    value = sum(other_parts) / sum(other_wholes) - sum(parts) / sum(wholes)
    return _with_interval(value, [two - one for one, two in zip(first, second, strict=True)])


def _residuals(parts: Sequence[float], wholes: Sequence[float]) -> list[float]:
    """What each prompt contributes to the ratio beyond its share; they sum to zero."""
    total = sum(wholes)
    ratio = sum(parts) / total
    return [(part - ratio * whole) / total for part, whole in zip(parts, wholes, strict=True)]


def _with_interval(value: float, residuals: Sequence[float]) -> Estimate:
    from scipy.special import stdtrit  # the quantile of Student's t distribution

    count = len(residuals)
    deviation = sqrt(count / (count - 1) * sum(one * one for one in residuals))
    half = float(stdtrit(count - 1, 0.975)) * deviation
    return Estimate(value, value - half, value + half)
