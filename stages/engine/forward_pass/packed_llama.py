"""Packed forward of Llama-like models: no modules, and no padding in the linear layers.

The new tokens of all rows are concatenated to N; only attention distinguishes rows. Keys and values are stored token by
token in one tensor per layer, so that a pass writes them with one copy, and a rollback only changes a length. Weights
and rotary embeddings are those of `stages/engine/forward_pass/packed_weights.py`.

Shapes: N new tokens, B rows, Q new tokens of the longest row, K keys, S slots of the cache, W width, H heads, G
key-value heads, E of a head, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from stages.engine.forward_pass.attention_masks import make_tree_mask, mask_chains
from stages.engine.forward_pass.forward import ForwardBatch
from stages.engine.forward_pass.packed_weights import Layer, PackedLlamaWeights
from stages.engine.forward_pass.slot_forward import SlotForward

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


def _split_rows(
    weights: PackedLlamaWeights, batch: ForwardBatch, window: int | None
) -> tuple[tuple[slice, AttentionLayout], ...]:
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


class PackedLlamaForward(SlotForward):
    """Packed forward with its own keys and values over shared weights."""

    @override
    def share(self) -> "PackedLlamaForward":
        return PackedLlamaForward(self.weights)

    @override
    def __call__(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        weights, device = self.weights, self.weights.device
        slots = [row * self._capacity + slot for row, own in enumerate(batch.slots, batch.first) for slot in own]
        line = torch.tensor([list(chain(*batch.tokens)), list(chain(*batch.positions)), slots], device=device)
        ids_N, positions_N, slots_N = line
        layout = make_layout(weights, batch, None)
        sliding = layout if weights.window is None else make_layout(weights, batch, weights.window)
        rotations_N1E = weights.rotations(positions_N, self._capacity)[:, None]
        state_NW = functional.embedding(ids_N, weights.embedding_VW)
        for layer, slides, cache_SX in zip(weights.layers, weights.slides, self._caches_SX, strict=True):
            own = sliding if slides else layout
            state_NW = self._compute_layer(layer, cache_SX, state_NW, rotations_N1E, slots_N, own)
        kept = batch.wanted_tokens
        if len(kept) < len(slots):
            state_NW = state_NW[torch.tensor(kept, dtype=torch.long, device=device)]
        state_NW = weights.normalise(state_NW, weights.norm_W)
        logits_NV = state_NW.new_empty(0, weights.outputs)
        if kept:
            logits_NV = self._place_logits(self.find_output_layer()(state_NW))
        return logits_NV, state_NW if batch.hidden else logits_NV

    def _compute_layer(
        self,
        layer: Layer,
        cache_SX: Tensor,
        state_NW: Tensor,
        rotations_N1E: Tensor,
        slots_N: Tensor,
        layout: AttentionLayout,
    ) -> Tensor:
        """Compute one transformer layer and store its new keys and values."""
        weights = self.weights
        joined = layer.query_key_value(weights.normalise(state_NW, layer.enter_norm_W))
        heads_NHE = joined.view(len(joined), -1, weights.head_size)
        self._rotate(heads_NHE, layer, rotations_N1E)
        cache_SX.index_copy_(0, slots_N, joined[:, weights.heads * weights.head_size :])
        mixed_NX = self._attend(heads_NHE[:, : weights.heads], cache_SX, layout)
        state_NW = state_NW + layer.leave(mixed_NX)
        opened = layer.gate_up(weights.normalise(state_NW, layer.inner_norm_W))
        half = opened.shape[1] // 2
        return state_NW + layer.down(functional.silu(opened[:, :half]).mul_(opened[:, half:]))

    def _rotate(self, heads_NHE: Tensor, layer: Layer, rotations_N1E: Tensor) -> None:
        """Normalise (if the model has head norms) and rotate the queries and keys in place."""
        queries, both = self.weights.heads, self.weights.heads + self.weights.key_heads
        if layer.query_norm_E is not None and layer.key_norm_E is not None:
            for part, norm_E in ((slice(0, queries), layer.query_norm_E), (slice(queries, both), layer.key_norm_E)):
                heads_NHE[:, part] = self.weights.normalise(heads_NHE[:, part], norm_E)
        turned = heads_NHE[:, :both]
        pairs = turned.float().view(len(turned), both, -1, 2) if turned.dtype != torch.float32 else None
        if pairs is None:  # in place
            torch.view_as_complex(turned.view(len(turned), both, -1, 2)).mul_(rotations_N1E)
        else:
            turned.copy_(torch.view_as_real(torch.view_as_complex(pairs) * rotations_N1E).flatten(2))

    def _attend(self, queries_NHE: Tensor, cache_SX: Tensor, layout: AttentionLayout) -> Tensor:
        """Compute the attention of the new tokens over the keys of their rows (N, H x E)."""
        if layout.parts:
            return torch.cat([self._attend(queries_NHE[line], cache_SX, part) for line, part in layout.parts])
        weights = self.weights
        by_row = cache_SX.view(self._rows, self._capacity, 2, weights.key_heads, weights.head_size)
        keys_BGKE, values_BGKE = by_row[layout.rows, layout.begin : layout.seen].permute(2, 0, 3, 1, 4)
        if layout.gather_BQ is not None:
            queries_NHE = queries_NHE[layout.gather_BQ]
        rows, groups, size = len(keys_BGKE), weights.key_heads, weights.head_size
        if layout.share == 1:
            queries_BHQE = queries_NHE.reshape(rows, -1, weights.heads, size).transpose(1, 2)
            mixed_BHQE = functional.scaled_dot_product_attention(
                queries_BHQE, keys_BGKE, values_BGKE, attn_mask=layout.mask_B1QK, enable_gqa=groups != weights.heads
            )
            mixed_NX = mixed_BHQE.transpose(1, 2).reshape(-1, weights.heads * size)
        else:
            shape = rows, -1, groups, layout.share, size
            queries_BGQE = queries_NHE.reshape(shape).transpose(1, 2).reshape(rows, groups, -1, size)
            mixed_BGQE = functional.scaled_dot_product_attention(
                queries_BGQE, keys_BGKE, values_BGKE, attn_mask=layout.mask_B1QK
            )
            mixed_NX = mixed_BGQE.view(rows, groups, -1, *shape[3:]).transpose(1, 2).reshape(-1, weights.heads * size)
        return mixed_NX if layout.scatter_N is None else mixed_NX[layout.scatter_N]
