"""Eviction orders of the n-gram cache.

Records are linked in rings, so that an entry costs one small object and no table, and its memory can be counted.
Paper: appendix D.5 (LRU and LFU).
"""

from collections.abc import Callable, Iterator
from sys import getsizeof
from typing import Protocol

from typing_extensions import override

from stages.vocabulary.spelling import Pieces

_LAST_SHARED_INT = 256  # CPython has one object for each int up to here


def int_bytes(number: int) -> int:
    """Return the memory of a stored number in bytes."""
    return getsizeof(number) if number > _LAST_SHARED_INT else 0


class Record:
    """One entry of an eviction order, an n-gram, with its number of touches."""

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


def _ring(end: Record) -> Iterator[Record]:
    record = end.younger
    while record is not end:
        yield record
        record = record.younger


class Eviction(Protocol):
    """The order in which entries are evicted. Called by the cache only, between blocks, in stream order."""

    # memory that the order has allocated, counts included, without the records themselves. `touch` and `forget`
    # may change it.
    bytes: int

    def touch(self, record: Record, times: int = 1) -> None:
        """Add `times` to the count of an entry that was inserted or emitted again."""
        ...

    def forget(self, record: Record) -> None:
        """Remove an entry that was touched."""
        ...

    def victim(self) -> Record | None:
        """Return the entry to evict next; None if nothing may be evicted. It remains until it is forgotten."""
        ...

    def order(self) -> Iterator[Record]:
        """Iterate over the entries such that touching them in this order, each with its count, restores the order.

        Empty if entries are never evicted.
        """
        ...


class LeastRecentlyUsed(Eviction):
    """Evicts the entry that was touched longest ago."""

    def __init__(self) -> None:
        self._end = Record(())
        self.bytes = 0

    @override
    def touch(self, record: Record, times: int = 1) -> None:
        """Move to the young end of the ring."""
        record.leave()
        self.bytes -= int_bytes(record.count)
        record.count += times
        self.bytes += int_bytes(record.count)
        record.join(self._end)

    @override
    def forget(self, record: Record) -> None:
        """Remove from the ring of all entries."""
        record.leave()
        self.bytes -= int_bytes(record.count)

    @override
    def victim(self) -> Record | None:
        record = self._end.younger
        return None if record is self._end else record

    @override
    def order(self) -> Iterator[Record]:
        return _ring(self._end)


class LeastFrequentlyUsed(Eviction):
    """Evicts the entry with the fewest touches; of equals, the one that was touched longest ago."""

    def __init__(self) -> None:
        self._ends: dict[int, Record] = {}  # per count the ring of its records
        self.bytes = 0

    @override
    def touch(self, record: Record, times: int = 1) -> None:
        """Move to the young end of the ring of its new count."""
        self.forget(record)
        count = record.count + times
        if count not in self._ends:
            table = getsizeof(self._ends)
            self._ends[count] = Record((), count)
            self.bytes += RECORD_BYTES + int_bytes(count) + getsizeof(self._ends) - table
        end = self._ends[count]
        record.count = end.count  # the ring's own number: a large one is kept once
        record.join(end)

    @override
    def forget(self, record: Record) -> None:
        """Remove from its ring, and remove the ring with its last record."""
        record.leave()
        end = self._ends.get(record.count)
        if end is not None and end.younger is end:
            table = getsizeof(self._ends)
            del self._ends[record.count]
            self._ends = dict(self._ends.items())  # a new dictionary has no free slots
            self.bytes -= RECORD_BYTES + int_bytes(record.count) + table - getsizeof(self._ends)

    @override
    def victim(self) -> Record | None:
        """Return the oldest of those with the fewest touches."""
        return self._ends[min(self._ends)].younger if self._ends else None

    @override
    def order(self) -> Iterator[Record]:
        """Iterate ring by ring, each from its old end."""
        return (record for end in self._ends.values() for record in _ring(end))


class NeverEvict(Eviction):
    """Evicts nothing: for a cache without a limit."""

    def __init__(self) -> None:
        self.bytes = 0

    @override
    def touch(self, record: Record, times: int = 1) -> None:
        self.bytes -= int_bytes(record.count)
        record.count += times
        self.bytes += int_bytes(record.count)

    @override
    def forget(self, record: Record) -> None:
        """Subtract the memory of its count."""
        self.bytes -= int_bytes(record.count)

    @override
    def victim(self) -> None:
        return

    @override
    def order(self) -> Iterator[Record]:
        return iter(())


EVICTIONS: dict[str, Callable[[], Eviction]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "unbounded": NeverEvict,
}
