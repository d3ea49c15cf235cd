"""Keys and values of the beginnings of earlier texts, in blocks, least recently used first out.

A new row whose text begins like an earlier one copies the keys and values of the common blocks instead of computing
them. Rows have copies, so a block can be evicted at any time, and what a row does never changes a block.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

Key = tuple[int, int, int, tuple[int, ...]]  # model, scope, number of the block before (0: none), tokens


@dataclass(frozen=True)
class _Block:
    """The keys and values of consecutive tokens, as lists of the layers' tensors."""

    number: int  # unique, for the keys of the blocks that follow
    tensors: list[Tensor]  # as `Forward.read_cache` returns them, of these tokens alone
    bytes: int  # size of the tensors


@dataclass
class _Store:
    """The blocks of all models that share a budget."""

    # budget_bytes, bytes: maximum and present size of all tensors
    budget_bytes: int
    bytes: int = 0
    # from the least recently used one on. A block is never more recent than the one before it in its text, so
    # that the first one has no successors.
    blocks: OrderedDict[Key, _Block] = field(default_factory=OrderedDict)
    # numbers, models: numbers that were not given to a block, and to a model
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    models: Iterator[int] = field(default_factory=count)

    def evict(self, most: int, chain: dict[Key, _Block]) -> bool:
        """Evict blocks until at most so many bytes are left; return False if only those of `chain` could be."""
        while self.bytes > most:
            oldest = next(iter(self.blocks), None)
            if oldest is None or oldest in chain:
                return False
            self.drop(oldest)
        return True

    def add(self, key: Key, block: _Block) -> None:
        self.blocks[key] = block
        self.bytes += block.bytes

    def drop(self, key: Key) -> None:
        self.bytes -= self.blocks.pop(key).bytes


class PrefixCache:
    """Blocks of keys and values, each found by the block before it and by its tokens. If `shared`, rows of all scopes
    have the same blocks.

    >>> cache = PrefixCache(budget_bytes=1 << 10, block=2)
    >>> keys = [torch.arange(5.0)[:, None]]  # one layer, five tokens, width 1
    >>> cache.keep(0, [7, 8, 9, 7, 8], keys)  # two whole blocks
    >>> [block[0].flatten().tolist() for block in cache.find(0, [7, 8, 9, 6])]
    [[0.0, 1.0]]
    >>> cache.find(1, [7, 8, 9, 7]), cache.bytes
    ([], 16)
    """

    def __init__(self, budget_bytes: int, block: int, *, shared: bool = False) -> None:
        self.block, self._shared = block, shared
        self._store = _Store(budget_bytes)
        self._model = next(self._store.models)

    def for_other_model(self, block: int) -> "PrefixCache":
        """Return a cache for the keys and values of another model, within the same budget."""
        other = copy(self)
        other.block, other._model = block, next(self._store.models)
        return other

    @property
    def bytes(self) -> int:
        """Size of the tensors of all models that share the budget."""
        return self._store.bytes

    def find(self, scope: int, tokens: Sequence[int]) -> list[list[Tensor]]:
        """Return the tensors of the longest chain of blocks with which a text begins."""
        found: dict[Key, _Block] = {}
        for tokens_of_block in self._split(tokens):
            key = self._make_key(scope, found, tokens_of_block)
            if (block := self._store.blocks.get(key)) is None:
                break
            found[key] = block
        self._touch(list(found))
        return [block.tensors for block in found.values()]

    def keep(self, scope: int, tokens: Sequence[int], kept: Sequence[Tensor]) -> None:
        """Copy the whole blocks of a text that are not known yet, as long as others can be evicted for them. `kept` are
        its keys and values, as `Forward.read_cache` returns them: tokens are the last dimension but one.
        """
        store = self._store
        chain: dict[Key, _Block] = {}
        for place, tokens_of_block in enumerate(self._split(tokens)):
            key = self._make_key(scope, chain, tokens_of_block)
            block = store.blocks.get(key)
            if block is None:
                views = [tensor.narrow(-2, place * self.block, self.block) for tensor in kept]
                size = sum(view.numel() * view.element_size() for view in views)
                if not store.evict(store.budget_bytes - size, chain):
                    break
                copies = [view.clone(memory_format=torch.contiguous_format) for view in views]
                block = _Block(next(store.numbers), copies, size)
                store.add(key, block)
            else:
                store.blocks.move_to_end(key)
            chain[key] = block
        self._touch(list(chain))

    def clear(self) -> None:
        for key in [key for key in self._store.blocks if key[0] == self._model]:
            self._store.drop(key)

    def _split(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for begin in range(0, len(tokens) - self.block + 1, self.block):
            yield tuple(tokens[begin : begin + self.block])

    def _make_key(self, scope: int, before: dict[Key, _Block], tokens: tuple[int, ...]) -> Key:
        number = next(reversed(before.values())).number if before else 0
        return self._model, 0 if self._shared else scope, number, tokens

    def _touch(self, chain: Sequence[Key]) -> None:
        for key in reversed(chain):
            self._store.blocks.move_to_end(key)
