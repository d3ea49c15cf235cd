"""The forward pass that uses the modules of `transformers`, with a cache of many rows.

Shapes: B rows, Q new tokens of the longest row, K keys, H key-value heads, E of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from typing_extensions import override

from stages.engine.forward_pass.attention_masks import AttentionPositions, attend_by_position, make_tree_mask
from stages.engine.forward_pass.forward import (
    CACHE_NAMES,
    GROWTH,
    Forward,
    ForwardBatch,
    find_cache_name,
    record_hidden,
)


class ModuleForward(Forward):
    """Uses the modules of `transformers`, for any architecture. Rows of unequal length are padded on the left.

    Args:
        model: a Hugging Face causal language model whose attention is `sdpa` or `eager`.
    """

    name = "modules of transformers"
    reads_trees = True
    cuts_rows = True

    def __init__(self, model: Any) -> None:
        self._model, self._cache = model, RowCache()
        self._cache_name = find_cache_name(model) or CACHE_NAMES[0]

    @property
    @override
    def cache_bytes(self) -> int:
        return self._cache.bytes

    @property
    @override
    def capacity(self) -> int:
        return self._cache.trash

    @override
    def read_cache(self, row: int, length: int) -> list[Tensor]:
        return self._cache.read_row(row, length)

    @override
    def write_cache(self, row: int, kept: Sequence[Tensor], start: int = 0) -> None:
        self._cache.write_row(row, kept, start)

    @override
    def reserve(self, rows: int, capacity: int) -> None:
        self._cache.reserve(rows, capacity)

    @override
    def move(self, source: int, destination: int, length: int) -> None:
        self._cache.move(source, destination, length)

    @override
    def keep(self, row: int, start: int, path: Sequence[int]) -> None:
        self._cache.keep(row, start, path)

    @override
    def refresh(self) -> None:
        """Do nothing: the modules hold the weights."""

    @override
    def share(self) -> "ModuleForward":
        return ModuleForward(self._model)

    @override
    def __call__(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        width, trash, device = max(batch.counts), self._cache.trash, self._model.device
        # Rows are aligned on the right; the padding on the left is written to the trash slot.
        ids = [[0] * (width - len(new)) + list(new) for new in batch.tokens]
        slots = [[trash] * (width - len(slots_of_row)) + list(slots_of_row) for slots_of_row in batch.slots]
        ids_BQ, slots_BQ = torch.tensor([ids, slots], device=device)
        self._cache.place(batch.first, slots_BQ, batch.seen)
        if batch.paths is None:
            keys_1K = torch.arange(batch.seen, device=device)[None]
            positions = AttentionPositions(slots_BQ.where(slots_BQ != trash, 0), keys_1K)
        else:
            positions = _place_trees(batch, batch.paths, device)
        with attend_by_position(positions), record_hidden(self._model) as states:
            output = self._model(
                input_ids=ids_BQ,
                # No padding among the keys; some models compute position biases from it.
                attention_mask=slots_BQ.new_ones(len(ids), batch.seen),
                position_ids=positions.queries_BQ,
                use_cache=True,
                logits_to_keep=max(1, *batch.wanted),
                **{self._cache_name: self._cache},
            )
        logits_NV = _take_last(output.logits, batch.wanted)
        return logits_NV, _take_last(states[-1], batch.wanted) if batch.hidden else logits_NV


def _place_trees(
    batch: ForwardBatch, paths: Sequence[Sequence[Sequence[int]]], device: torch.device
) -> AttentionPositions:
    """Return the positions of rows whose new tokens are trees with these paths, padded on the left."""
    width = max(batch.counts)
    queries = [[*[0] * (width - len(positions)), *positions] for positions in batch.positions]
    keys = [
        [*range(start), *positions, *range(start + len(positions), batch.seen)]
        for start, positions in zip(batch.starts, batch.positions, strict=True)
    ]
    allowed_BQK = make_tree_mask(batch.starts, paths, range(batch.seen), device, left=True)
    return AttentionPositions(
        torch.tensor(queries, device=device), torch.tensor(keys, device=device), allowed_BQK[:, None]
    )


def _take_last(values_BQX: Tensor, wanted: Sequence[int]) -> Tensor:
    """Concatenate the last `wanted[b]` positions of each row."""
    length = values_BQX.shape[1]
    return torch.cat([row_QX[length - number :] for row_QX, number in zip(values_BQX, wanted, strict=True)])


class RowCache(Cache):
    """Preallocated keys and values of many rows; a row's length is a number, so that rollback copies nothing.

    The model writes through `update` to the slots that `place` set before the forward pass. One slot beyond the
    capacity, the trash slot, receives the padding.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._keys: list[Tensor] = []  # per layer, rows x H x places x E
        self._values: list[Tensor] = []
        self._capacity = 0
        self._rows = 0
        self._first = 0
        self._places_BQ: Tensor | None = None
        self._seen = 0

    def reserve(self, rows: int, capacity: int) -> None:
        """Grow to that many rows of that many tokens, by at least a sixteenth; the content stays."""
        if rows <= self._rows and capacity <= self._capacity:
            return
        self._rows = max(rows, self._rows)
        if capacity > self._capacity:
            self._capacity = max(capacity, self._capacity + self._capacity // GROWTH)
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                tensors[layer] = self._allocate(old)
                tensors[layer][: old.shape[0], :, : old.shape[2] - 1] = old[:, :, :-1]

    def _allocate(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._rows, like.shape[1], self._capacity + 1, like.shape[3])

    def place(self, first: int, places_BQ: Tensor, seen: int) -> None:
        """Set the slots of the next forward pass: it writes rows from `first` on and reads `seen` slots of each."""
        self._first, self._places_BQ, self._seen = first, places_BQ, seen

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first tokens of one row over those of another."""
        for layer in (*self._keys, *self._values):
            layer[destination, :, :length] = layer[source, :, :length]

    def keep(self, row: int, start: int, path: Sequence[int]) -> None:
        """Move the slots `start + path[i]` of a row to `start + i`; the indices ascend."""
        slots_P = torch.tensor(path, device=self._keys[0].device) + start
        for layer in (*self._keys, *self._values):
            row_HKE = layer[row]
            row_HKE[:, start : start + len(path)] = row_HKE[:, slots_P]

    @property
    def bytes(self) -> int:
        """Size of all keys and values in bytes."""
        return sum(layer.numel() * layer.element_size() for layer in (*self._keys, *self._values))

    def read_row(self, row: int, length: int) -> list[Tensor]:
        """Return views of a row's first keys, by layer, then of its values; an empty list if the cache is empty."""
        return [layer[row, :, :length] for layer in (*self._keys, *self._values)]

    def write_row(self, row: int, kept: Sequence[Tensor], start: int = 0) -> None:
        """Write keys and values that `read_row` returned, from the slot `start` on."""
        half = len(kept) // 2
        for layers, tensors in ((self._keys, kept[:half]), (self._values, kept[half:])):
            layers.extend(self._allocate(tokens[None]) for tokens in tensors[len(layers) :])
            for layer, tokens in zip(layers, tensors, strict=True):
                layer[row, :, start : start + tokens.shape[1]] = tokens

    @property
    def trash(self) -> int:
        """The slot that receives the padding."""
        return self._capacity

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values BHQE, return all BHKE. Called by the model's attention."""
        while layer_idx >= len(self._keys):
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        return self._write(self._keys[layer_idx], key_states), self._write(self._values[layer_idx], value_states)

    def _write(self, kept: Tensor, new_BHQE: Tensor) -> Tensor:
        rows = slice(self._first, self._first + new_BHQE.shape[0])
        places_B1Q1 = self._places_BQ[:, None, :, None].expand_as(new_BHQE)  # type: ignore[index]
        kept[rows].scatter_(2, places_B1Q1, new_BHQE)
        return kept[rows, :, : self._seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of keys that the next pass reads. Models call it; our masks do not use it."""
        return self._seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys and the position of the first. The library calls it to make masks."""
        return self._seen, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0: masks follow the positions of each row."""
        return 0
