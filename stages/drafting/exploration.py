"""Exploration: in a few blocks the action is drawn, so that the log shows what each action is worth.

What a block gives depends on where in the text it is. The present policy takes each action where it promises most, so
averages over the blocks of each action do not compare them. Where the action was drawn, with a known chance, a
block counts as 1 / chance blocks of its kind (inverse-propensity weighting).
"""

from collections.abc import Sequence
from typing import NamedTuple

from store.events import Action

_MASK = (1 << 64) - 1


class Choice(NamedTuple):
    """What a row does in a block."""

    action: Action  # what is done
    propensity: float  # the chance with which this action was taken
    drawn: bool  # whether the action was drawn instead of preferred


class Exploration:
    """Draws the action of a few blocks. A draw depends on the seed, the prompt's offset and the block's number only, so
    that a resumed run draws the same, and the text keeps the target's distribution.

    >>> exploration = Exploration(share=0.25, seed=0, actions=(Action.NOTHING, Action.COPIES, Action.MODEL))
    >>> choices = [exploration.choose(offset=0, block=block, preferred=Action.COPIES) for block in range(12)]
    >>> [choice.action.value for choice in choices if choice.drawn]
    ['copies', 'nothing', 'nothing', 'model']
    >>> sorted({round(choice.propensity, 4) for choice in choices})
    [0.0833, 0.8333]
    """

    def __init__(self, share: float, seed: int, actions: Sequence[Action]) -> None:
        self._share, self._seed, self._actions = share, seed, tuple(actions)

    def choose(self, offset: int, block: int, preferred: Action) -> Choice:
        """Return the preferred action or, in a block that explores, a drawn one."""
        if not self._share:
            return Choice(preferred, 1.0, drawn=False)
        number = _mix(_mix(_mix(self._seed) ^ offset) ^ block)
        drawn = (number >> 11) * 2.0**-53 < self._share
        action = self._actions[_mix(number) % len(self._actions)] if drawn else preferred
        uniform = self._share / len(self._actions)
        return Choice(action, uniform + (1 - self._share) * (action is preferred), drawn)


def _mix(number: int) -> int:
    """Return 64 bits that look random and depend on a number alone (SplitMix64, Steele and others 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


NO_EXPLORATION = Exploration(0.0, 0, tuple(Action))
