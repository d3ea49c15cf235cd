"""The numbers that decide coupled tokens, each a function of a completion's key, the place and the token.

They are in the log, and so is the key; `omnidraft check` computes them again. The generator is SplitMix64: a counter
whose bits are mixed (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).

Shapes: N numbers.
"""

from typing import Any

STEP = 0x9E3779B97F4A7C15
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
UNIFORM_BITS = 24  # precision of a float32 in [0, 1), in which the log has numbers
_MASK = (1 << 64) - 1

Whole = Any  # an integer, or an array of np.uint64, which wraps around without the mask


def _mix(counter: Whole) -> Whole:
    mixed = (counter ^ (counter >> 30)) * MULTIPLIERS[0] & _MASK
    mixed = (mixed ^ (mixed >> 27)) * MULTIPLIERS[1] & _MASK
    return mixed ^ (mixed >> 31)


def key_of(key: Whole, index: Whole) -> Whole:
    """Return the key, of 63 bits, of an index under a key: of a prompt under a seed, of a place under a prompt.

    >>> key_of(0, 0), key_of(0, 1), key_of(1, 0)
    (8147104208329303767, 3980143261097177850, 6915206964022700985)
    """
    return _mix(_mix(key & _MASK) + (index + 1) * STEP & _MASK) >> 1


def number_of(key: Whole, place: Whole, token: Whole) -> Any:
    """Return the number of a token at a place of the completion with a key, in double precision between 0 and 1, both
    excluded; of arrays an array.

    >>> import numpy as np
    >>> number_of(7, 0, 3) == number_of(*(np.array([one], np.uint64) for one in (7, 0, 3)))[0]
    np.True_
    """
    return ((_mix(key_of(key, place) + (token + 1) * STEP & _MASK) >> 11) + 0.5) * 2.0**-53
