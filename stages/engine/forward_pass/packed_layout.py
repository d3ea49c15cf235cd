"""Layouts of attention: which rows, keys and masks the new tokens of a pass have.

Shapes: N new tokens, B rows, Q new tokens of the longest row, K keys, G key-value heads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from stages.engine.forward_pass.attention_masks import make_tree_mask, mask_chains
from stages.engine.forward_pass.forward_batch import ForwardBatch
from stages.engine.forward_pass.packed_weights import PackedLlamaWeights

PADDING_WASTE = 1.6  # padded size over tokens; above it, rows one by one are faster than all padded to the longest
SHARED_QUERIES = 64  # above it, the mask that sharing repeats costs more memory than larger products save time


@dataclass(frozen=True)
class AttentionLayout:
    """Maps the concatenated new tokens of one pass to rows for attention."""

    rows: slice  # the rows of the cache that are read
    seen: int  # end of the keys of the longest row
    mask_B1QK: Tensor | None  # added to the scores; None if every query attends to every key
    # number of heads that are computed as further queries of the key head that they share: fewer and larger
    # products, faster from two queries on
    share: int = 1
    gather_BQ: Tensor | None = None  # index of the token per row and query, or None if all rows have equally many
    scatter_N: Tensor | None = None  # index among (B, Q) per token, if there is a gather
    # slices of the tokens that are computed one after the other, each with its own layout
    parts: "tuple[tuple[slice, AttentionLayout], ...]" = ()
    begin: int = 0  # place of the first key that is read; a sliding layer reads none before its windows


def make_layout(weights: PackedLlamaWeights, batch: ForwardBatch, window: int | None) -> AttentionLayout:
    """Lay out the new tokens for layers that attend to the last `window` tokens, or to all.

    Keys are read from the window of the first cached or new token on: in a tree too, no token's position is before
    the first new one's, and no key's slot is before its position.
    """
    device, counts, starts, seen = weights.device, batch.counts, batch.starts, batch.seen
    begin = 0 if window is None else max(0, min(starts) + 1 - window)
    rows, width = slice(batch.first, batch.first + len(counts)), max(counts)
    if weights.splits_tokens and width <= SHARED_QUERIES:
        return AttentionLayout(rows, seen, None, parts=_split_tokens(batch, window))
    if width == 1 and min(starts) == seen - 1 and min(counts) == 1:
        return AttentionLayout(rows, seen, None, begin=begin)
    if len(counts) * width > PADDING_WASTE * sum(counts):
        return AttentionLayout(rows, seen, None, parts=_split_rows(weights, batch, window))
    mask_BQK = torch.zeros(len(counts), width, seen - begin, dtype=weights.dtype, device=device)
    if batch.paths is None:
        queries_BQ1 = _ranges_by_row(starts, counts, device)[..., None]
        mask_chains(mask_BQK, queries_BQ1, range(begin, seen), window)
    else:
        allowed_BQK = make_tree_mask(starts, batch.paths, range(begin, seen), device, window=window)
        mask_BQK.masked_fill_(~allowed_BQK, -torch.inf)
    share = weights.heads // weights.key_heads if 1 < width <= SHARED_QUERIES else 1
    mask_B1QK = mask_BQK.repeat_interleave(share, 1)[:, None]
    if min(counts) == width:
        return AttentionLayout(rows, seen, mask_B1QK, share, begin=begin)
    scatter = [row * width + place for row, count in enumerate(counts) for place in range(count)]
    gather_BQ = _ranges_by_row([0, *accumulate(counts)], counts, device)
    return AttentionLayout(rows, seen, mask_B1QK, share, gather_BQ, torch.tensor(scatter, device=device), begin=begin)


def _split_tokens(batch: ForwardBatch, window: int | None) -> tuple[tuple[slice, AttentionLayout], ...]:
    """Make one layout per token.

    Attention over several queries differs in the last bit from that over one; rounding the inputs of the next
    linear layer can make a whole step of it. One query at a time, a token has the same outputs bit for bit whatever
    is computed with it.
    """
    places = [(row, slot + 1) for row, slots in enumerate(batch.slots, batch.first) for slot in slots]
    return tuple(
        (
            slice(number, number + 1),
            AttentionLayout(slice(row, row + 1), seen, None, begin=0 if window is None else max(0, seen - window)),
        )
        for number, (row, seen) in enumerate(places)
    )


def _split_rows(
    weights: PackedLlamaWeights, batch: ForwardBatch, window: int | None
) -> tuple[tuple[slice, AttentionLayout], ...]:
    """Make one layout per row that has new tokens."""
    return tuple(
        (slice(end - count, end), make_layout(weights, batch.take_row(row), window))
        for row, (count, end) in enumerate(zip(batch.counts, accumulate(batch.counts), strict=True))
        if count
    )


def _ranges_by_row(begins: Iterable[int], counts: Sequence[int], device: torch.device) -> Tensor:
    """Return a range per row (B, Q), padded with 0; outputs of the padding are dropped after attention."""
    width = max(counts)
    lines = [
        [begin + place if place < count else 0 for place in range(width)]
        for begin, count in zip(begins, counts, strict=False)
    ]
    return torch.tensor(lines, device=device)
