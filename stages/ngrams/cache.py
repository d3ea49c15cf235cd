"""The n-gram cache: the active target tokens of several pieces, within a byte budget.

Paper: section on the n-gram cache and appendix D.5. The cache owns the trie's n-grams: an inserted n-gram can be
drafted, an evicted one cannot.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from typing_extensions import override

from stages.ngrams.eviction import RECORD_BYTES, Eviction, LeastFrequentlyUsed, Record
from stages.ngrams.trie import Trie
from stages.vocabulary.spelling import Pieces


@dataclass(frozen=True)
class Entry:
    """One active n-gram as it is saved: its pieces, its target token, and its count of touches."""

    pieces: Pieces
    token: int
    count: int


class Cache(Protocol):
    """The active n-grams.

    Entries change only in `observe`, `fill` and `load`. They are called between blocks, so that no draft in flight
    refers to an evicted n-gram; after each call `bytes` is within the budget.
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
        """Number of active n-grams."""
        ...

    def observe(self, pieces: Pieces, token: int, times: int = 1) -> None:
        """Insert or touch an emitted token of several pieces, and evict down to the budget.

        An entry that alone takes more than the budget is not inserted.
        """
        ...

    def fill(self, entries: Iterable[Entry]) -> None:
        """Insert entries with their counts, the most important first, until the next does not fit.

        Nothing is evicted; present entries are unchanged.
        """
        ...

    def load(self, entries: Iterable[Entry]) -> None:
        """Insert saved entries, given in any order, with the highest counts first, until the next does not fit."""
        ...

    def entries(self) -> list[Entry]:
        """Return all entries, those with the highest counts first."""
        ...

    def state_dict(self) -> Any:
        """Return the state for a checkpoint (see `stages.contract.snapshot`)."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Replace all entries by those of a state."""
        ...


class NgramCache(Cache):
    """The cache of one trie within a budget in bytes.

    `bytes` is the measured size of the objects that exist for the entries: in the trie (see `Trie.bytes`), one record
    each, and the eviction order. Shared prefixes count once.
    """

    version = 0

    def __init__(self, trie: Trie, budget_bytes: float, eviction: Eviction) -> None:
        self._trie, self._budget, self._eviction = trie, budget_bytes, eviction
        self._others_bytes = trie.bytes  # direct maps
        self._count = 0

    @override
    def __len__(self) -> int:
        return self._count

    @property
    @override
    def bytes(self) -> int:
        return self._trie.bytes - self._others_bytes + self._count * RECORD_BYTES + self._eviction.bytes

    @override
    def observe(self, pieces: Pieces, token: int, times: int = 1) -> None:
        node = self._trie.node_at(pieces)
        record = (node.record if node else None) or self._admit(pieces, token)
        if record is not None:
            self._eviction.touch(record, times)
            self._evict()  # a new count may take memory too

    def _admit(self, pieces: Pieces, token: int) -> Record | None:
        """Insert an entry and evict others for it; None if it exceeds the budget."""
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

    @override
    def fill(self, entries: Iterable[Entry]) -> None:
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
            self._eviction.touch(record, 0)  # the most important becomes the youngest

    @override
    def load(self, entries: Iterable[Entry]) -> None:
        self.fill(sorted(entries, key=attrgetter("count"), reverse=True))

    @override
    def entries(self) -> list[Entry]:
        found = [Entry(record.pieces, token, record.count) for record, token in self._trie.records()]
        return sorted(found, key=lambda entry: (-entry.count, entry.pieces))

    @override
    def state_dict(self) -> Any:
        """Return the entries in the trie's own order, on which sums over a node's tokens depend, and their places in
        the order of eviction.
        """
        records = list(self._trie.records())
        places = {id(record): place for place, (record, _) in enumerate(records)}
        return {
            "version": self.version,
            "entries": [(record.pieces, token, record.count) for record, token in records],
            "order": [places[id(record)] for record in self._eviction.order()],
        }

    @override
    def load_state_dict(self, state: Any) -> None:
        for record, _ in list(self._trie.records()):
            self._eviction.forget(record)
            self._remove(record)
        records = [self._insert(tuple(pieces), token) for pieces, token, _ in state["entries"]]
        for place in state["order"] or range(len(records)):
            self._eviction.touch(records[place], state["entries"][place][2])
        self.version = state["version"]


class NoCache(Cache):
    """A cache without n-grams: only direct maps are active."""

    bytes = 0
    version = 0

    @override
    def __len__(self) -> int:
        return 0

    @override
    def observe(self, pieces: Pieces, token: int, times: int = 1) -> None:
        return

    @override
    def fill(self, entries: Iterable[Entry]) -> None:
        return

    @override
    def load(self, entries: Iterable[Entry]) -> None:
        return

    @override
    def entries(self) -> list[Entry]:
        return []

    @override
    def state_dict(self) -> Any:
        return None

    @override
    def load_state_dict(self, state: Any) -> None:
        return


def entry_bytes(pieces: Pieces) -> int:
    """Measure the memory of one entry that shares no prefix with another, in bytes."""
    cache = NgramCache(Trie(1, max(pieces) + 1), math.inf, LeastFrequentlyUsed())
    cache.observe(pieces, 0)
    return cache.bytes


def count_text_ngrams(tokens: Iterable[int], pieces: Sequence[Pieces | None]) -> list[Entry]:
    """Count the target tokens of several pieces in a text: the most frequent first, then by id."""
    counts = sorted(Counter(tokens).items(), key=lambda item: (-item[1], item[0]))
    spelt = ((pieces[token], token, count) for token, count in counts if token < len(pieces))
    return [Entry(found, token, count) for found, token, count in spelt if found and len(found) > 1]
