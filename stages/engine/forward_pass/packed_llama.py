"""Packed forward of Llama-like models: no modules, and no padding in the linear layers.

The new tokens of all rows are concatenated to N; only attention distinguishes rows. Keys and values are stored token by
token in one tensor per layer, so that a pass writes them with one copy, and a rollback only changes a length. Weights
and rotary embeddings are those of `stages/engine/forward_pass/packed_weights.py`.

Shapes: N new tokens, B rows, Q new tokens of the longest row, K keys, S slots of the cache, W width, H heads, G
key-value heads, E of a head, V vocabulary.
"""

from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from stages.engine.forward_pass.forward_batch import ForwardBatch
from stages.engine.forward_pass.kernels import Kernel  # noqa: TC001
from stages.engine.forward_pass.packed_layout import AttentionLayout, make_layout
from stages.engine.forward_pass.packed_weights import Layer, PackedLlamaWeights
from stages.engine.forward_pass.slot_forward import SlotForward


class PackedLlamaForward(SlotForward):
    """Packed forward with its own keys and values over shared weights."""

    def __init__(self, weights: PackedLlamaWeights) -> None:
        super().__init__(weights)
        self._output: tuple[int, Tensor | None, Kernel] | None = None  # a version of the weights and its output layer

    @override
    def share(self) -> "PackedLlamaForward":
        return PackedLlamaForward(self.weights)

    @property
    @override
    def reads_trees(self) -> bool:
        """Equal bits need one query at a time, see `_split_tokens`, which attends to all keys before it."""
        return not self.weights.splits_tokens

    @override
    def __call__(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        weights, device = self.weights, self.weights.device
        if batch.paths is not None and not self.reads_trees:
            raise ValueError(f"{self.name} reads chains, not trees: each token is computed by itself")
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
        logits_NV = self._logits(state_NW) if kept else state_NW.new_empty(0, weights.outputs)
        return logits_NV, state_NW if batch.hidden else logits_NV

    def _logits(self, state_NW: Tensor) -> Tensor:
        if self._output is None or self._output[0] != self.weights.version or self._output[1] is not self._ids:
            self._output = self.weights.version, self._ids, self.weights.make_output_layer(self._ids)
        return self._place_logits(self._output[2](state_NW))

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
