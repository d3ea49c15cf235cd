"""Rates on the probe with intervals, and paired differences of two versions.

The probe is a fixed set of prompts, the same for all versions of a target and a drafter's vocabulary. Its prompts are
the sample: tokens of one prompt are alike, so an interval over tokens would be too narrow. A rate is a ratio of two
sums over prompts; its variance is that of the linearised ratio (W. G. Cochran, Sampling Techniques, 3rd ed., 1977,
section 6.3), and the interval uses Student's t distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

FEWEST = 5  # prompts: of fewer, their differences cannot be estimated


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
