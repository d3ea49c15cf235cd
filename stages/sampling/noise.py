"""Noise: random numbers by place and token, so that a drawn token is a function of its distribution and the seed alone.

Verification that draws from a prompt's next random number keeps the distribution of text, but not the text: which
number decides a token depends on what was drafted. Here the token at a place is the first of an exponential race: token
t arrives at time -log(u_t) / p_t, where u_t is the number of this place and token. It is t with probability p_t, as
with the Gumbel-max trick, whoever asks and however often. A drafter that lets its own distribution race with the same
numbers often finds the same token. Source: Daliri, Musco and Suresh, "Coupling without Communication and
Drafter-Invariant Speculative Decoding" (2024); `stages/drafting/coupling.py` carries it to another vocabulary.

Shapes: V weights.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from stages.engine.compiled.lines.compiling import Floats, Integers, compile_function, compiled
from stages.engine.compiled.lines.line import sums_in_any_order
from store.noise import MULTIPLIERS, STEP, key_of, number_of

_STEP, _FIRST, _SECOND = np.uint64(STEP), np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_ONE, _S30, _S27, _S31, _S11 = (np.uint64(shift) for shift in (1, 30, 27, 31, 11))
_OWN = np.empty(0, np.int64)
NOBODY = -1  # index where fewer arrive
CHUNK = 256  # weights that are looked at together


@cache
def _own_names(size: int) -> Integers:
    return np.arange(size)


class Arrival(NamedTuple):
    """Which index arrives, and when it arrives, in the unit of a weight of 1."""

    which: int
    time: float


@dataclass(frozen=True)
class Noise:
    """The numbers of one completion.

    The first of a race has the law of its weights, and does not change when the others are asked about:

    >>> import torch
    >>> weights_V = torch.tensor([0.5, 0.0, 0.25, 0.25])
    >>> winners = [Noise.from_seed(seed, 0).race(weights_V, place=0)[0].which for seed in range(4000)]
    >>> [round(winners.count(token) / 4000, 2) for token in range(4)]
    [0.49, 0.0, 0.25, 0.26]
    >>> noise = Noise.from_seed(0, 0)
    >>> [one.which for one in noise.race(weights_V, place=7, most=4)]  # who has no weight never arrives
    [3, 0, 2]
    """

    key: int

    @classmethod
    def from_seed(cls, seed: int, stream: int) -> "Noise":
        """Return the noise of a seed; its streams, of prompts or of several answers to one, are independent."""
        return cls(key_of(seed, stream))

    def number(self, place: int, token: int) -> float:
        """Return the number of a token at a place of the completion, between 0 and 1, both excluded."""
        return float(number_of(self.key, place, token))

    def race(self, weights_V: Tensor, place: int, most: int = 1, names_V: Integers = _OWN) -> list[Arrival]:
        """Return the first arrivals, in order: so many, or all that have weight. Weights of 0 and NaN never arrive.
        `names_V`: the tokens whose numbers the indices have; empty: they are the tokens.
        """
        found, times = np.full(most, NOBODY, np.int64), np.full(most, np.inf)
        names_V = names_V if names_V.size else _own_names(len(weights_V))
        _race(weights_V.detach().cpu().numpy(), np.uint64(key_of(self.key, place)), names_V, found, times)
        pairs = zip(found.tolist(), times.tolist(), strict=True)
        return [Arrival(index, time) for index, time in pairs if index != NOBODY]


@compiled
def _number(key: np.uint64, name: int) -> float:
    """As `number_of`, given the key of a place."""
    mixed = key + (np.uint64(name) + _ONE) * _STEP
    mixed = (mixed ^ (mixed >> _S30)) * _FIRST
    mixed = (mixed ^ (mixed >> _S27)) * _SECOND
    return (np.float64((mixed ^ (mixed >> _S31)) >> _S11) + 0.5) * 2.0**-53


@sums_in_any_order
def _none_arrives(weights: Floats, key: np.uint64, names: Integers, bound: float) -> bool:
    """Return whether no index arrives before a time. -log(u) is at least 1 - u, which is compiled to vectors."""
    early = 0.0
    for index in range(weights.size):
        margin = bound * np.float64(weights[index]) - (1.0 - _number(key, names[index]))
        early += margin + abs(margin)
    return early == 0.0


@compile_function
def _race(weights_V: Floats, key: np.uint64, names_V: Integers, found: Integers, times: Floats) -> None:
    """Write the first indices of a race and their times, given the key of the place."""
    last = found.size - 1
    for begin in range(0, weights_V.size, CHUNK):
        end = min(begin + CHUNK, weights_V.size)
        if times[last] < np.inf and _none_arrives(weights_V[begin:end], key, names_V[begin:end], times[last]):
            continue
        for index in range(begin, end):
            weight, number = np.float64(weights_V[index]), _number(key, names_V[index])
            if not 1.0 - number < times[last] * weight:
                continue
            time, rank = -math.log(number) / weight, last
            while rank > 0 and times[rank - 1] > time:
                times[rank], found[rank] = times[rank - 1], found[rank - 1]
                rank -= 1
            if time < times[rank]:
                times[rank], found[rank] = time, index
