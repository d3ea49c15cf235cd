"""Distributions: from logits to the probabilities that are sampled from (drawing.py).

Shapes: N positions, V tokens of a vocabulary, K likeliest tokens.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from store.errors import ConfigError

GREEDY_BELOW = 1e-5  # a logit divided by less may leave the range of a float32
NUCLEUS = 1024  # tokens; the nuclei of language models are mostly smaller
HOTTEST = 1e6  # all but uniform; far above it a float32 has no number for the temperature


@dataclass(frozen=True)
class Sampling:
    """The user's sampling transform. Temperature 0 is greedy decoding, as the limit.

    A batch holds the rows of many users: values out of range are rejected here, before they reach a forward pass.

    Attributes:
        temperature: 0 or more; below `GREEDY_BELOW` as 0.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches this, the likeliest always; 1 keeps all.
        min_p: keep the tokens with at least this share of the likeliest token's probability, before top-k and top-p; 0
            keeps all.

    Raises:
        ConfigError: a value is out of range, or not a number.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        shares = 0 <= self.top_p <= 1 and 0 <= self.min_p <= 1
        if not (0 <= self.temperature <= HOTTEST and self.top_k >= 0 and shares):
            raise ConfigError(
                f"sampling must have a temperature from 0 to {HOTTEST:g}, top_k from 0, top_p and min_p from 0 to 1, "
                f"got {self.temperature}, {self.top_k}, {self.top_p} and {self.min_p}"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, so that nothing is drawn."""
        return self.temperature < GREEDY_BELOW

    def distribution(self, logits_NV: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Transform logits to the probabilities that a token is drawn from (N, V), rows summing to 1, in `dtype`.

        At temperature 0 all mass is on the first of the largest logits.
        """
        logits_NV = logits_NV.to(dtype)
        if self.is_greedy:
            return torch.zeros_like(logits_NV).scatter_(-1, find_peaks(logits_NV)[:, None], 1.0)
        if self.temperature != 1:
            logits_NV = logits_NV / self.temperature
        if self.min_p:
            least_N1 = logits_NV.amax(-1, keepdim=True) + math.log(self.min_p)
            logits_NV = logits_NV.masked_fill(logits_NV < least_N1, -torch.inf)
        if self.top_k:
            kth_N1 = logits_NV.topk(min(self.top_k, logits_NV.shape[-1])).values[..., -1:]
            logits_NV = logits_NV.masked_fill(logits_NV < kth_N1, -torch.inf)
        distribution_NV = logits_NV.softmax(-1)
        return _nucleus(distribution_NV, self.top_p) if self.top_p < 1 else distribution_NV


def find_peaks(logits_NV: Tensor) -> Tensor:
    """Return the first of the largest numbers of each line (N,); of a line with NaN, the first NaN.

    On a CPU by NumPy, which takes a sixth of torch's time for seven lines of 49,152.
    """
    if logits_NV.device.type != "cpu" or logits_NV.dtype not in (torch.float32, torch.float64) or not len(logits_NV):
        return logits_NV.argmax(-1)
    return torch.from_numpy(logits_NV.detach().numpy().argmax(-1))


def read_peaks(logits_NV: Tensor, peaks_N: Tensor) -> list[float]:
    """Return the largest number of each line, given its place."""
    if logits_NV.device.type != "cpu" or logits_NV.dtype not in (torch.float32, torch.float64):
        return logits_NV.gather(1, peaks_N[:, None])[:, 0].tolist()
    values = logits_NV.detach().numpy()
    return [float(values[line, place]) for line, place in enumerate(peaks_N.tolist())]


class OneHotRows:
    """Distributions that are certain of one token each, in memory that is used again: zeros are written once.

    Args:
        dtype: of the distributions.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._rows_NV = torch.empty(0, 0, dtype=dtype)
        self._placed_N = torch.empty(0, dtype=torch.long)

    def place(self, ids_N: Tensor, size: int) -> Tensor:
        """Return distributions over so many tokens, certain of these (N, V). They are valid until the next call.

        Args:
            ids_N: one token per distribution.
            size: V.
        """
        rows, count = self._rows_NV, len(ids_N)
        if len(rows) < count or rows.shape[1] != size or rows.device != ids_N.device:
            self._rows_NV = rows = torch.zeros(count, size, dtype=rows.dtype, device=ids_N.device)
        else:
            rows[: len(self._placed_N)].scatter_(1, self._placed_N[:, None], 0.0)
        self._placed_N = ids_N
        return rows[:count].scatter_(1, ids_N[:, None], 1.0)


def to_probs(logits_NV: Tensor, samplings: Sequence[Sampling], dtype: torch.dtype = torch.float32) -> Tensor:
    """Transform each line of logits by its own transform, in one call per distinct transform.

    Args:
        logits_NV: as for `Sampling.distribution`.
        samplings: N transforms.
        dtype: precision of the distributions.
    """
    lines: dict[Sampling, list[int]] = defaultdict(list)
    for line, sampling in enumerate(samplings):
        lines[sampling].append(line)
    if len(lines) == 1:
        return samplings[0].distribution(logits_NV, dtype)
    target_probs_NV = torch.empty_like(logits_NV, dtype=dtype)
    for sampling, own in lines.items():
        index_N = torch.tensor(own, device=logits_NV.device)
        target_probs_NV[index_N] = sampling.distribution(logits_NV[index_N], dtype)
    return target_probs_NV


def _nucleus(distribution_NV: Tensor, top_p: float) -> Tensor:
    """Keep the nucleus of each distribution and normalise.

    The nucleus is searched among the likeliest tokens; only distributions whose nucleus is larger are sorted as a
    whole, which takes ten times as long.
    """
    vocabulary_size = distribution_NV.shape[-1]
    weights_NV, fits_N = _likeliest(distribution_NV, distribution_NV.topk(min(NUCLEUS, vocabulary_size)), top_p)
    if vocabulary_size > NUCLEUS and not fits_N.all():
        wide_NV = distribution_NV[~fits_N]
        weights_NV[~fits_N], _ = _likeliest(wide_NV, wide_NV.sort(-1, descending=True), top_p)
    return weights_NV / weights_NV.sum(-1, keepdim=True)


def _likeliest(distribution_NV: Tensor, found: tuple[Tensor, Tensor], top_p: float) -> tuple[Tensor, Tensor]:
    """Return the weights of the kept tokens among the likeliest (values, ids), and whether these suffice."""
    values_NK, ids_NK = found
    mass_NK = values_NK.cumsum(-1)
    # A token stays if the mass of those before it has not yet reached top_p; the first always stays.
    dropped_NK = mass_NK - values_NK >= top_p
    dropped_NK[..., 0] = False  # also of a mass of 0
    weights_NV = torch.zeros_like(distribution_NV).scatter_(-1, ids_NK, values_NK.masked_fill(dropped_NK, 0))
    return weights_NV, mass_NK[..., -1] >= top_p


def entropy(distribution_NV: Tensor) -> Tensor:
    """Return the entropy of each row, in nats (N,)."""
    tiny = torch.finfo(distribution_NV.dtype).tiny  # a probability of 0 contributes 0
    entropies_N: Tensor = -(distribution_NV * distribution_NV.clamp(min=tiny).log()).sum(-1)
    return entropies_N


def acceptance_probability(drafter: float, target: float) -> float:
    """Return min(1, target / drafter), the probability that one level is passed.

    0 if the drafter's probability is NaN, infinite or 0. Nothing can be drawn from such a distribution, so the ratio
    has no meaning; after a rejection the residual is the target's own distribution.
    """
    return min(1.0, target / drafter) if 0 < drafter < inf and target > 0 else 0.0
