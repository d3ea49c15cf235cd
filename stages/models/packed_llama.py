"""Packed forward of Llama-like models: no modules, no padding in the linear layers, every weight in its fastest layout.

The new tokens of all rows are concatenated to N; only attention distinguishes rows. Keys and values are stored token by
token in one tensor per layer, so that a pass writes them with one copy, and a rollback only changes a length. Rotary
embeddings rotate neighbouring numbers as one complex product: the rows of the query and key weights are reordered for
it once, which leaves every product of a query with a key unchanged.

Query, key and value projections are one matrix, and so are the gate and up projections. Every matrix has the kernel
that is fastest for it on this machine.

Shapes: N new tokens, B rows, Q new tokens of the longest row, K keys, S slots of the cache, W width, H heads, G
key-value heads, E of a head, V vocabulary, P positions, I inputs, O outputs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from stages.models.attention_masks import find_branching_paths, find_positions, make_tree_mask, mask_chains
from stages.models.forward import Forward
from stages.models.linear import Kernel, KernelMaker, Matrix, join_matrices
from stages.models.measurements import Measurements
from stages.models.row_cache import GROWTH
from stages.quantisation.modules import count_attached, has_groups

ARCHITECTURES = {"llama", "mistral", "qwen2", "qwen3"}
FIXED_ROTARY = {"default", "linear", "llama3"}  # positions whose frequencies do not depend on the text's length
PADDING_WASTE = 1.6  # padded size over tokens; above it, rows one by one are faster than all padded to the longest
SHARED_QUERIES = 64  # above it, the mask that sharing repeats costs more memory than larger products save time


def has_packed_forward(model: Any) -> bool:
    """Check whether the packed forward supports this architecture. `prove_forward` compares its outputs."""
    config = model.config
    return (
        config.model_type in ARCHITECTURES
        and getattr(config, "quantization_config", None) is None
        and config.hidden_act == "silu"
        and getattr(model.model.rotary_emb, "rope_type", None) in FIXED_ROTARY
        and model.model.rotary_emb.inv_freq.shape[0] * 2 == model.model.layers[0].self_attn.head_dim
    )


def choose_weights(model: Any) -> str:
    """Return the format of weights for `auto`: `int4` if most weights of its matrices were stored in four bits, and the
    packed forward can compute with them; else `fastest`.
    """
    few, more = count_attached(model)
    return "int4" if few > more and model.device.type == "cpu" and has_packed_forward(model) else "fastest"


@dataclass(frozen=True)
class Layer:
    """The kernels and norms of one transformer layer."""

    enter_norm_W: Tensor
    query_key_value: Kernel
    query_norm_E: Tensor | None
    key_norm_E: Tensor | None
    leave: Kernel
    inner_norm_W: Tensor
    gate_up: Kernel
    down: Kernel


class PackedLlamaWeights:
    """A model's weights for the packed forward; several forwards, each with its own cache, may share them.

    Args:
        model: of one of the `ARCHITECTURES`.
        weights: format of the weights, see `KernelMaker`.
        measurements: store of the measured choices.
        one_kernel: whether a token's outputs must not depend on what else a pass computes: one kernel for all numbers
            of rows, and attention for one query at a time.
    """

    def __init__(self, model: Any, weights: str, measurements: Measurements, *, one_kernel: bool = False) -> None:
        self.model, self._one_kernel = model, one_kernel
        self.splits_tokens = one_kernel  # see `_split_tokens`
        self._kernels = KernelMaker(
            weights, one_kernel=one_kernel, quantise=not has_groups(model), measurements=measurements
        )
        attention = model.model.layers[0].self_attn
        self.head_size: int = attention.head_dim
        self.heads: int = model.config.num_attention_heads
        self.key_heads: int = model.config.num_key_value_heads
        self.eps = torch.tensor(model.model.norm.variance_epsilon, dtype=torch.float64, device=model.device)
        self.dtype, self.device = model.dtype, model.device
        self.longest: int = model.config.max_position_embeddings
        kinds = getattr(model.config, "layer_types", None) or ["sliding_attention"] * len(model.model.layers)
        self.slides = [kind == "sliding_attention" for kind in kinds]
        self._rotations_PE = torch.empty(0, self.head_size // 2, dtype=torch.complex64, device=self.device)
        self.outputs: int = model.lm_head.weight.shape[0]
        self.version = 0  # incremented whenever the weights are packed
        self.refresh()

    @torch.inference_mode()
    def refresh(self) -> None:
        """Pack the weights again after they changed."""
        core = self.model.model
        self.embedding_VW: Tensor = core.embed_tokens.weight
        self.layers = [self._make_layer(layer) for layer in core.layers]
        self.norm_W: Tensor = core.norm.weight
        self.version += 1

    @torch.inference_mode()
    def make_output_layer(self, ids: Tensor | None) -> Kernel:
        """Make the output layer, or its rows of these ids only. Not made in advance: a pruned forward needs no full
        one.
        """
        matrix = self._kernels.read(self.model.lm_head, codes=False)
        return self._kernels.make_output(matrix if ids is None else matrix.take(ids))

    def rotations(self, positions_N: Tensor, longest: int) -> Tensor:
        """Return, per position, the complex numbers that rotate neighbouring pairs (N, E / 2).

        Args:
            positions_N: below `longest`.
            longest: number of positions in the table.
        """
        if len(self._rotations_PE) < longest:
            self._rotations_PE = self._make_rotations(longest)
        return self._rotations_PE[positions_N]

    def _make_rotations(self, longest: int) -> Tensor:
        positions = torch.arange(longest, device=self.device)[None]
        probe = torch.zeros(1, device=self.device)
        cos_1PE, sin_1PE = self.model.model.rotary_emb(probe, positions)
        half = self.head_size // 2
        return torch.complex(cos_1PE[0, :, :half].float(), sin_1PE[0, :, :half].float())

    @property
    def window(self) -> int | None:
        """Number of tokens that a sliding layer attends to, its own included; None if no layer slides."""
        window: int | None = getattr(self.model.config, "sliding_window", None)
        return window if any(self.slides) else None

    @property
    def bytes_per_token(self) -> int:
        """Size of the keys and values of one token in all layers."""
        return len(self.layers) * 2 * self.key_heads * self.head_size * torch.finfo(self.dtype).bits // 8

    def normalise(self, x_NX: Tensor, weight_X: Tensor) -> Tensor:
        """Divide by the root of the mean square over the last dimension, and scale.

        In float32 by five operations: for one token of width 576 they take 11 microseconds, torch's own 21.
        """
        if x_NX.dtype != torch.float32:
            return functional.rms_norm(x_NX, weight_X.shape, weight_X, float(self.eps))
        norm_N1 = torch.linalg.vector_norm(x_NX, dim=-1, keepdim=True)
        return x_NX * torch.addcmul(self.eps, norm_N1, norm_N1, value=1 / x_NX.shape[-1]).rsqrt_() * weight_X

    def describe(self) -> str:
        """Describe the formats of the weights in readable words."""
        single = " with one kernel for all rows" if self._one_kernel else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"packed forward{single}, {self._kernels.describe()} weights, {dtype}"

    def _make_layer(self, layer: Any) -> Layer:
        attention, inner = layer.self_attn, layer.mlp
        read, make = self._kernels.read, self._kernels.make
        turned = [self._interleave(attention.q_proj), self._interleave(attention.k_proj)]
        return Layer(
            layer.input_layernorm.weight,
            make(join_matrices([*turned, read(attention.v_proj)])),
            self._head_norm(attention, "q_norm"),
            self._head_norm(attention, "k_norm"),
            make(read(attention.o_proj)),
            layer.post_attention_layernorm.weight,
            make(join_matrices([read(inner.gate_proj), read(inner.up_proj)])),
            make(read(inner.down_proj)),
        )

    def _interleave(self, projection: Any) -> Matrix:
        """Interleave the two halves of every head in weights and bias, so that rotated pairs are neighbours."""
        matrix = self._kernels.read(projection)
        order = self._pairs.repeat(len(matrix.weight_OI) // self.head_size)
        return matrix.take(order + torch.arange(len(order), device=order.device) // self.head_size * self.head_size)

    def _head_norm(self, attention: Any, name: str) -> Tensor | None:
        norm = getattr(attention, name, None)
        return None if norm is None else norm.weight.detach()[self._pairs]

    @property
    def _pairs(self) -> Tensor:
        half = torch.arange(self.head_size // 2, device=self.device)
        return torch.stack([half, half + self.head_size // 2], dim=1).reshape(-1)


@dataclass(frozen=True)
class _Layout:
    """Maps the concatenated new tokens of one pass to rows for attention.

    Attributes:
        rows: the rows of the cache that are read.
        seen: end of the keys of the longest row.
        mask_B1QK: added to the scores; None if every query attends to every key.
        share: number of heads that are computed as further queries of the key head that they share: fewer and larger
            products, faster from two queries on.
        gather_BQ: index of the token per row and query, or None if all rows have equally many.
        scatter_N: index among (B, Q) per token, if there is a gather.
        parts: slices of the tokens that are computed one after the other, each with its own layout.
        begin: place of the first key that is read; a sliding layer reads none before its windows.
    """

    rows: slice
    seen: int
    mask_B1QK: Tensor | None
    share: int = 1
    gather_BQ: Tensor | None = None
    scatter_N: Tensor | None = None
    parts: "tuple[tuple[slice, _Layout], ...]" = ()
    begin: int = 0


class PackedLlamaForward(Forward):
    """Packed forward with its own keys and values over shared weights."""

    cuts_rows = True

    def __init__(self, weights: PackedLlamaWeights) -> None:
        self.weights = weights
        self._caches_SX: list[Tensor] = []  # per layer and slot: keys of all heads, then values
        self._rows = self._capacity = 0
        self._ids: Tensor | None = None
        self._output: tuple[int, Kernel] | None = None  # a version of the weights and its output layer

    @property
    @override
    def name(self) -> str:
        return self.weights.describe()

    @override
    def refresh(self) -> None:
        self.weights.refresh()

    @override
    def share(self) -> "PackedLlamaForward":
        return PackedLlamaForward(self.weights)

    @property
    @override
    def cache_bytes(self) -> int:
        return sum(cache.numel() * cache.element_size() for cache in self._caches_SX)

    @property
    @override
    def capacity(self) -> int:
        return self._capacity

    @property
    @override
    def reads_trees(self) -> bool:
        """Equal bits need one query at a time, see `_split_tokens`, which attends to all keys before it."""
        return not self.weights.splits_tokens

    @override
    def read_cache(self, place: int, length: int) -> list[Tensor]:
        begin = place * self._capacity
        return [cache_SX[begin : begin + length] for cache_SX in self._caches_SX]

    @override
    def write_cache(self, place: int, kept: Sequence[Tensor], start: int = 0) -> None:
        begin = place * self._capacity + start
        for cache_SX, slots in zip(self._caches_SX, kept, strict=True):
            cache_SX[begin : begin + len(slots)] = slots

    @override
    def reserve(self, rows: int, capacity: int) -> None:
        """Grow the rows as needed, their capacity by at least a sixteenth, up to the model's longest text."""
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

    @override
    def move(self, source: int, destination: int) -> None:
        for cache_SX in self._caches_SX:
            by_row = cache_SX.view(self._rows, self._capacity, -1)
            by_row[destination] = by_row[source]

    @override
    def keep(self, place: int, start: int, path: Sequence[int]) -> None:
        begin = place * self._capacity + start
        slots_P = torch.tensor(path, device=self.weights.device) + begin
        for cache_SX in self._caches_SX:
            cache_SX[begin : begin + len(path)] = cache_SX[slots_P]

    @override
    def __call__(
        self,
        first: int,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        wanted: Sequence[int],
        *,
        hidden: bool,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        weights, device = self.weights, self.weights.device
        paths = find_branching_paths(parents)
        if paths is not None and not self.reads_trees:
            raise ValueError(f"{self.name} reads chains, not trees: each token is computed by itself")
        places = [range(start, start + len(new)) for start, new in zip(starts, tokens, strict=True)]
        slots = [(first + row) * self._capacity + place for row, own in enumerate(places) for place in own]
        positions = places if paths is None else find_positions(starts, paths)
        line = torch.tensor([list(chain(*tokens)), list(chain(*positions)), slots], device=device)
        ids_N, positions_N, slots_N = line
        layout = self._make_layout(first, tokens, starts, None, paths)
        sliding = layout if weights.window is None else self._make_layout(first, tokens, starts, weights.window, paths)
        rotations_N1E = weights.rotations(positions_N, self._capacity)[:, None]
        state_NW = functional.embedding(ids_N, weights.embedding_VW)
        for layer, slides, cache_SX in zip(weights.layers, weights.slides, self._caches_SX, strict=True):
            own = sliding if slides else layout
            state_NW = self._compute_layer(layer, cache_SX, state_NW, rotations_N1E, slots_N, own)
        kept = _wanted_places(tokens, wanted)
        if len(kept) < len(slots):
            state_NW = state_NW[torch.tensor(kept, dtype=torch.long, device=device)]
        state_NW = weights.normalise(state_NW, weights.norm_W)
        logits_NV = self._logits(state_NW) if kept else state_NW.new_empty(0, weights.outputs)
        return logits_NV, state_NW if hidden else logits_NV

    def restrict(self, ids: Sequence[int] | None) -> None:
        """Compute only the logits of these ids; all others become minus infinity. None computes all."""
        self._ids = None if ids is None else torch.tensor(ids, dtype=torch.long, device=self.weights.device)
        self._output = None

    def _logits(self, state_NW: Tensor) -> Tensor:
        if self._output is None or self._output[0] != self.weights.version:
            self._output = self.weights.version, self.weights.make_output_layer(self._ids)
        logits_NV = self._output[1](state_NW)
        if self._ids is None:
            return logits_NV
        return state_NW.new_full((len(state_NW), self.weights.outputs), -torch.inf).index_copy_(1, self._ids, logits_NV)

    def _compute_layer(
        self, layer: Layer, cache_SX: Tensor, state_NW: Tensor, rotations_N1E: Tensor, slots_N: Tensor, layout: _Layout
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

    def _attend(self, queries_NHE: Tensor, cache_SX: Tensor, layout: _Layout) -> Tensor:
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

    def _make_layout(
        self,
        first: int,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        window: int | None,
        paths: Sequence[Sequence[Sequence[int]]] | None,
    ) -> _Layout:
        """Lay out the new tokens for layers that attend to the last `window` tokens, or to all.

        Keys are read from the window of the first cached or new token on: in a tree too, no token's position is before
        the first new one's, and no key's slot is before its position.
        """
        device = self.weights.device
        counts = [len(new) for new in tokens]
        seen = max(start + count for start, count in zip(starts, counts, strict=True))
        begin = 0 if window is None else max(0, min(starts) + 1 - window)
        rows, width = slice(first, first + len(tokens)), max(counts)
        if self.weights.splits_tokens and width <= SHARED_QUERIES:
            return _Layout(rows, seen, None, parts=self._split_tokens(first, tokens, starts, window))
        if width == 1 and min(starts) == seen - 1 and min(counts) == 1:
            return _Layout(rows, seen, None, begin=begin)
        if len(counts) * width > PADDING_WASTE * sum(counts):
            return _Layout(rows, seen, None, parts=self._split_rows(first, tokens, starts, window, paths))
        mask_BQK = torch.zeros(len(counts), width, seen - begin, dtype=self.weights.dtype, device=device)
        if paths is None:
            queries_BQ1 = _ranges_by_row(starts, counts, device)[..., None]
            mask_chains(mask_BQK, queries_BQ1, range(begin, seen), window)
        else:
            allowed_BQK = make_tree_mask(starts, paths, range(begin, seen), device, window=window)
            mask_BQK.masked_fill_(~allowed_BQK, -torch.inf)
        share = self.weights.heads // self.weights.key_heads if 1 < width <= SHARED_QUERIES else 1
        mask_B1QK = mask_BQK.repeat_interleave(share, 1)[:, None]
        if min(counts) == width:
            return _Layout(rows, seen, mask_B1QK, share, begin=begin)
        scatter = [row * width + place for row, count in enumerate(counts) for place in range(count)]
        gather_BQ = _ranges_by_row([0, *accumulate(counts)], counts, device)
        return _Layout(rows, seen, mask_B1QK, share, gather_BQ, torch.tensor(scatter, device=device), begin=begin)

    def _split_tokens(
        self, first: int, tokens: Sequence[Sequence[int]], starts: Sequence[int], window: int | None
    ) -> tuple[tuple[slice, _Layout], ...]:
        """Make one layout per token.

        Attention over several queries differs in the last bit from that over one; rounding the inputs of the next
        linear layer can make a whole step of it. One query at a time, a token has the same outputs bit for bit whatever
        is computed with it.
        """
        places = [
            (row, start + place)
            for row, (new, start) in enumerate(zip(tokens, starts, strict=True))
            for place in range(len(new))
        ]
        return tuple(
            (
                slice(number, number + 1),
                _Layout(
                    slice(first + row, first + row + 1),
                    place + 1,
                    None,
                    begin=0 if window is None else max(0, place + 1 - window),
                ),
            )
            for number, (row, place) in enumerate(places)
        )

    def _split_rows(
        self,
        first: int,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        window: int | None,
        paths: Sequence[Sequence[Sequence[int]]] | None,
    ) -> tuple[tuple[slice, _Layout], ...]:
        """Make one layout per row that has new tokens."""
        ends = list(accumulate(map(len, tokens)))
        trees = [None] * len(tokens) if paths is None else [[own] for own in paths]
        return tuple(
            (slice(end - len(new), end), self._make_layout(first + row, [new], [start], window, trees[row]))
            for row, (new, start, end) in enumerate(zip(tokens, starts, ends, strict=True))
            if new
        )


def _ranges_by_row(begins: Iterable[int], counts: Sequence[int], device: torch.device) -> Tensor:
    """Return a range per row (B, Q), padded with 0; outputs of the padding are dropped after attention."""
    width = max(counts)
    lines = [
        [begin + place if place < count else 0 for place in range(width)]
        for begin, count in zip(begins, counts, strict=False)
    ]
    return torch.tensor(lines, device=device)


def _wanted_places(tokens: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[int]:
    """Return the indices of the last `wanted[b]` tokens of each row among all new tokens."""
    kept: list[int] = []
    end = 0
    for new, number in zip(tokens, wanted, strict=True):
        end += len(new)
        kept.extend(range(end - number, end))
    return kept
