"""Eviction order of the n-gram cache.

Records are linked in rings, so that an entry costs one small object and no table, and its memory can be counted.
Paper: appendix D.5 (LRU and LFU).
"""

from collections.abc import Callable, Iterator
from sys import getsizeof

from stages.vocabulary.spelling import Pieces

_LAST_SHARED_INT = 256  # CPython has one object for each int up to here


def int_bytes(number: int) -> int:
    """Return the memory of a stored number in bytes."""
    return getsizeof(number) if number > _LAST_SHARED_INT else 0


class Record:
    """One entry of the eviction order, an n-gram, with its number of touches."""

    __slots__ = ("count", "older", "pieces", "younger")

    def __init__(self, pieces: Pieces, count: int = 0) -> None:
        self.pieces, self.count = pieces, count
        self.older = self.younger = self  # its neighbours in a ring; itself while it is in none

    def join(self, end: "Record") -> None:
        """Insert into the ring of `end` as the youngest."""
        self.older, self.younger = end.older, end
        self.older.younger = end.older = self

    def leave(self) -> None:
        """Remove from its ring, if any."""
        self.older.younger, self.younger.older = self.younger, self.older
        self.older = self.younger = self


RECORD_BYTES = getsizeof(Record(()))

Rank = Callable[[Record], int]
# By the name of the setting `cache.policy`: entries of the lowest rank are evicted first.
RANKS: dict[str, Rank] = {"lru": lambda record: 0, "lfu": lambda record: record.count}


class EvictionOrder:
    """The order in which entries are evicted: by rank, of equals the one that was touched longest ago.

    `bytes` is the memory that the order has allocated, without the records themselves.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._ends: dict[int, Record] = {}  # per rank the ring of its records
        self.bytes = 0

    def touch(self, record: Record, times: int = 1) -> None:
        """Add `times` to the count of an entry that was inserted or emitted again, and make it the youngest."""
        self.forget(record)
        record.count += times
        rank = self._rank(record)
        if rank not in self._ends:
            table = getsizeof(self._ends)
            self._ends[rank] = Record((), rank)
            self.bytes += RECORD_BYTES + int_bytes(rank) + getsizeof(self._ends) - table
        end = self._ends[rank]
        if record.count == rank:
            record.count = end.count  # the ring's own number: a large one is kept once
        record.join(end)

    def forget(self, record: Record) -> None:
        """Remove from its ring, and remove the ring with its last record."""
        record.leave()
        rank = self._rank(record)
        end = self._ends.get(rank)
        if end is not None and end.younger is end:
            table = getsizeof(self._ends)
            del self._ends[rank]
            self._ends = dict(self._ends.items())  # a new dictionary has no free slots
            self.bytes -= RECORD_BYTES + int_bytes(rank) + table - getsizeof(self._ends)

    def victim(self) -> Record | None:
        """Return the entry to evict next, which remains until it is forgotten; None without entries."""
        return self._ends[min(self._ends)].younger if self._ends else None

    def __iter__(self) -> Iterator[Record]:
        """Iterate such that touching the entries in this order, each with its count, restores the order."""
        for end in self._ends.values():
            record = end.younger
            while record is not end:
                yield record
                record = record.younger
