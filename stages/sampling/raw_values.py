"""How likely the target itself found rejected tokens: the softmax of its logits at temperature 1, before all
transforms of sampling. It decides nothing. With it the log shows how near a rejected token was, also where greedy
decoding makes every distribution one-hot.

Shapes: N positions, J rejected tokens, V target tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stages.engine.compiled.lines.line import can_read
from stages.engine.compiled.lines.token_values import read_token_values


class RawValues(NamedTuple):
    """Raw values of a rejected token."""

    # proposed, emitted: probabilities of the proposed and of the emitted token; None for a token that is not there,
    # or whose probability is not known
    proposed: float | None
    emitted: float | None
    entropy: float | None  # of the whole distribution, in nats; None if it is not known


class RejectedPlace(NamedTuple):
    """A rejected token: the line of the logits that it was tested with, and the ids that were proposed and emitted."""

    line: int
    proposed: int | None
    emitted: int


def compute_raw_values(logits_NV: Tensor, places: Sequence[RejectedPlace]) -> list[RawValues]:
    """Compute the raw values of J rejected tokens, from logits with ids that are never emitted at -inf.

    >>> logits_NV = torch.tensor([[0.5, 0.25, 0.25]]).log()
    >>> (found,) = compute_raw_values(logits_NV, [RejectedPlace(0, 2, 0)])
    >>> [round(value, 4) for value in found]
    [0.25, 0.5, 1.0397]
    """
    if not places:
        return []
    tokens = [(line, emitted if proposed is None else proposed, emitted) for line, proposed, emitted in places]
    read = read_token_values if can_read(logits_NV) else _compute_plainly
    return [
        RawValues(None if place.proposed is None else proposed, emitted, entropy)
        for place, (proposed, emitted, entropy) in zip(places, read(logits_NV, tokens), strict=True)
    ]


def _compute_plainly(logits_NV: Tensor, places: Sequence[tuple[int, int, int]]) -> list[list[float]]:
    """Compute the values of places with torch, for other types and devices, in one transfer to the host."""
    lines, *tokens = zip(*places, strict=True)
    log_JV = logits_NV[list(lines)]
    log_JV = (log_JV if log_JV.dtype is torch.float64 else log_JV.float()).log_softmax(-1)
    probs_JV = log_JV.exp()
    # What has probability 0 adds nothing: its logarithm is bounded, so that their product is not NaN.
    entropies_J1 = -(probs_JV * log_JV.clamp(min=torch.finfo(log_JV.dtype).min)).sum(-1, keepdim=True)
    own_J2 = probs_JV.gather(1, torch.tensor(tokens, device=probs_JV.device).T)
    values: list[list[float]] = torch.cat([own_J2, entropies_J1], 1).tolist()
    return values
