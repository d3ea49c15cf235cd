"""Counts of continuations after contexts of target tokens, in flat arrays of a bounded size.

A context of 1 to 8 tokens is one slot, found by a 64-bit hash. A slot has the four continuations that were counted
most. So a table of `n` slots takes `n * SLOT_BYTES` bytes, whatever it has seen. It begins small and doubles when it is
half full. At its final size, a new context evicts the one with the lowest count in its bucket (LFU, the least recently
touched first). Nothing depends on time or on Python's hashes: equal texts give equal tables everywhere.

Shapes: S slots, C continuations per slot, U used slots.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stages.contract.snapshot import State
from stages.memory.counting import (
    CONTINUATIONS,
    FREE,
    LONGEST,
    MULTIPLIER,
    WAYS,
    TableArrays,
    find_contexts,
    find_slot,
    learn,
)

SLOT_BYTES = 8 + CONTINUATIONS * (4 + 4) + 4 + 4 + 4
FIRST_SLOTS = 1 << 12
_MASK, _SEED = (1 << 64) - 1, 0xD1B54A32D192ED03


class Continuations(NamedTuple):
    """What was counted after a context: how often it was followed at all, and its tokens with their counts, the
    commonest first.
    """

    total: int
    tokens: list[int]
    counts: list[int]


def scope_of(name: str) -> int:
    """Return the scope of a tenant's name, a number of 32 bits; 0 for no name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") if name else 0


def context_hashes(tokens: Sequence[int], scope: int = 0) -> Iterator[int]:
    """Yield the hash of the last token, of the last two, ... of the last eight.

    >>> longer = list(context_hashes([1, 2, 3]))
    >>> len(longer), longer[:2] == list(context_hashes([2, 3]))
    (3, True)
    >>> next(context_hashes([3], scope=1)) in longer  # each scope has its own contexts
    False
    """
    value = first_hash(scope)
    for token in reversed(tokens[-LONGEST:]):
        value = ((value ^ (token + 1)) * MULTIPLIER) & _MASK
        value ^= value >> 29
        yield value


def first_hash(scope: int) -> int:
    """Return the hash of no token."""
    return _SEED ^ (scope * MULTIPLIER & _MASK)


