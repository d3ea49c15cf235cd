"""The n-gram cache: which target tokens of several pieces are now active, within a byte budget.

Paper: section on the n-gram cache and appendix D.5. The cache owns the trie's n-grams: what is inserted here can be
drafted, what is evicted cannot.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from stages.eviction import EVICTIONS, RECORD_BYTES, Eviction, LeastFrequentlyUsed, LeastRecentlyUsed, Pieces, Record
from stages.snapshot import Json
from stages.trie import Trie

__all__ = [
    "EVICTIONS",
    "Cache",
    "Entry",
    "LeastFrequentlyUsed",
    "LeastRecentlyUsed",
    "NgramCache",
    "NoCache",
    "entry_bytes",
]


@dataclass(frozen=True)
class Entry:
    """One active n-gram, as it is saved: pieces, the target token, how often it was touched."""

    pieces: Pieces
    token: int
    count: int


class Cache(Protocol):
    """The n-grams that are now active.

    Entries change only through `observe`, `fill` and `load`. They are called between blocks, so that no draft in
    flight ever points to an evicted n-gram; after each call `bytes` is within the budget.
    """

    @property
    def bytes(self) -> int:
        """Memory of all entries."""
        ...

    @property
    def version(self) -> int:
        """Number of insertions and removals so far."""
        ...

    def __len__(self) -> int:
        """Number of entries."""
        ...

    def observe(self, pieces: Pieces, token: int, times: int = 1) -> None:
        """The target emitted a token of several pieces: insert or touch it, and evict down to the budget.

        An entry that alone takes more than the budget is not inserted.
        """
        ...

    def fill(self, entries: Iterable[Entry]) -> None:
        """Insert entries with their counts, those that matter most first, until the next does not fit.

        Nothing is evicted; what is there already stays as it is.
        """
        ...

    def load(self, entries: Iterable[Entry]) -> None:
        """Fill with saved entries, in any order: the most often touched are kept."""
        ...

    def entries(self) -> list[Entry]:
        """All entries, most often touched first."""
        ...

    def save(self) -> Json:
        """See `stages.snapshot`."""
        ...

    def restore(self, saved: Json) -> None:
        """See `stages.snapshot`. What is in the cache now leaves."""
        ...


class NgramCache:
    """The cache of one trie within a budget in bytes; see `Cache`.

    `bytes` is the measured size of the objects that entries have made and that are still there: in the trie (see
    `Trie.bytes`), one record each, and what their order of leaving takes. Prefixes that entries share count once.
    """

    def __init__(self, trie: Trie, budget_bytes: float, eviction: Eviction) -> None:
        self._trie, self._budget, self._eviction = trie, budget_bytes, eviction
        self._others_bytes = trie.bytes  # direct maps
        self._count = 0
        self.version = 0

    def __len__(self) -> int:
        return self._count

    @property
    def bytes(self) -> int:
        """See `Cache`."""
        return self._trie.bytes - self._others_bytes + self._count * RECORD_BYTES + self._eviction.bytes

    def observe(self, pieces: Pieces, token: int, times: int = 1) -> None:
        """See `Cache`."""
        node = self._trie.node_at(pieces)
        record = (node.record if node else None) or self._admit(pieces, token)
        if record is not None:
            self._eviction.touch(record, times)
            self._evict()  # a count that nobody had before may take memory too

    def _admit(self, pieces: Pieces, token: int) -> Record | None:
        """Insert an entry and make room for it; None if that cannot be."""
        before = self.bytes
        record = self._insert(pieces, token)
        if self.bytes - before <= self._budget:
            self._evict()
        if self.bytes <= self._budget:
            return record
        self._remove(record)
        return None

    def _evict(self) -> None:
        while self.bytes > self._budget and (record := self._eviction.victim()):
            self._eviction.forget(record)
            self._remove(record)

    def _insert(self, pieces: Pieces, token: int) -> Record:
        record = Record(pieces)
        self._trie.insert(pieces, token).record = record
        self._count += 1
        self.version += 1
        return record

    def _remove(self, record: Record) -> None:
        self._trie.remove(record.pieces)
        self._count -= 1
        self.version += 1

    def fill(self, entries: Iterable[Entry]) -> None:
        """See `Cache`."""
        added: list[Record] = []
        for entry in entries:
            if self._trie.token_at(entry.pieces) is not None:
                continue
            record = self._insert(entry.pieces, entry.token)
            self._eviction.touch(record, entry.count)
            if self.bytes > self._budget:
                self._eviction.forget(record)
                self._remove(record)
                break
            added.append(record)
        for record in reversed(added):
            self._eviction.touch(record, 0)  # what matters most becomes the youngest

    def load(self, entries: Iterable[Entry]) -> None:
        """See `Cache`."""
        self.fill(sorted(entries, key=attrgetter("count"), reverse=True))

    def entries(self) -> list[Entry]:
        """See `Cache`."""
        found = [Entry(record.pieces, token, record.count) for record, token in self._trie.records()]
        return sorted(found, key=lambda entry: (-entry.count, entry.pieces))

    def save(self) -> Json:
        """See `Cache`. In the trie's own order, since sums over a node's tokens follow it."""
        records = list(self._trie.records())
        places = {id(record): place for place, (record, _) in enumerate(records)}
        return {
            "version": self.version,
            "entries": [[record.pieces, token, record.count] for record, token in records],
            "order": [places[id(record)] for record in self._eviction.order()],
        }

    def restore(self, saved: Json) -> None:
        """See `Cache`."""
        for record, _ in list(self._trie.records()):
            self._eviction.forget(record)
            self._remove(record)
        entries = saved["entries"]
        records = [self._insert(tuple(pieces), token) for pieces, token, _ in entries]
        for place in saved["order"] or range(len(records)):
            self._eviction.touch(records[place], entries[place][2])
        self.version = saved["version"]


class NoCache:
    """No n-grams: direct maps only. See `Cache`."""

    bytes = 0
    version = 0

    def __len__(self) -> int:
        return 0

    def observe(self, pieces: Pieces, token: int, times: int = 1) -> None:
        """Nothing is kept."""

    def fill(self, entries: Iterable[Entry]) -> None:
        """Nothing is kept."""

    def load(self, entries: Iterable[Entry]) -> None:
        """Nothing is kept."""

    def entries(self) -> list[Entry]:
        """None."""
        return []

    def save(self) -> Json:
        """Nothing to keep."""
        return None

    def restore(self, saved: Json) -> None:
        """Nothing was kept."""


def entry_bytes(pieces: Pieces) -> int:
    """What one entry takes that shares no prefix with another, in bytes."""
    cache = NgramCache(Trie(1, max(pieces) + 1), math.inf, LeastFrequentlyUsed())
    cache.observe(pieces, 0)
    return cache.bytes
