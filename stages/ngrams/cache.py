"""The n-gram cache: the active target tokens of several pieces, within a byte budget.

Paper: section on the n-gram cache and appendix D.5. The cache owns the trie's n-grams: an inserted n-gram can be
drafted, an evicted one cannot.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from stages.ngrams.eviction import RANKS, RECORD_BYTES, EvictionOrder, Record
from stages.ngrams.trie import Trie
from stages.vocabulary.spelling import Pieces


@dataclass(frozen=True)
class Entry:
    """One active n-gram as it is saved: its pieces, its target token, and its count of touches."""

    pieces: Pieces
    token: int
    count: int


class NgramCache:
    """The active n-grams of one trie within a budget in bytes.

    Entries change only in `observe`, `fill` and `load_state_dict`. They are called between blocks, so that no draft in
    flight refers to an evicted n-gram; after each call `bytes` is within the budget.

    Args:
        policy: a name of `RANKS`; also "unbounded", without a budget, and "off", with one of 0.
    """

    def __init__(self, trie: Trie, budget_bytes: float, policy: str = "lfu") -> None:
        self._trie, self._eviction = trie, EvictionOrder(RANKS.get(policy, RANKS["lfu"]))
        self._budget = {"unbounded": math.inf, "off": 0}.get(policy, budget_bytes)
        self._others_bytes = trie.bytes  # direct maps
        self._count = 0
        self.version = 0  # number of insertions and removals so far

    def __len__(self) -> int:
        return self._count

    @property
    def bytes(self) -> int:
        """Measured size of the objects of all entries: in the trie (see `Trie.bytes`), one record each, and the
        eviction order. Shared prefixes count once.
        """
        return self._trie.bytes - self._others_bytes + self._count * RECORD_BYTES + self._eviction.bytes

    def observe(self, pieces: Pieces, token: int, times: int = 1) -> None:
        """Insert or touch an emitted token of several pieces, and evict down to the budget.

        An entry that alone takes more than the budget is not inserted.
        """
        if not self._budget:
            return
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

    def fill(self, entries: Iterable[Entry]) -> None:
        """Insert entries with their counts, the highest first, until the next does not fit.

        Nothing is evicted; present entries are unchanged.
        """
        added: list[Record] = []
        for entry in sorted(entries, key=attrgetter("count"), reverse=True) if self._budget else ():
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

    def entries(self) -> list[Entry]:
        """Return all entries, those with the highest counts first."""
        found = [Entry(record.pieces, token, record.count) for record, token in self._trie.records()]
        return sorted(found, key=lambda entry: (-entry.count, entry.pieces))

    def state_dict(self) -> Any:
        """Return the entries in the trie's own order, on which sums over a node's tokens depend, and their places in
        the order of eviction.
        """
        records = list(self._trie.records())
        places = {id(record): place for place, (record, _) in enumerate(records)}
        return {
            "version": self.version,
            "entries": [(record.pieces, token, record.count) for record, token in records],
            "order": [places[id(record)] for record in self._eviction],
        }

    def load_state_dict(self, state: Any) -> None:
        for record, _ in list(self._trie.records()):
            self._eviction.forget(record)
            self._remove(record)
        records = [self._insert(tuple(pieces), token) for pieces, token, _ in state["entries"]]
        for place in state["order"]:
            self._eviction.touch(records[place], state["entries"][place][2])
        self.version = state["version"]


def entry_bytes(pieces: Pieces) -> int:
    """Measure the memory of one entry that shares no prefix with another, in bytes."""
    cache = NgramCache(Trie(1, max(pieces) + 1), math.inf)
    cache.observe(pieces, 0)
    return cache.bytes


def count_text_ngrams(tokens: Iterable[int], pieces: Sequence[Pieces | None]) -> list[Entry]:
    """Count the target tokens of several pieces in a text: the most frequent first, then by id."""
    counts = sorted(Counter(tokens).items(), key=lambda item: (-item[1], item[0]))
    spelt = ((pieces[token], token, count) for token, count in counts if token < len(pieces))
    return [Entry(found, token, count) for found, token, count in spelt if found and len(found) > 1]
