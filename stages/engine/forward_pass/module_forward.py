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
    """Uses the modules of `transformers`, for any architecture. Rows of unequal length are padded on the left."""

    name = "modules of transformers"
    reads_trees = True
    cuts_rows = True

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache_name = find_cache_name(model) or CACHE_NAMES[0]
        self._keys: list[Tensor] = []  # per layer, rows x H x slots x E
        self._values: list[Tensor] = []
        self._rows = self._capacity = 0

    @property
    @override
    def capacity(self) -> int:
        return self._capacity

    @override
    def read_cache(self, row: int, length: int) -> list[Tensor]:
        """Return views of a row's first keys, by layer, then of its values; an empty list if the cache is empty."""
        return [layer[row, :, :length] for layer in (*self._keys, *self._values)]

    @override
    def write_cache(self, row: int, kept: Sequence[Tensor], start: int = 0) -> None:
        half = len(kept) // 2
        for layers, tensors in ((self._keys, kept[:half]), (self._values, kept[half:])):
            layers.extend(self._allocate(tokens[None]) for tokens in tensors[len(layers) :])
            for layer, tokens in zip(layers, tensors, strict=True):
                layer[row, :, start : start + tokens.shape[1]] = tokens

    @override
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
        """Make keys or values with one slot beyond the capacity, which receives the padding."""
        return like.new_zeros(self._rows, like.shape[1], self._capacity + 1, like.shape[3])

    @override
    def move(self, source: int, destination: int, length: int) -> None:
        for layer in (*self._keys, *self._values):
            layer[destination, :, :length] = layer[source, :, :length]

    @override
    def keep(self, row: int, start: int, path: Sequence[int]) -> None:
        slots_P = torch.tensor(path, device=self._keys[0].device) + start
        for layer in (*self._keys, *self._values):
            row_HKE = layer[row]
            row_HKE[:, start : start + len(path)] = row_HKE[:, slots_P]

    def find_layer(self, number: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, which are allocated when it has its first."""
        while number >= len(self._keys):
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        return self._keys[number], self._values[number]

    @override
    def share(self) -> "ModuleForward":
        return ModuleForward(self._model)

    @override
    def __call__(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        width, trash, device = max(batch.counts), self._capacity, self._model.device
        # Rows are aligned on the right; the padding on the left is written to the slot beyond the capacity.
        ids = [[0] * (width - len(new)) + list(new) for new in batch.tokens]
        slots = [[trash] * (width - len(slots_of_row)) + list(slots_of_row) for slots_of_row in batch.slots]
        ids_BQ, slots_BQ = torch.tensor([ids, slots], device=device)
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
                **{self._cache_name: _PassCache(self, batch.first, slots_BQ, batch.seen)},
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
    length = values_BQX.shape[1]
    return torch.cat([row_QX[length - number :] for row_QX, number in zip(values_BQX, wanted, strict=True)])


class _PassCache(Cache):
    """The cache of one pass: it writes rows from `first` on to these slots, and reads `seen` slots of each."""

    def __init__(self, forward: ModuleForward, first: int, slots_BQ: Tensor, seen: int) -> None:
        super().__init__(layers=[])
        self._forward, self._seen = forward, seen
        self._rows, self._slots_B1Q1 = slice(first, first + len(slots_BQ)), slots_BQ[:, None, :, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values BHQE, return all BHKE. Called by the model's attention."""
        keys, values = self._forward.find_layer(layer_idx, key_states, value_states)
        return self._write(keys, key_states), self._write(values, value_states)

    def _write(self, kept: Tensor, new_BHQE: Tensor) -> Tensor:
        rows = kept[self._rows]
        rows.scatter_(2, self._slots_B1Q1.expand_as(new_BHQE), new_BHQE)
        return rows[:, :, : self._seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of keys that the pass reads. Models call it; our masks do not use it."""
        return self._seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys and the position of the first. The library calls it to make masks."""
        return self._seen, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0: masks follow the positions of each row."""
        return 0
