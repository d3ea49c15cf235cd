"""Laws: from logits to the probabilities that are sampled from, and drawing from them.

Shapes: N positions, V tokens of a vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.draws import Draws


@dataclass(frozen=True)
class Sampling:
    """The user's sampling transform. Temperature 0 is greedy: the limit, not another code path.

    Attributes:
        temperature: 0 or more.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches this; 1 keeps all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def law(self, logits_NV: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The probabilities that a token is drawn from, rows summing to 1, in `dtype`.

        At temperature 0 all mass is on the first of the largest logits.
        """
        logits_NV = logits_NV.to(dtype)
        if self.temperature == 0:
            return torch.zeros_like(logits_NV).scatter_(-1, logits_NV.argmax(-1, keepdim=True), 1.0)
        logits_NV = logits_NV / self.temperature
        if self.top_k:
            kth_N1 = logits_NV.topk(min(self.top_k, logits_NV.shape[-1])).values[..., -1:]
            logits_NV = logits_NV.masked_fill(logits_NV < kth_N1, -torch.inf)
        law_NV = logits_NV.softmax(-1)
        return _nucleus(law_NV, self.top_p) if self.top_p < 1 else law_NV


def _nucleus(law_NV: Tensor, top_p: float) -> Tensor:
    sorted_NV, order_NV = law_NV.sort(-1, descending=True)
    # A token stays if the mass of those before it has not yet reached top_p: the first always stays.
    dropped_NV = sorted_NV.cumsum(-1) - sorted_NV >= top_p
    kept_NV = law_NV.masked_fill(torch.zeros_like(dropped_NV).scatter(-1, order_NV, dropped_NV), 0)
    return kept_NV / kept_NV.sum(-1, keepdim=True)


def sample_rows(weights_NV: Tensor, draws: list[Draws]) -> Tensor:
    """One index per row, drawn in proportion to the row's nonnegative weights (N,).

    By inversion: the smallest index whose cumulative weight exceeds the row's uniform number, in double
    precision. Nothing is copied to the host.
    """
    uniforms = [row_draws.uniform(weights) for row_draws, weights in zip(draws, weights_NV, strict=True)]
    cumulative_NV = weights_NV.to(torch.float64).cumsum(-1)
    points_N1 = torch.tensor(uniforms, dtype=torch.float64, device=weights_NV.device)[:, None] * cumulative_NV[:, -1:]
    index_N = torch.searchsorted(cumulative_NV, points_N1, right=True)[:, 0]
    return index_N.clamp_(max=weights_NV.shape[-1] - 1)


def sample(weights_V: Tensor, draws: Draws) -> int:
    """One index drawn in proportion to nonnegative weights."""
    return int(sample_rows(weights_V[None], [draws])[0])


def entropy(law_NV: Tensor) -> Tensor:
    """Entropy of each row, in nats (N,)."""
    return torch.special.entr(law_NV).sum(-1)
