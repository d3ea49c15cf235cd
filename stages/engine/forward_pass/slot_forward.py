"""What forward passes share whose keys and values are in slots: one tensor per layer, token by token.

A pass writes the keys and values of all rows with one copy, and a rollback only changes a length. A row has `capacity`
slots, which follow each other, one per token.

Shapes: S slots of the cache, X numbers of a slot, N new tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from stages.engine.forward_pass.forward import GROWTH, Forward
from stages.engine.forward_pass.packed_weights import PackedLlamaWeights


class SlotForward(Forward):
    """A forward pass with its own keys and values over shared weights."""

    reads_trees = cuts_rows = True

    def __init__(self, weights: PackedLlamaWeights) -> None:
        self.weights = weights
        self._caches_SX: list[Tensor] = []  # per layer and slot: keys of all heads, then values
        self._rows = self._capacity = 0
        self._ids: Tensor | None = None  # of the logits that are computed; None: all
        self._output: tuple[int, Tensor | None, Any] | None = None  # version of the weights, ids, and the output layer

    @property
    @override
    def name(self) -> str:
        return self.weights.describe()

    @override
    def refresh(self, *, layers: bool = True) -> None:
        self.weights.refresh(layers=layers)

    def restrict(self, ids: Sequence[int] | None) -> None:
        """Compute only the logits of these ids; all others become minus infinity. None computes all."""
        self._ids = None if ids is None else torch.tensor(ids, dtype=torch.long, device=self.weights.device)

    def find_output_layer(self) -> Any:
        """Return the output layer of these weights and ids, packed if it is needed for the first time."""
        if self._output is None or self._output[0] != self.weights.version or self._output[1] is not self._ids:
            self._output = self.weights.version, self._ids, self.weights.make_output_layer(self._ids)
        return self._output[2]

    def _place_logits(self, logits_NV: Tensor) -> Tensor:
        """Give the logits that were computed their places among all."""
        if self._ids is None:
            return logits_NV
        all_NV = logits_NV.new_full((len(logits_NV), self.weights.outputs), -torch.inf)
        return all_NV.index_copy_(1, self._ids, logits_NV)

    @property
    @override
    def capacity(self) -> int:
        return self._capacity

    def _begin(self, row: int) -> int:
        return row * self._capacity

    @override
    def read_cache(self, row: int, length: int) -> list[Tensor]:
        begin = self._begin(row)
        return [cache_SX[begin : begin + length] for cache_SX in self._caches_SX]

    @override
    def write_cache(self, row: int, kept: Sequence[Tensor], start: int = 0) -> None:
        begin = self._begin(row) + start
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
    def move(self, source: int, destination: int, length: int) -> None:
        new, old = self._begin(destination), self._begin(source)
        for cache_SX in self._caches_SX:
            cache_SX[new : new + length] = cache_SX[old : old + length]

    @override
    def keep(self, row: int, start: int, path: Sequence[int]) -> None:
        begin = self._begin(row) + start
        slots_P = torch.tensor(path, device=self.weights.device) + begin
        for cache_SX in self._caches_SX:
            cache_SX[begin : begin + len(path)] = cache_SX[slots_P]
