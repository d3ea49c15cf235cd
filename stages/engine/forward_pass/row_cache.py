"""The keys and values of many rows for the modules of `transformers`.

Shapes: B rows, Q new tokens of the longest row, K keys, H key-value heads, E of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

GROWTH = 16  # a cache grows by at least a sixteenth: little unused memory, few copies


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

    def keep(self, place: int, start: int, path: Sequence[int]) -> None:
        """Move the slots `start + path[i]` of a row to `start + i`; the indices ascend."""
        slots_P = torch.tensor(path, device=self._keys[0].device) + start
        for layer in (*self._keys, *self._values):
            row_HKE = layer[place]
            row_HKE[:, start : start + len(path)] = row_HKE[:, slots_P]

    @property
    def bytes(self) -> int:
        """Size of all keys and values in bytes."""
        return sum(layer.numel() * layer.element_size() for layer in (*self._keys, *self._values))

    def read_row(self, place: int, length: int) -> list[Tensor]:
        """Return views of a row's first keys, by layer, then of its values; an empty list if the cache is empty."""
        return [layer[place, :, :length] for layer in (*self._keys, *self._values)]

    def write_row(self, place: int, kept: Sequence[Tensor], start: int = 0) -> None:
        """Write keys and values that `read_row` returned, from the slot `start` on."""
        half = len(kept) // 2
        for layers, tensors in ((self._keys, kept[:half]), (self._values, kept[half:])):
            layers.extend(self._allocate(tokens[None]) for tokens in tensors[len(layers) :])
            for layer, tokens in zip(layers, tensors, strict=True):
                layer[place, :, start : start + tokens.shape[1]] = tokens

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
