"""Coupling: the drafter draws its pieces with the numbers that will draw the target's tokens (`sampling/noise.py`).

A piece races with the number of the token that it is by itself. Where the trie continues after a piece, the drafter's
distribution says how likely the token goes on, and the same numbers choose: the piece's own token races for stopping,
the tokens below each child for going on. So the drafter takes the token that the target would take if both had the
same distribution. What it takes is a guess: the target's token does not depend on it.

Shapes: D drafter ids, V target tokens.
"""

from collections.abc import Sequence
from math import log

import numpy as np
from torch import Tensor

from stages.ngrams.trie import Node, Trie
from stages.sampling.noise import Noise


class Coupling:
    """The active trie, and per piece the token whose number it has.

    A piece that is no token by itself has the number of an id beyond the target's. `pieces`: those that spell each
    target id, None for an id that is not drafted.
    """

    def __init__(self, trie: Trie, pieces: Sequence[tuple[int, ...] | None]) -> None:
        self.root = trie.root
        self.names_D = np.arange(len(pieces), len(pieces) + trie.drafter_size)
        for token, spelt in enumerate(pieces):
            if spelt and len(spelt) == 1:
                self.names_D[spelt[0]] = token


class CoupledWalk:
    """Draws one row's pieces, one after the other.

    Tokens 0 "snow", 1 "ball" and 2 "snowball" of the pieces 0 and 1. The target is sure of "snow", then "ball", or of
    "snowball", and so is the drafter after "snow" about whether "ball" continues it. Both find the same.

    >>> import torch
    >>> trie = Trie(target_size=3, drafter_size=2)
    >>> trie.insert_all([((0,), 0), ((1,), 1), ((0, 1), 2)])
    >>> coupling, sure_D = Coupling(trie, [(0,), (1,), (0, 1)]), torch.eye(2)
    >>> walk = CoupledWalk(coupling, Noise.from_seed(0, 0), place=0)
    >>> walk.draw(sure_D[0]), walk.draw(sure_D[1]), walk.place
    ([(0, 1.0)], [(1, 1.0)], 0)
    >>> walk.draw(sure_D[0]), walk.place  # "snowball" has no longer token: the next one begins
    ([(0, 1.0)], 1)
    """

    def __init__(self, coupling: Coupling, noise: Noise, place: int) -> None:
        self.place = place  # of the token that the last piece belongs to
        self._coupling, self._noise, self._node = coupling, noise, coupling.root

    def draw(self, probs_D: Tensor, most: int = 1) -> list[tuple[int, float]]:
        """Draw a piece from its distribution. Returns it, then those that would be drawn without it, so many in all,
        each with its share of their rates of arrival. Empty if nothing has weight.
        """
        node, root = self._node, self._coupling.root
        if node is not root:
            going_on, left = self._race(node, probs_D)
            if going_on is not None:
                self._node = node.children[going_on]
                return [(going_on, 1.0)]
            probs_D, self.place = left, self.place + 1
        arrivals = self._noise.race(probs_D, self.place, most, self._coupling.names_D)
        self._node = root.children.get(arrivals[0].which, root) if arrivals else root
        total = sum(1 / time for _, time in arrivals)
        return [(piece, 1 / time / total) for piece, time in arrivals]

    def _race(self, node: Node, probs_D: Tensor) -> tuple[int | None, Tensor]:
        """Return the child with which the token goes on, or None; and what distributes the next one's first piece."""
        children = list(node.children)
        if not children:
            return None, probs_D
        weights = probs_D[children].tolist()
        times = [
            min(self._time(token, weight / len(node.children[child].members)) for token in node.children[child].members)
            for child, weight in zip(children, weights, strict=True)
        ]
        first = min(range(len(children)), key=times.__getitem__)
        stop = self._time(node.token, 1 - sum(weights)) if node.token is not None else float("inf")
        if times[first] < stop:
            return children[first], probs_D
        left_D = probs_D.clone()
        left_D[children] = 0
        return None, left_D

    def _time(self, token: int, weight: float) -> float:
        return -log(self._noise.number(self.place, token)) / weight if weight > 0 else float("inf")