class NgramTable:
    """Counts of continuations within a budget.

    >>> table = NgramTable(budget_bytes=1 << 20)
    >>> table.learn([7, 8, 9, 7, 8], begin=1)
    >>> table.find([0, 7])  # the longest known contexts of the text, longest first: here the one token 7
    [(1, Continuations(total=2, tokens=[8], counts=[2]))]
    >>> table.forget([7, 8, 9, 7, 8], begin=1)
    >>> len(table), table.find([0, 7])
    (0, [])
    """

    def __init__(self, budget_bytes: int, order: int = LONGEST) -> None:
        slots = WAYS
        while 2 * slots * SLOT_BYTES <= budget_bytes:
            slots *= 2
        self._most, self.order, self._clock = slots, order, 0
        self.learned_tokens = 0  # less those that were forgotten
        self._allocate(min(self._most, FIRST_SLOTS))

    def _allocate(self, slots: int) -> None:
        counts = slots * CONTINUATIONS
        self.arrays = TableArrays(
            np.zeros(slots, np.uint64),
            np.zeros(counts, np.int32),
            np.zeros(counts, np.uint32),
            *(np.zeros(slots, np.uint32) for _ in range(3)),
        )
        self._used = 0

    @property
    def _slots(self) -> int:
        return len(self.arrays.hashes)

    def lines(self) -> list[npt.NDArray[Any]]:
        return [array.reshape(self._slots, -1) for array in self.arrays]

    def __len__(self) -> int:
        return self._used

    @property
    def bytes(self) -> int:
        return self._slots * SLOT_BYTES

    @property
    def budget_bytes(self) -> int:
        """Size of the arrays at most."""
        return self._most * SLOT_BYTES

    def find(self, tokens: Sequence[int], scope: int = 0) -> list[tuple[int, Continuations]]:
        """Return the continuations of the two longest known contexts at the end of a text, the longest first; see
        `find_contexts`.
        """
        suffix = np.array(tokens[-self.order :], np.int32)
        known, *slots = find_contexts(self.arrays, suffix, self.order, np.uint64(first_hash(scope)))
        return [(known - number, self._read(slot)) for number, slot in enumerate(slots) if slot >= 0]

    def _read(self, slot: int) -> Continuations:
        own = slice(slot * CONTINUATIONS, (slot + 1) * CONTINUATIONS)
        counts = [count for count in self.arrays.counts[own].tolist() if count]
        return Continuations(int(self.arrays.totals[slot]), self.arrays.tokens[own].tolist()[: len(counts)], counts)

    def _find_slot(self, value: int) -> int:
        return int(find_slot(self.arrays.hashes, np.uint64(value)))

    def learn(self, tokens: Sequence[int], begin: int, scope: int = 0) -> None:
        """Count every token from `begin` on after its contexts."""
        self._clock += 1
        text, first, begin = np.array(tokens, np.int32), np.uint64(first_hash(scope)), max(1, begin)
        self.learned_tokens += max(0, len(text) - begin)
        while begin < len(text):
            if 2 * self._used > self._slots and self._slots < self._most:
                self._double()
            most = self._slots // 2 - self._used if self._slots < self._most else self._slots
            begin, added = learn(self.arrays, text, begin, self.order, first, scope, self._clock, most)
            self._used += added

    def _double(self) -> None:
        """Double the number of slots. A bucket becomes two, whose contexts keep their places in it."""
        slots = 2 * self._slots
        place_S = np.arange(slots, dtype=np.uint64)
        belongs_S = np.tile(self.arrays.hashes, 2) % np.uint64(slots // WAYS) == place_S // np.uint64(WAYS)
        lines = [np.concatenate([array, array]) for array in self.lines()]
        for array in lines:
            array[~belongs_S] = 0
        self.arrays = TableArrays(*(array.reshape(-1) for array in lines))

    def _halve(self) -> None:
        """Halve the number of slots. Two buckets become one, which keeps the contexts that were counted most."""
        buckets = self._slots // WAYS // 2
        split = [array.reshape(2, buckets, WAYS, -1) for array in self.arrays]
        pairs: list[npt.NDArray[Any]] = [array.swapaxes(0, 1).reshape(buckets, 2 * WAYS, -1) for array in split]
        named = TableArrays(*pairs)
        least = [-array[:, :, 0].astype(np.int64) for array in (named.stamps, named.totals)]  # the last key decides
        kept = np.lexsort(least)[:, :WAYS, None]
        halves: list[npt.NDArray[Any]] = [np.take_along_axis(pair, kept, 1).reshape(-1) for pair in pairs]
        self.arrays = TableArrays(*halves)
        self._used = int((self.arrays.hashes != FREE).sum())

    def forget(self, tokens: Sequence[int], begin: int, scope: int = 0) -> None:
        """Subtract what `learn` counted of a text; a context without a count is erased."""
        places = range(max(1, begin), len(tokens))
        self.learned_tokens = max(0, self.learned_tokens - len(places))
        for place in places:
            for value in context_hashes(tokens[max(0, place - self.order) : place], scope):
                self._subtract(value, tokens[place])

    def _subtract(self, value: int, token: int) -> None:
        slot, table = self._find_slot(value), self.arrays
        if slot < 0:
            return
        total, *found = self._read(slot)
        pairs = [(one, count - (one == token)) for one, count in zip(*found, strict=True)]
        kept = sorted([pair for pair in pairs if pair[1]], key=lambda pair: -pair[1])
        for array in self.lines() if not kept else ():
            array[slot] = 0
        self._used -= not kept
        if kept:
            own = slice(slot * CONTINUATIONS, (slot + 1) * CONTINUATIONS)
            table.tokens[own], table.counts[own] = zip(*kept, *[(0, 0)] * (CONTINUATIONS - len(kept)), strict=True)
            table.totals[slot] = max(0, total - 1)

    def forget_scope(self, scope: int) -> int:
        """Erase all contexts of a scope. Returns their number."""
        found_S = (self.arrays.scopes == scope) & (self.arrays.hashes != FREE)
        for array in self.lines():
            array[found_S] = 0
        count = int(found_S.sum())
        self._used -= count
        return count

    def decay(self) -> None:
        """Halve all counts, rounded up: nothing is forgotten, and what is counted from now on weighs double."""
        for array in (self.arrays.counts, self.arrays.totals):
            array -= array // 2

    def commonest(self, count: int, scope: int = 0) -> list[tuple[int, Continuations]]:
        """Return the slots of a scope with the highest totals and what was counted there."""
        mine_S = np.where(self.arrays.scopes == scope, self.arrays.totals, 0)
        order = np.lexsort((np.arange(self._slots), -mine_S.astype(np.int64)))[:count]
        return [(slot, self._read(slot)) for slot in order.tolist() if mine_S[slot]]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The number of slots, and the numbers of texts and tokens that were learned."""
        return self._slots, self._clock, self.learned_tokens

    def state_dict(self) -> State:
        """Return the used slots by array, and their places; with the sizes they are the whole table."""
        used_U = np.flatnonzero(self.arrays.hashes)
        tensors = {"places": torch.from_numpy(used_U.astype(np.int64))}
        for name, array in zip(TableArrays._fields, self.lines(), strict=True):
            signed = np.int64 if array.dtype == np.uint64 else np.int32
            used = array[used_U] if array.shape[1] > 1 else array[used_U, 0]
            tensors[name] = torch.from_numpy(used.view(signed))
        return {"sizes": self.sizes, "arrays": tensors}

    @classmethod
    def from_state(cls, state: State) -> "NgramTable":
        """Make the table of a state, with a budget of its size."""
        table = cls(state["sizes"][0] * SLOT_BYTES)
        table.load_state_dict(state)
        return table

    def load_state_dict(self, state: State) -> None:
        """Replace the table by a saved one, bit for bit; of one with a larger budget, what does not fit is evicted."""
        slots, self._clock, self.learned_tokens = state["sizes"]
        self._allocate(slots)
        places_U = state["arrays"]["places"].numpy()
        for name, array in zip(TableArrays._fields, self.lines(), strict=True):
            array[places_U] = state["arrays"][name].numpy().view(array.dtype).reshape(-1, array.shape[1])
        self._used = len(places_U)
        while self._slots > self._most:
            self._halve()
