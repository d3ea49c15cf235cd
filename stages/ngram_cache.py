"""The n-gram cache: which target tokens of several pieces are now active, within a byte budget.

Paper: section on the n-gram cache and appendix D.5 (LRU and LFU). The cache owns the trie's n-grams: what is inserted
here can be drafted, what is evicted cannot.
"""

import heapq
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from stages.trie import Node, Trie

Pieces = tuple[int, ...]


class Eviction(Protocol):
    """The order in which entries leave. Called by the cache only, once per event, in stream order."""

    def touch(self, pieces: Pieces, times: int = 1) -> None:
        """The entry was inserted or emitted again, `times` times."""
        ...

    def victim(self) -> Pieces:
        """Choose an entry, forget it and return it. Raises KeyError when there is none."""
        ...

    def count(self, pieces: Pieces) -> int:
        """How often the entry was touched, where the order keeps that; at least 1."""
        ...


class LeastRecentlyUsed:
    """Evict what was touched longest ago."""

    def __init__(self) -> None:
        self._touches: dict[Pieces, int] = {}

    def touch(self, pieces: Pieces, times: int = 1) -> None:
        """Move to the young end."""
        self._touches[pieces] = self._touches.pop(pieces, 0) + times

    def victim(self) -> Pieces:
        """The entry at the old end."""
        pieces = next(iter(self._touches), None)
        if pieces is None:
            raise KeyError("nothing to evict")
        del self._touches[pieces]
        return pieces

    def count(self, pieces: Pieces) -> int:
        """Touches since it was inserted."""
        return self._touches[pieces]


class LeastFrequentlyUsed:
    """Evict what was touched least often; of equals, what was touched longest ago."""

    def __init__(self) -> None:
        self._state: dict[Pieces, tuple[int, int]] = {}  # touches, time of the last
        self._heap: list[tuple[int, int, Pieces]] = []  # may hold outdated states
        self._clock = 0

    def touch(self, pieces: Pieces, times: int = 1) -> None:
        """Count it."""
        self._clock += 1
        self._state[pieces] = (self._state.get(pieces, (0, 0))[0] + times, self._clock)
        heapq.heappush(self._heap, (*self._state[pieces], pieces))
        if len(self._heap) > 8 * len(self._state) + 64:
            self._heap = [(*state, entry) for entry, state in self._state.items()]
            heapq.heapify(self._heap)

    def victim(self) -> Pieces:
        """The entry with the fewest touches."""
        while self._heap:
            touches, time, pieces = heapq.heappop(self._heap)
            if self._state.get(pieces) == (touches, time):
                del self._state[pieces]
                return pieces
        raise KeyError("nothing to evict")

    def count(self, pieces: Pieces) -> int:
        """Touches since it was inserted."""
        return self._state[pieces][0]


EVICTIONS: dict[str, Callable[[], Eviction]] = {"lru": LeastRecentlyUsed, "lfu": LeastFrequentlyUsed}


def entry_bytes(pieces: Pieces) -> int:
    """Memory that one entry takes: its key, its dictionary slots, its state and its trie nodes, in bytes.

    Upper bound: nodes shared with other entries are counted for each.
    """
    node = Node()
    per_node = sys.getsizeof(node) + sys.getsizeof({0: None})
    key = sys.getsizeof(pieces) + 32 * len(pieces)
    state = sys.getsizeof((0, 0)) + 2 * 32 + sys.getsizeof((0, 0, pieces))
    return key + state + per_node * len(pieces) + 2 * 104  # two dictionary slots at their usual fill


@dataclass(frozen=True)
class Entry:
    """One active n-gram, as it is saved: pieces, the target token, how often it was touched."""

    pieces: Pieces
    token: int
    count: int


class NgramCache:
    """Keeps the n-grams of a trie within a byte budget.

    Entries change only through `observe` and `load`, which are called between blocks, so that no draft in flight
    ever points to an evicted n-gram.
    """

    def __init__(self, trie: Trie, budget_bytes: int, eviction: Eviction) -> None:
        self._trie, self._budget, self._eviction = trie, budget_bytes, eviction
        self._tokens: dict[Pieces, int] = {}
        self.bytes = 0
        self.version = 0  # number of insertions and evictions so far

    def __len__(self) -> int:
        return len(self._tokens)

    def observe(self, pieces: Pieces, token: int, times: int = 1) -> None:
        """The target emitted a token of several pieces: insert or touch it, and evict down to the budget."""
        size = entry_bytes(pieces)
        if size > self._budget:
            return
        if pieces not in self._tokens:
            while self.bytes + size > self._budget:
                self._evict()
            self._tokens[pieces] = token
            self._trie.insert(pieces, token)
            self.bytes += size
            self.version += 1
        self._eviction.touch(pieces, times)

    def _evict(self) -> None:
        pieces = self._eviction.victim()
        del self._tokens[pieces]
        self._trie.remove(pieces)
        self.bytes -= entry_bytes(pieces)
        self.version += 1

    def entries(self) -> list[Entry]:
        """All entries, most often touched first."""
        found = [Entry(pieces, token, self._eviction.count(pieces)) for pieces, token in self._tokens.items()]
        return sorted(found, key=lambda entry: (-entry.count, entry.pieces))

    def load(self, entries: Iterable[Entry]) -> None:
        """Insert saved entries, the least often touched first, so that those that matter most are evicted last."""
        for entry in sorted(entries, key=lambda entry: entry.count):
            self.observe(entry.pieces, entry.token, entry.count)
