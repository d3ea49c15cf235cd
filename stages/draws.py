"""Randomness as an argument: one source of uniform numbers per prompt."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

UNIFORM_BITS = 24  # what a float32 keeps of a number in [0, 1)


class Draws(Protocol):
    """Uniform numbers for one prompt, in the order in which its decisions are made.

    `uniform` is called exactly once per random decision. The law that the number will decide is passed
    so that a test can enumerate its outcomes; a production source must not look at it (that would force the
    host to wait for the device).
    """

    def uniform(self, law: Tensor) -> float:
        """A number in [0, 1) that decides among outcomes laid end to end in proportion to `law`."""
        ...


class SeededDraws:
    """Numbers that depend on the run's seed and the prompt's stream offset alone.

    So a prompt is decided alike whichever batch it falls into and wherever a run is resumed.
    """

    def __init__(self, seed: int, offset: int) -> None:
        self._seed, self._offset, self._drawn = seed, offset, 0
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, offset])))

    def uniform(self, law: Tensor) -> float:
        """The next number."""
        self._drawn += 1
        return float(self._generator.random())

    def save(self) -> list[int]:
        """Seed, offset and how many numbers were drawn."""
        return [self._seed, self._offset, self._drawn]

    @classmethod
    def restored(cls, saved: Sequence[int]) -> "SeededDraws":
        """What goes on where `save` was called."""
        seed, offset, drawn = saved
        draws = cls(seed, offset)
        draws._generator.random(drawn)
        draws._drawn = drawn
        return draws


def to_float32_grid(uniform: float) -> float:
    """Round down to a multiple of 2**-24, so that the number that is logged is the number that decided."""
    return float(int(uniform * (1 << UNIFORM_BITS))) / (1 << UNIFORM_BITS)
