"""PairedMetric metrics of two drafters on the same prompts, with confidence intervals.

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
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class PassageCounts:
    """Counts of one prompt on one side.

    Attributes:
        tokens: emitted target ids.
        blocks: target forwards.
        model_blocks: blocks without a copied draft.
        judged, accepted: tokens of the drafter model.
        seconds: wall time, prefill included.
    """

    tokens: tuple[int, ...]
    blocks: int
    model_blocks: int
    judged: int
    accepted: int
    seconds: float


@dataclass(frozen=True)
class PairedMetric:
    """A metric of both sides and its change; None where it cannot be computed.

    Attributes:
        first, second: over all prompts; for speed, the medians of the prompts.
        change: the second less the first or, for speed, the median over prompts of the second over the first.
        low, high: bounds of the change's interval; None for fewer than `MIN_PROMPTS` prompts.
    """

    first: float | None
    second: float | None
    change: float | None
    low: float | None
    high: float | None


# Numerator and denominator of every rate, summed over prompts.
RATES: dict[str, tuple[Callable[[PassageCounts], float], Callable[[PassageCounts], float]]] = {
    "acceptance_rate": (lambda one: one.accepted, lambda one: one.judged),
    "mean_accepted_length": (lambda one: one.accepted, lambda one: one.model_blocks),
    "block_efficiency": (lambda one: len(one.tokens), lambda one: one.blocks),
}
SPEED = "tokens_per_second"  # its change is a ratio


def compare_counts(first: Sequence[PassageCounts], second: Sequence[PassageCounts]) -> dict[str, PairedMetric]:
    """Compute all metrics by name. Both sides have the same prompts in the same order, at least one.

    >>> one, other = [PassageCounts((1, 2), 2, 2, 2, 0, 1.0)] * 8, [PassageCounts((1, 2), 1, 1, 1, 1, 0.5)] * 8
    >>> compare_counts(one, other)["acceptance_rate"]
    PairedMetric(first=0.0, second=1.0, change=1.0, low=1.0, high=1.0)
    >>> compare_counts(one, other)["tokens_per_second"]
    PairedMetric(first=2.0, second=4.0, change=2.0, low=2.0, high=2.0)
    """
    samples = _resample(len(first))
    found = {
        name: _compare_rate(_sum_parts(first, *parts), _sum_parts(second, *parts), samples)
        for name, parts in RATES.items()
    }
    return {**found, SPEED: _compare_speed(first, second, samples)}


def _resample(prompts: int) -> list[npt.NDArray[np.int64]]:
    """Draw samples of prompt indices; none for too few prompts: all samples of one prompt are equal."""
    generator = np.random.Generator(np.random.Philox(_SEED))
    return [generator.integers(0, prompts, prompts) for _ in range(RESAMPLES if prompts >= MIN_PROMPTS else 0)]


def _sum_parts(
    side: Sequence[PassageCounts], above: Callable[[PassageCounts], float], below: Callable[[PassageCounts], float]
) -> tuple[Numbers, Numbers]:
    return np.array([above(one) for one in side], float), np.array([below(one) for one in side], float)


def _compare_rate(
    first: tuple[Numbers, Numbers], second: tuple[Numbers, Numbers], samples: Sequence[Indices]
) -> PairedMetric:
    def change(chosen: Indices | slice) -> float:
        return _divide(second, chosen) - _divide(first, chosen)

    every = slice(None)
    return _make_metric(
        _divide(first, every), _divide(second, every), change(every), [change(chosen) for chosen in samples]
    )


def _divide(sums: tuple[Numbers, Numbers], chosen: Indices | slice) -> float:
    above, below = sums
    total = float(below[chosen].sum())
    return float(above[chosen].sum()) / total if total else float("nan")


def _compare_speed(
    first: Sequence[PassageCounts], second: Sequence[PassageCounts], samples: Sequence[Indices]
) -> PairedMetric:
    """Compare tokens per second by medians over prompts: of each side, and of the ratio.

    The sides took turns, so that both times of a prompt met the same load of the machine: their ratio is more reliable
    than the ratio of the totals, and its median more than its mean.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        own = [np.array([len(one.tokens) for one in side]) / [one.seconds for one in side] for side in (first, second)]
        ratios = own[1] / own[0]
    before, after, change = (float(np.median(values)) for values in (*own, ratios))
    return _make_metric(before, after, change, [float(np.median(ratios[one])) for one in samples])


def _make_metric(first: float, second: float, change: float, changes: Sequence[float]) -> PairedMetric:
    tail = 100 * (1 - INTERVAL) / 2
    low, high = np.percentile(changes, [tail, 100 - tail]) if changes else (float("nan"),) * 2
    return PairedMetric(*(float(value) if isfinite(value) else None for value in (first, second, change, low, high)))
