"""Paired figures of two drafters on the same prompts, with confidence intervals.

A rate is a ratio of sums over prompts: a long completion counts as much as it is long. The interval is the percentile
bootstrap's over prompts: prompts are drawn with replacement, both sides' numbers of a prompt together, because tokens
within a prompt are not independent and prompts are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
INTERVAL = 0.95
FEWEST = 8  # prompts: of fewer, too few different samples can be drawn for an interval
_SEED = 0  # of the resampling: the same prompts give the same interval again

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Passage:
    """What became of one prompt on one side.

    Attributes:
        tokens: emitted target ids.
        blocks: target forwards.
        model_blocks: those in which lookup did not draft.
        judged, accepted: of the drafter model's tokens.
        seconds: wall time, reading the prompt included.
    """

    tokens: tuple[int, ...]
    blocks: int
    model_blocks: int
    judged: int
    accepted: int
    seconds: float


@dataclass(frozen=True)
class Paired:
    """A figure of both sides and what the second has more; None where it cannot be formed.

    Attributes:
        first, second: over all prompts.
        change: the second less the first or, for speed, the median over prompts of the second over the first.
        low, high: bounds of the change's interval; None for fewer than `FEWEST` prompts.
    """

    first: float | None
    second: float | None
    change: float | None
    low: float | None
    high: float | None


# Per figure what is summed over prompts, above and below the line.
RATES: dict[str, tuple[Callable[[Passage], float], Callable[[Passage], float]]] = {
    "acceptance_rate": (lambda one: one.accepted, lambda one: one.judged),
    "mean_accepted_length": (lambda one: one.accepted, lambda one: one.model_blocks),
    "block_efficiency": (lambda one: len(one.tokens), lambda one: one.blocks),
}
SPEED = "tokens_per_second"  # its change is a ratio


def paired(first: Sequence[Passage], second: Sequence[Passage]) -> dict[str, Paired]:
    """All figures by name. Both sides have the same prompts in the same order, at least one.

    >>> one, other = [Passage((1, 2), 2, 2, 2, 0, 1.0)] * 8, [Passage((1, 2), 1, 1, 1, 1, 0.5)] * 8
    >>> paired(one, other)["acceptance_rate"]
    Paired(first=0.0, second=1.0, change=1.0, low=1.0, high=1.0)
    >>> paired(one, other)["tokens_per_second"]
    Paired(first=2.0, second=4.0, change=2.0, low=2.0, high=2.0)
    """
    drawn = _resampled(len(first))
    found = {name: _rate(_sums(first, *parts), _sums(second, *parts), drawn) for name, parts in RATES.items()}
    return {**found, SPEED: _speed(first, second, drawn)}


def _resampled(prompts: int) -> list[npt.NDArray[np.int64]]:
    """Prompts by their places; no sample of too few prompts: of one, all samples are equal and would prove anything."""
    generator = np.random.Generator(np.random.Philox(_SEED))
    return [generator.integers(0, prompts, prompts) for _ in range(RESAMPLES if prompts >= FEWEST else 0)]


def _sums(
    side: Sequence[Passage], above: Callable[[Passage], float], below: Callable[[Passage], float]
) -> tuple[Numbers, Numbers]:
    return np.array([above(one) for one in side], float), np.array([below(one) for one in side], float)


def _rate(first: tuple[Numbers, Numbers], second: tuple[Numbers, Numbers], drawn: Sequence[npt.NDArray]) -> Paired:
    def change(chosen: npt.NDArray | slice) -> float:
        return _ratio(second, chosen) - _ratio(first, chosen)

    every = slice(None)
    return _paired(_ratio(first, every), _ratio(second, every), change(every), [change(chosen) for chosen in drawn])


def _ratio(sums: tuple[Numbers, Numbers], chosen: npt.NDArray | slice) -> float:
    above, below = sums
    total = float(below[chosen].sum())
    return float(above[chosen].sum()) / total if total else float("nan")


def _speed(first: Sequence[Passage], second: Sequence[Passage], drawn: Sequence[npt.NDArray]) -> Paired:
    """The sides took turns, so that a prompt's two times met the same machine: their ratio says more than the totals,
    and its median more than its mean."""
    own = [_sums(side, lambda one: len(one.tokens), lambda one: one.seconds) for side in (first, second)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (own[1][0] / own[1][1]) / (own[0][0] / own[0][1])
    every = slice(None)
    change = float(np.median(ratios))
    return _paired(_ratio(own[0], every), _ratio(own[1], every), change, [np.median(ratios[one]) for one in drawn])


def _paired(first: float, second: float, change: float, changes: Sequence[float]) -> Paired:
    tail = 100 * (1 - INTERVAL) / 2
    low, high = np.percentile(changes, [tail, 100 - tail]) if changes else (float("nan"),) * 2
    return Paired(*(float(value) if isfinite(value) else None for value in (first, second, change, low, high)))
