"""The target's distributions at the places of a batch: after each row's transforms and sampling parameters.

Shapes: N positions of all rows, M positions of one row, V target tokens.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from stages.contract.blocks import Proposal
from stages.sampling.distributions import OneHotRows, find_peaks, to_probs
from stages.sampling.drawing import RowDistributions
from stages.sampling.params import SamplingParams

NOT_READ = torch.empty(0, 0)


def proposed_prefixes(proposal: Proposal) -> list[tuple[int, ...]]:
    """Return the proposed tokens before each place of a row: of the text's end, then after each verifiable token.

    >>> from stages.contract.blocks import Candidate, Draft, TokenTree
    >>> from store.events import DraftSource
    >>> def candidate(token, parent, depth):
    ...     return Candidate(token, parent, depth, 0.5, DraftSource.MEMORY, 3, 1)
    >>> tree = TokenTree((candidate(5, -1, 0), candidate(6, 0, 1), candidate(7, 0, 1), candidate(8, -1, 0)))
    >>> proposed_prefixes(Proposal(Draft(None, (), torch.zeros(0, 1), (), None, (), tree=tree), ()))
    [(), (5,), (5, 6), (5, 7), (8,)]
    """
    tree, prefixes = proposal.draft.tree, list[tuple[int, ...]]([()])
    parents = tree.parents if tree else range(-1, len(proposal.verifiable) - 1)
    for parent, token in zip(parents, proposal.verifiable, strict=True):
        prefixes.append((*prefixes[parent + 1], token))
    return prefixes


def transform_logits(batch: Sequence[Proposal], logits_NV: Tensor, starts: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the logits after the transforms of each row, computed in `dtype`.

    A place has the row's emitted tokens and the proposed ones before it as history, so that its distribution is the one
    that plain decoding would draw from there. The logits themselves are returned if no row has a transform. The
    target's logits are those after the text and after each verifiable token, rows joined.
    """
    if not any(proposal.draft.row.transforms for proposal in batch):
        return logits_NV
    logits_NV = logits_NV.to(dtype, copy=True)
    for proposal, start in zip(batch, starts, strict=False):
        row = proposal.draft.row
        if not row.transforms:
            continue
        emitted = row.tokens[row.prompt_length :]
        for line, prefix in enumerate(proposed_prefixes(proposal), start):
            for transform in row.transforms:
                transform.apply(logits_NV[line], [*emitted, *prefix])
    return logits_NV


class TargetDistributions:
    """Computes the distributions that tokens are drawn from, given the parameters of rows that have none themselves."""

    def __init__(self, sampling: SamplingParams, dtype: torch.dtype) -> None:
        self._sampling, self._dtype, self._certain = sampling, dtype, OneHotRows(dtype)

    def __call__(
        self, batch: Sequence[Proposal], logits_NV: Tensor, peaks_N: Tensor, starts: Sequence[int]
    ) -> tuple[Tensor, list[RowDistributions]]:
        """Return the distributions of all rows joined (N, V), valid until the next call, and those of each row.

        `peaks_N`: indices of the largest logits. Without any piece that is tested, the distributions of a batch that is
        greedy as a whole are not written.
        """
        wanted_NV = transform_logits(batch, logits_NV, starts, self._dtype)
        samplings = [one.draft.row.sampling or self._sampling for one in batch]
        if all(sampling.is_greedy for sampling in samplings):
            peaks_N = peaks_N if wanted_NV is logits_NV else find_peaks(wanted_NV)
            certain, probs_NV = peaks_N.tolist(), NOT_READ
            if any(one.tokens for one in batch):
                probs_NV = self._certain.place(peaks_N, logits_NV.shape[1])
            return probs_NV, [RowDistributions(probs_NV[a:b], certain[a:b]) for a, b in pairwise(starts)]
        lines = [own for own, one in zip(samplings, batch, strict=True) for _ in range(len(one.verifiable) + 1)]
        probs_NV = to_probs(wanted_NV, lines, self._dtype)
        own_probs = [probs_NV[start:stop] for start, stop in pairwise(starts)]
        return probs_NV, [
            _decide_by_noise(one, probs_MV) if one.draft.row.noise else RowDistributions(probs_MV)
            for one, probs_MV in zip(batch, own_probs, strict=True)
        ]


def _decide_by_noise(proposal: Proposal, probs_MV: Tensor) -> RowDistributions:
    """Draw the token of each place of a row by its noise. Its distributions become certain of them, in place, so that
    all that follows is as in greedy decoding.
    """
    row, tree = proposal.draft.row, proposal.draft.tree
    assert row.noise
    ahead = [one.depth + 1 for one in tree.candidates] if tree else range(1, len(probs_MV))
    places = [row.emitted + depth for depth in (0, *ahead)]
    picks = [row.noise.race(probs_V, place)[0].which for probs_V, place in zip(probs_MV, places, strict=True)]
    picked_M1 = torch.tensor(picks, device=probs_MV.device)[:, None]
    probs_MV.zero_().scatter_(1, picked_M1, 1.0)
    numbers = [row.noise.number(place, token) for place, token in zip(places, picks, strict=True)]
    return RowDistributions(probs_MV, picks, numbers)
