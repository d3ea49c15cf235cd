"""How likely the target itself found tokens: by the softmax of its logits at temperature 1, before all transforms of
sampling. These values decide nothing.

Log probabilities of emitted tokens are for clients, as the interfaces of other engines report them. Raw values of
rejected tokens are for the log, which shows by them how near a token was, also where greedy decoding makes every
distribution one-hot.

Shapes: N positions, J rejected tokens, V target tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stages.engine.compiled.lines.line import can_read
from stages.engine.compiled.lines.token_values import read_token_values
from store.events import DraftSource


@dataclass(frozen=True)
class TokenLogprobs:
    """A token with its natural log probability, and the likeliest tokens of its position, best first."""

    token: int
    logprob: float | None  # None for the first token of a text: nothing comes before it
    top: tuple[tuple[int, float], ...] = ()
    source: DraftSource | None = None  # what proposed it; None for the target's own choice, and for a prompt


def compute_logprobs(logits_NV: Tensor, tokens: Sequence[int], most: Sequence[int]) -> list[TokenLogprobs]:
    """Compute the log probabilities of tokens, in one transfer to the host. The target's logits are those at
    each token's position, ids that are never emitted at -inf. `most` is per position the number of alternatives, 0 or
    more; those with probability zero are omitted.
    """
    logprobs_NV = logits_NV.float().log_softmax(-1)
    top = logprobs_NV.topk(min(max(most), logprobs_NV.shape[-1]))
    own_N1 = logprobs_NV.gather(1, torch.tensor(tokens, device=logprobs_NV.device)[:, None])
    values = torch.cat([own_N1.double(), top.values.double(), top.indices.double()], 1).tolist()
    width = top.values.shape[1]
    found = []
    for token, wanted, (own, *rest) in zip(tokens, most, values, strict=True):
        pairs = list(zip(map(int, rest[width:]), rest[:width], strict=True))[:wanted]
        found.append(TokenLogprobs(token, own, tuple(pair for pair in pairs if pair[1] > -torch.inf)))
    return found


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
