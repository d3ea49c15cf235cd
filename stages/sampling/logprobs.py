"""Log probabilities of emitted tokens, as the interfaces of other engines report them.

They are those of the target's own distribution, before temperature and the other transforms of sampling.

Shapes: N positions, V target tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """An emitted token with its natural log probability, and the likeliest tokens of its position, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def compute_logprobs(logits_NV: Tensor, tokens: Sequence[int], most: Sequence[int]) -> list[TokenLogprobs]:
    """Compute the log probabilities of emitted tokens, in one transfer to the host. The target's logits are those at
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
