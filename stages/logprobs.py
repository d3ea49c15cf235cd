"""Log probabilities of emitted tokens, as the interfaces of other engines report them.

They are those of the target's own law, before temperature and the other transforms of sampling.

Shapes: N places, V target tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """An emitted token with its natural log probability, and the likeliest tokens of its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits_NV: Tensor, tokens: Sequence[int], most: Sequence[int]) -> list[TokenLogprobs]:
    """What the target thought of tokens at their places, in one transfer to the host for all of them.

    Args:
        logits_NV: the target's logits at each of the tokens' places; ids that are never emitted at -inf.
        tokens: N emitted ids.
        most: per place the alternatives wanted, 0 or more; those with probability zero are left out.
    """
    logprobs_NV = logits_NV.float().log_softmax(-1)
    top = logprobs_NV.topk(min(max(most), logprobs_NV.shape[-1]))
    own_N1 = logprobs_NV.gather(1, torch.tensor(tokens, device=logprobs_NV.device)[:, None])
    values = torch.cat([own_N1.double(), top.values.double(), top.indices.double()], 1).tolist()
    width = top.values.shape[1]
    return [
        TokenLogprobs(token, own, _alternatives(rest[:width], rest[width:], wanted))
        for token, wanted, (own, *rest) in zip(tokens, most, values, strict=True)
    ]


def _alternatives(logprobs: Sequence[float], ids: Sequence[float], wanted: int) -> tuple[tuple[int, float], ...]:
    pairs = list(zip(ids, logprobs, strict=True))[:wanted]
    return tuple((int(token), logprob) for token, logprob in pairs if logprob > float("-inf"))
