"""Randomness as an argument: one source of uniform numbers per prompt."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor
from typing_extensions import override

from store.noise import UNIFORM_BITS


class Remainder(NamedTuple):
    """A distribution without some tokens, which is not computed to draw from it."""

    weights_V: Tensor
    excluded: Sequence[int]

    def to_tensor(self) -> Tensor:
        """Return the weights, those of the excluded tokens 0."""
        weights_V = self.weights_V.clone()
        weights_V[list(self.excluded)] = 0
        return weights_V


Outcomes = Tensor | Sequence[float] | Remainder  # of what is drawn, or of what is tested


class RandomSource(Protocol):
    """Uniform numbers for one prompt, in the order in which its decisions are made.

    `uniform` is called exactly once per random decision. The distribution that the number will decide is passed
    so that a test can enumerate its outcomes; a production source must not read it (the host would wait for the
    device).
    """

    def uniform(self, distribution: Outcomes) -> float:
        """Return a number in [0, 1), which decides among outcomes laid end to end in proportion to `distribution`."""
        ...


class SeededRandomSource(RandomSource):
    """Numbers that depend on the run's seed and the prompt's stream offset alone.

    So the result for a prompt depends neither on its batch nor on the point at which a run is resumed. `drawn` is how
    many numbers were drawn before.
    """

    def __init__(self, seed: int, offset: int, drawn: int = 0) -> None:
        self.state = [seed, offset, drawn]  # the arguments of a source that continues here
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, offset])))
        self._generator.random(drawn)

    @override
    def uniform(self, distribution: Outcomes) -> float:
        self.state[2] += 1
        return float(self._generator.random())


def to_float32_grid(uniform: float) -> float:
    """Round down to a multiple of 2**-24, so that the number that is logged is the number that decided."""
    return float(int(uniform * (1 << UNIFORM_BITS))) / (1 << UNIFORM_BITS)


def is_sampled(offset: int, interval: int) -> bool:
    """Return whether the prompt at an offset of the stream is one of a sample of one in so many, spread evenly.

    Multiples of the golden ratio (Knuth's multiplicative hash) share no period with the routing of prompts to targets.

    >>> [offset for offset in range(16) if is_sampled(offset, 4)]
    [1, 4, 9, 12]
    """
    return ((offset + 1) * 2654435761 % (1 << 32)) * interval >> 32 == 0
