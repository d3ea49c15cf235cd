"""Drawing: from probabilities to tokens.

Shapes: N positions, M positions of a row, V tokens of a vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.engine.compiled.lines.draw import NOTHING, draw
from stages.engine.compiled.lines.line import can_read
from stages.sampling.random_source import RandomSource, Remainder, to_float32_grid

CERTAIN = (1.0,)  # the distribution of an outcome that has no alternative


@dataclass(frozen=True)
class RowDistributions:
    """The target's distributions at the places of a row.

    >>> greedy = RowDistributions(torch.eye(3)[[2, 0]], certain=[2, 0])
    >>> greedy.find_chances([0, 1], [2, 2])
    [1.0, 0.0]
    """

    probs_MV: Tensor
    certain: Sequence[int] | None = None  # the only possible token of each place: greedy, or decided by noise
    numbers: Sequence[float] | None = None  # of the noise that decided them

    def find_chances(self, places: Sequence[int], tokens: Sequence[int]) -> list[float]:
        if self.certain is not None:
            return [float(self.certain[place] == token) for place, token in zip(places, tokens, strict=True)]
        chances: list[float] = self.probs_MV[places, tokens].tolist()
        return chances

    def number(self, place: int, outcomes: Sequence[float], rng: RandomSource) -> float:
        """Return the number that decides among the outcomes of a place's test. A certain token leaves it no choice."""
        return to_float32_grid(rng.uniform(outcomes) if self.numbers is None else self.numbers[place])

    def draw(self, place: int, rng: RandomSource) -> int:
        """Draw the token of a place. One random number is taken also in greedy decoding."""
        if self.certain is None:
            return sample(self.probs_MV[place], rng)
        if self.numbers is None:
            rng.uniform(CERTAIN)
        return self.certain[place]


def sample_rows(weights_NV: Tensor, rngs: Sequence[RandomSource]) -> Tensor:
    """Draw one index per row, in proportion to the row's nonnegative weights (N,).

    By inversion: the smallest index whose cumulative weight exceeds the row's uniform number, in double precision. On
    a GPU nothing is copied to the host.
    """
    uniforms = [rng.uniform(weights_V) for rng, weights_V in zip(rngs, weights_NV, strict=True)]
    if can_read(weights_NV):
        return torch.tensor(list(map(_draw, weights_NV, uniforms)), dtype=torch.long)
    return _invert(weights_NV, uniforms)


def sample(weights_V: Tensor, rng: RandomSource) -> int:
    """Draw one index in proportion to nonnegative weights."""
    return _draw(weights_V, rng.uniform(weights_V))


def sample_other(weights_V: Tensor, excluded: Sequence[int], rng: RandomSource) -> int:
    """Draw one index that is none of some, in proportion to nonnegative weights. If the others have none, which only
    rounding can bring about where this is called, any index may be drawn.
    """
    if not can_read(weights_V):
        rest_V = Remainder(weights_V, excluded).to_tensor()
        return sample(rest_V if float(rest_V.sum()) > 0 else weights_V, rng)
    uniform = rng.uniform(Remainder(weights_V, excluded))
    index = draw(weights_V, uniform, excluded)
    return index if index != NOTHING else _draw(weights_V, uniform)


def _draw(weights_V: Tensor, uniform: float) -> int:
    if not can_read(weights_V):
        return int(_invert(weights_V[None], [uniform])[0])
    index = draw(weights_V, uniform)
    return index if index != NOTHING else len(weights_V) - 1


def _invert(weights_NV: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Return per row the smallest index whose cumulative weight exceeds a share of all weight (N,).

    >>> weights_NV = torch.tensor([0.5, 0.0, 0.25, 0.25, 0.0]).expand(5, 5)
    >>> _invert(weights_NV, [0.0, 0.49, 0.5, 0.75, 1 - 2**-53])
    tensor([0, 0, 2, 3, 3])
    """
    cumulative_NV = weights_NV.to(torch.float64).cumsum(-1)
    uniforms_N1 = torch.tensor(uniforms, dtype=torch.float64, device=weights_NV.device)[:, None]
    index_N1 = torch.searchsorted(cumulative_NV, uniforms_N1 * cumulative_NV[:, -1:], right=True)
    return index_N1.clamp_(max=weights_NV.shape[-1] - 1)[:, 0]  # of weights that are 0 or not finite, any
