"""Distributions: from logits to the probabilities that are sampled from (drawing.py).

Shapes: N positions, V tokens of a vocabulary, K likeliest tokens.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from stages.sampling.params import SamplingParams, Transform

NUCLEUS = 1024  # tokens; the nuclei of language models are mostly smaller


def to_distribution(logits_NV: Tensor, params: SamplingParams, dtype: torch.dtype = torch.float32) -> Tensor:
    """Transform logits to the probabilities that a token is drawn from (N, V), rows summing to 1, in `dtype`.

    At temperature 0 all mass is on the first of the largest logits.
    """
    logits_NV = logits_NV.to(dtype)
    if params.is_greedy:
        return torch.zeros_like(logits_NV).scatter_(-1, find_peaks(logits_NV)[:, None], 1.0)
    if params.temperature != 1:
        logits_NV = logits_NV / params.temperature
    if params.min_p:
        least_N1 = logits_NV.amax(-1, keepdim=True) + math.log(params.min_p)
        logits_NV = logits_NV.masked_fill(logits_NV < least_N1, -torch.inf)
    if params.top_k:
        kth_N1 = logits_NV.topk(min(params.top_k, logits_NV.shape[-1])).values[..., -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < kth_N1, -torch.inf)
    distribution_NV = logits_NV.softmax(-1)
    return _nucleus(distribution_NV, params.top_p) if params.top_p < 1 else distribution_NV


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
    """Distributions that are certain of one token each, in memory that is used again: zeros are written once."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._rows_NV = torch.empty(0, 0, dtype=dtype)
        self._placed_N = torch.empty(0, dtype=torch.long)

    def place(self, ids_N: Tensor, size: int) -> Tensor:
        """Return distributions over so many tokens, certain of these (N, V). They are valid until the next call."""
        rows, count = self._rows_NV, len(ids_N)
        if len(rows) < count or rows.shape[1] != size or rows.device != ids_N.device:
            self._rows_NV = rows = torch.zeros(count, size, dtype=rows.dtype, device=ids_N.device)
        else:
            rows[: len(self._placed_N)].scatter_(1, self._placed_N[:, None], 0.0)
        self._placed_N = ids_N
        return rows[:count].scatter_(1, ids_N[:, None], 1.0)


def to_probs(logits_NV: Tensor, params: Sequence[SamplingParams], dtype: torch.dtype = torch.float32) -> Tensor:
    """Transform each line of logits by its own parameters (N of them), in one call per distinct transform."""
    lines: dict[Transform, list[int]] = defaultdict(list)
    for line, own in enumerate(params):
        lines[own.transform].append(line)
    if len(lines) == 1:
        return to_distribution(logits_NV, params[0], dtype)
    target_probs_NV = torch.empty_like(logits_NV, dtype=dtype)
    for places in lines.values():
        index_N = torch.tensor(places, device=logits_NV.device)
        target_probs_NV[index_N] = to_distribution(logits_NV[index_N], params[places[0]], dtype)
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
