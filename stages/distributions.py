"""Laws: from logits to the probabilities that are sampled from, and drawing from them.

Shapes: N positions, V tokens of a vocabulary, K likeliest tokens.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.draws import Draws
from store.errors import ConfigError

GREEDY_BELOW = 1e-5  # a logit divided by less may leave the range of a float32
NUCLEUS = 1024  # tokens; the nuclei of language models are mostly smaller
HOTTEST = 1e6  # all but uniform; far above it a float32 has no number for the temperature


@dataclass(frozen=True)
class Sampling:
    """The user's sampling transform. Temperature 0 is greedy: the limit, not another code path.

    A batch holds the rows of many users: what is out of range is refused here, before it can spoil a pass.

    Attributes:
        temperature: 0 or more; below `GREEDY_BELOW` as 0.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches this, the likeliest always; 1 keeps all.

    Raises:
        ConfigError: one of them is out of range, or no number.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature <= HOTTEST and self.top_k >= 0 and 0 <= self.top_p <= 1):
            raise ConfigError(
                f"sampling must have a temperature from 0 to {HOTTEST:g}, top_k from 0 and top_p from 0 to 1, "
                f"got {self.temperature}, {self.top_k} and {self.top_p}"
            )

    def law(self, logits_NV: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The probabilities that a token is drawn from, rows summing to 1, in `dtype`.

        At temperature 0 all mass is on the first of the largest logits.
        """
        logits_NV = logits_NV.to(dtype)
        if self.temperature < GREEDY_BELOW:
            return torch.zeros_like(logits_NV).scatter_(-1, logits_NV.argmax(-1, keepdim=True), 1.0)
        logits_NV = logits_NV / self.temperature
        if self.top_k:
            kth_N1 = logits_NV.topk(min(self.top_k, logits_NV.shape[-1])).values[..., -1:]
            logits_NV = logits_NV.masked_fill(logits_NV < kth_N1, -torch.inf)
        law_NV = logits_NV.softmax(-1)
        return _nucleus(law_NV, self.top_p) if self.top_p < 1 else law_NV


def laws_of(logits_NV: Tensor, samplings: Sequence[Sampling], dtype: torch.dtype = torch.float32) -> Tensor:
    """The law of each line by the transform of that line: lines of equal transforms together, all in one call if equal.

    Args:
        logits_NV: as for `Sampling.law`.
        samplings: N transforms.
        dtype: of the laws.
    """
    lines: dict[Sampling, list[int]] = defaultdict(list)
    for line, sampling in enumerate(samplings):
        lines[sampling].append(line)
    if len(lines) == 1:
        return samplings[0].law(logits_NV, dtype)
    laws_NV = torch.empty_like(logits_NV, dtype=dtype)
    for sampling, own in lines.items():
        index_N = torch.tensor(own, device=logits_NV.device)
        laws_NV[index_N] = sampling.law(logits_NV[index_N], dtype)
    return laws_NV


def _nucleus(law_NV: Tensor, top_p: float) -> Tensor:
    """The nucleus is looked for among the likeliest; only laws that it does not fit into there are sorted as a whole,
    which takes ten times as long."""
    vocabulary_size = law_NV.shape[-1]
    weights_NV, fits_N = _likeliest(law_NV, law_NV.topk(min(NUCLEUS, vocabulary_size)), top_p)
    if vocabulary_size > NUCLEUS and not fits_N.all():
        wide_NV = law_NV[~fits_N]
        weights_NV[~fits_N], _ = _likeliest(wide_NV, wide_NV.sort(-1, descending=True), top_p)
    return weights_NV / weights_NV.sum(-1, keepdim=True)


def _likeliest(law_NV: Tensor, found: tuple[Tensor, Tensor], top_p: float) -> tuple[Tensor, Tensor]:
    """Of the likeliest tokens of each law (values, ids) those that stay, and whether they reach the mass together."""
    values_NK, ids_NK = found
    mass_NK = values_NK.cumsum(-1)
    # A token stays if the mass of those before it has not yet reached top_p; the first always stays.
    dropped_NK = mass_NK - values_NK >= top_p
    dropped_NK[..., 0] = False  # also of a mass of 0
    weights_NV = torch.zeros_like(law_NV).scatter_(-1, ids_NK, values_NK.masked_fill(dropped_NK, 0))
    return weights_NV, mass_NK[..., -1] >= top_p


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
