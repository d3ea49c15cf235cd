"""Paired metrics of two drafters on the same prompts, with confidence intervals.

A rate is a ratio of sums over prompts: a completion is weighted by its length. The interval is the percentile
bootstrap's over prompts: prompts are resampled with replacement, both sides' numbers of a prompt together, because
tokens within a prompt are not independent, but prompts are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
INTERVAL = 0.95
MIN_PROMPTS = 8  # with fewer, too few different samples can be drawn for an interval
_SEED = 0  # seed of the resampling: the same prompts give the same interval

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PassageCounts:
    """Counts of one prompt on one side."""

    tokens: tuple[int, ...]  # emitted target ids
    blocks: int  # target forwards
    model_blocks: int  # blocks without a copied draft
    judged: int  # tokens of the drafter model
    accepted: int
    seconds: float  # wall time, prefill included


@dataclass(frozen=True)
class PairedMetric:
    """A metric of both sides and its change; None where it cannot be computed."""

    first: float | None  # over all prompts; for speed, the median of the prompts
    second: float | None
    change: float | None  # the second less the first or, for speed, the median over prompts of second over first
    low: float | None  # bounds of the change's interval; None for fewer than `MIN_PROMPTS` prompts
    high: float | None


ACCEPTANCE = "acceptance_rate"
# Numerator and denominator of every rate, summed over prompts.
RATES: dict[str, tuple[Callable[[PassageCounts], float], Callable[[PassageCounts], float]]] = {
    ACCEPTANCE: (lambda one: one.accepted, lambda one: one.judged),
    "mean_accepted_length": (lambda one: one.accepted, lambda one: one.model_blocks),
    "block_efficiency": (lambda one: len(one.tokens), lambda one: one.blocks),
}
SPEED = "tokens_per_second"  # its change is a ratio


def compare_counts(
    first: Sequence[PassageCounts],
    second: Sequence[PassageCounts],
    *,
    level: float = INTERVAL,
    least: int = MIN_PROMPTS,
) -> dict[str, PairedMetric]:
    """Compute all metrics by name. Both sides have the same prompts in the same order, at least one.

    `level`: of the intervals, which fewer than `least` prompts do not have.

    The tokens per second are medians over prompts. The sides took turns, so that both times of a prompt met the same
    load of the machine: their ratio is more reliable than the ratio of the totals, and its median more than its mean.

    >>> one, other = [PassageCounts((1, 2), 2, 2, 2, 0, 1.0)] * 8, [PassageCounts((1, 2), 1, 1, 1, 1, 0.5)] * 8
    >>> compare_counts(one, other)["acceptance_rate"]
    PairedMetric(first=0.0, second=1.0, change=1.0, low=1.0, high=1.0)
    >>> compare_counts(one, other)["tokens_per_second"]
    PairedMetric(first=2.0, second=4.0, change=2.0, low=2.0, high=2.0)
    """
    prompts = len(first)
    resamples = RESAMPLES if prompts >= least else 0  # all samples of one prompt are equal
    drawn = np.random.Generator(np.random.Philox(_SEED)).integers(0, prompts, (resamples, prompts))
    samples = np.vstack([np.arange(prompts), drawn])  # indices of prompts; the first sample is all of them
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {}
        for name, parts in RATES.items():
            sums = [
                [np.array([part(one) for one in side], float)[samples].sum(1) for part in parts]
                for side in (first, second)
            ]
            rates = [above / below for above, below in sums]
            found[name] = _make_metric(rates[0][0], rates[1][0], rates[1] - rates[0], level)
        speeds = [
            np.array([len(one.tokens) for one in side]) / [one.seconds for one in side] for side in (first, second)
        ]
        before, after = (float(np.median(side)) for side in speeds)
        found[SPEED] = _make_metric(before, after, np.median((speeds[1] / speeds[0])[samples], axis=1), level)
    return found


def _make_metric(first: float, second: float, changes: Numbers, level: float) -> PairedMetric:
    """Make a metric of its change over all prompts, which comes first, and over the samples of them."""
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(changes[1:], [tail, 100 - tail]) if len(changes) > 1 else (np.nan, np.nan)
    values = (first, second, changes[0], low, high)
    return PairedMetric(*(float(value) if isfinite(value) else None for value in values))
