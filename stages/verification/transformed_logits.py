"""Apply the transforms of each row to the target's logits: penalties, biases, constraints.

Shapes: N positions of all rows, V target tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stages.contract.blocks import Proposal


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
    that plain decoding would draw from there. The logits themselves are returned if no row has a transform.

    Args:
        batch: the proposals.
        logits_NV: the target's logits, rows joined: after the text, then after each verifiable token.
        starts: the first line of each row.
        dtype: precision of the transformed logits.
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
