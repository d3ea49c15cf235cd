"""A lean forward of Llama-like models: no modules, no padding in the linear layers, every weight laid out to be fast.

All new tokens of all rows stand in one line of N; only attention looks at rows. Keys and values lie token by token in
one tensor per layer, so that a pass writes them with one copy and a row's tokens are taken back by forgetting their
number. Rotary positions turn neighbouring numbers as one complex product: the rows of the query and key weights are
reordered for it once, which no product of a query with a key can tell.

Shapes: N new tokens, B rows, Q new tokens of the longest row, K keys, S slots of the cache, W width, H heads, G
key-value heads, E of a head, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor
from torch.nn import functional

from stages.huggingface import GROWTH
from stages.lean_weights import Layer, LeanWeights
from stages.linear import Kernel

PADDING_WASTE = 1.6  # places over tokens: beyond, a row by itself is faster than all padded to the longest
SHARED_QUERIES = 64  # beyond, the mask that sharing repeats costs more memory than larger products save time


@dataclass(frozen=True)
class _Layout:
    """How the line of new tokens becomes rows for attention, in one pass.

    Attributes:
        rows: which rows of the cache are read.
        seen: keys that the longest row sees.
        mask_B1QK: what is added to the scores; None where every query sees every key.
        share: heads that are counted as further queries of the key head that they share: fewer and larger products,
            faster from two queries on.
        gather_BQ: per row and place the token in the line, or None if all rows have equally many.
        scatter_N: per token its place among (B, Q), when there is a gather.
        parts: stretches of the line that are looked at one after the other, each with a layout of its own.
    """

    rows: slice
    seen: int
    mask_B1QK: Tensor | None
    share: int = 1
    gather_BQ: Tensor | None = None
    scatter_N: Tensor | None = None
    parts: "tuple[tuple[slice, _Layout], ...]" = ()


class LeanForward:
    """See `Forward`. Keys and values of its own over shared weights."""

    def __init__(self, weights: LeanWeights) -> None:
        self.weights = weights
        self._caches_SX: list[Tensor] = []  # per layer and slot: keys of all heads, then values
        self._rows = self._capacity = 0
        self._ids: Tensor | None = None
        self._output: tuple[int, Kernel] | None = None  # the output layer as of a version of the weights

    @property
    def name(self) -> str:
        """See `Forward`."""
        return self.weights.describe()

    def refresh(self) -> None:
        """See `Forward`."""
        self.weights.refresh()

    @property
    def cache_bytes(self) -> int:
        """Memory of the keys and values."""
        return sum(cache.numel() * cache.element_size() for cache in self._caches_SX)

    @property
    def capacity(self) -> int:
        """See `Forward`."""
        return self._capacity

    def kept(self, place: int, length: int) -> list[Tensor]:
        """See `Forward`."""
        begin = place * self._capacity
        return [cache_SX[begin : begin + length] for cache_SX in self._caches_SX]

    def put(self, place: int, kept: Sequence[Tensor]) -> None:
        """See `Forward`."""
        begin = place * self._capacity
        for cache_SX, slots in zip(self._caches_SX, kept, strict=True):
            cache_SX[begin : begin + len(slots)] = slots

    def reserve(self, rows: int, capacity: int) -> None:
        """See `Forward`. Rows as needed; tokens by a sixteenth at least, to the model's longest text at most."""
        if rows <= self._rows and capacity <= self._capacity:
            return
        old_rows, old_capacity = self._rows, self._capacity
        if capacity > old_capacity:
            self._capacity = max(capacity, min(old_capacity + old_capacity // GROWTH, self.weights.longest))
        self._rows = max(rows, old_rows)
        width = 2 * self.weights.key_heads * self.weights.head_size
        shape = self._rows, self._capacity, width
        caches = [torch.zeros(shape, dtype=self.weights.dtype, device=self.weights.device) for _ in self.weights.layers]
        for new, old in zip(caches, self._caches_SX, strict=False):
            new[:old_rows, :old_capacity] = old.view(old_rows, old_capacity, width)
        self._caches_SX = [cache.view(-1, width) for cache in caches]

    def move(self, source: int, destination: int) -> None:
        """See `Forward`."""
        for cache_SX in self._caches_SX:
            by_row = cache_SX.view(self._rows, self._capacity, -1)
            by_row[destination] = by_row[source]

    def __call__(
        self, first: int, tokens: Sequence[Sequence[int]], starts: Sequence[int], wanted: Sequence[int], *, hidden: bool
    ) -> tuple[Tensor, Tensor]:
        """See `Forward`."""
        weights, device = self.weights, self.weights.device
        places = [range(start, start + len(new)) for start, new in zip(starts, tokens, strict=True)]
        slots = [(first + row) * self._capacity + place for row, own in enumerate(places) for place in own]
        line = torch.tensor([list(chain(*tokens)), list(chain(*places)), slots], device=device)
        ids_N, positions_N, slots_N = line
        layout = self._layout(first, tokens, starts)
        turns_N1E = weights.turns(positions_N, self._capacity)[:, None]
        state_NW = functional.embedding(ids_N, weights.embedding_VW)
        for layer, cache_SX in zip(weights.layers, self._caches_SX, strict=True):
            state_NW = self._read(layer, cache_SX, state_NW, turns_N1E, slots_N, layout)
        kept = _wanted(tokens, wanted)
        if len(kept) < len(slots):
            state_NW = state_NW[torch.tensor(kept, dtype=torch.long, device=device)]
        state_NW = functional.rms_norm(state_NW, state_NW.shape[-1:], weights.norm_W, weights.eps)
        logits_NV = self._logits(state_NW) if kept else state_NW.new_empty(0, weights.outputs)
        return logits_NV, state_NW if hidden else logits_NV

    def restrict(self, ids: Sequence[int] | None) -> None:
        """From now on compute the logits of these ids alone, all others are minus infinity; None for all."""
        self._ids = None if ids is None else torch.tensor(ids, dtype=torch.long, device=self.weights.device)
        self._output = None

    def _logits(self, state_NW: Tensor) -> Tensor:
        if self._output is None or self._output[0] != self.weights.version:
            self._output = self.weights.version, self.weights.logits_of(self._ids)
        logits_NV = self._output[1](state_NW)
        if self._ids is None:
            return logits_NV
        return state_NW.new_full((len(state_NW), self.weights.outputs), -torch.inf).index_copy_(1, self._ids, logits_NV)

    def _read(
        self, layer: Layer, cache_SX: Tensor, state_NW: Tensor, turns_N1E: Tensor, slots_N: Tensor, layout: _Layout
    ) -> Tensor:
        """One layer."""
        weights, width = self.weights, state_NW.shape[-1:]
        joined = layer.query_key_value(functional.rms_norm(state_NW, width, layer.enter_norm_W, weights.eps))
        heads_NHE = joined.view(len(joined), -1, weights.head_size)
        self._rotate(heads_NHE, layer, turns_N1E)
        cache_SX.index_copy_(0, slots_N, joined[:, weights.heads * weights.head_size :])
        mixed_NX = self._attend(heads_NHE[:, : weights.heads], cache_SX, layout)
        state_NW = state_NW + layer.leave(mixed_NX)
        opened = layer.gate_up(functional.rms_norm(state_NW, width, layer.inner_norm_W, weights.eps))
        half = opened.shape[1] // 2
        return state_NW + layer.down(functional.silu(opened[:, :half]).mul_(opened[:, half:]))

    def _rotate(self, heads_NHE: Tensor, layer: Layer, turns_N1E: Tensor) -> None:
        """Normalise, if the model does, and rotate the queries and keys where they stand."""
        queries, both = self.weights.heads, self.weights.heads + self.weights.key_heads
        if layer.query_norm_E is not None and layer.key_norm_E is not None:
            for part, norm_E in ((slice(0, queries), layer.query_norm_E), (slice(queries, both), layer.key_norm_E)):
                heads_NHE[:, part] = functional.rms_norm(heads_NHE[:, part], norm_E.shape, norm_E, self.weights.eps)
        turned = heads_NHE[:, :both]
        pairs = turned.float().view(len(turned), both, -1, 2) if turned.dtype != torch.float32 else None
        if pairs is None:  # in place
            torch.view_as_complex(turned.view(len(turned), both, -1, 2)).mul_(turns_N1E)
        else:
            turned.copy_(torch.view_as_real(torch.view_as_complex(pairs) * turns_N1E).flatten(2))

    def _attend(self, queries_NHE: Tensor, cache_SX: Tensor, layout: _Layout) -> Tensor:
        """Attention of the new tokens over what their rows have read (N, H x E)."""
        if layout.parts:
            return torch.cat([self._attend(queries_NHE[line], cache_SX, part) for line, part in layout.parts])
        weights = self.weights
        by_row = cache_SX.view(self._rows, self._capacity, 2, weights.key_heads, weights.head_size)
        keys_BGKE, values_BGKE = by_row[layout.rows, : layout.seen].permute(2, 0, 3, 1, 4)
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

    def _layout(self, first: int, tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> _Layout:
        device = self.weights.device
        counts = [len(new) for new in tokens]
        seen = max(start + count for start, count in zip(starts, counts, strict=True))
        rows, width = slice(first, first + len(tokens)), max(counts)
        if width == 1 and min(starts) == seen - 1 and min(counts) == 1:
            return _Layout(rows, seen, None)
        if len(counts) * width > PADDING_WASTE * sum(counts):
            return _Layout(rows, seen, None, parts=self._alone(first, tokens, starts))

        def by_row(begins: Iterable[int]) -> Tensor:
            """A rising line of numbers per row; what stands where a row has no token is dropped after attention."""
            lines = [
                [begin + place if place < count else 0 for place in range(width)]
                for begin, count in zip(begins, counts, strict=False)
            ]
            return torch.tensor(lines, device=device)

        mask_BQK = torch.zeros(len(counts), width, seen, dtype=self.weights.dtype, device=device)
        mask_BQK.masked_fill_(torch.arange(seen, device=device) > by_row(starts)[..., None], -torch.inf)
        share = self.weights.heads // self.weights.key_heads if 1 < width <= SHARED_QUERIES else 1
        mask_B1QK = mask_BQK.repeat_interleave(share, 1)[:, None]
        if min(counts) == width:
            return _Layout(rows, seen, mask_B1QK, share)
        scatter = [row * width + place for row, count in enumerate(counts) for place in range(count)]
        gather_BQ = by_row([0, *accumulate(counts)])
        return _Layout(rows, seen, mask_B1QK, share, gather_BQ, torch.tensor(scatter, device=device))

    def _alone(
        self, first: int, tokens: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> tuple[tuple[slice, _Layout], ...]:
        """Every row that reads anything by itself."""
        ends = list(accumulate(map(len, tokens)))
        return tuple(
            (slice(end - len(new), end), self._layout(first + row, [new], [start]))
            for row, (new, start, end) in enumerate(zip(tokens, starts, ends, strict=True))
            if new
        )


def _wanted(tokens: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[int]:
    """Where in the line the last `wanted[b]` tokens of each row stand."""
    kept: list[int] = []
    end = 0
    for new, number in zip(tokens, wanted, strict=True):
        end += len(new)
        kept.extend(range(end - number, end))
    return kept
