"""In which order n-grams leave a full cache.

Records hang in rings, so that an entry costs one small object and no table: what is counted for it is what it takes.
Paper: appendix D.5 (LRU and LFU).
"""

from collections.abc import Callable, Iterator
from sys import getsizeof
from typing import Protocol

Pieces = tuple[int, ...]
_LAST_SHARED_INT = 256  # CPython has one object for each int up to here


def int_bytes(number: int) -> int:
    """Memory of a number that somebody keeps."""
    return getsizeof(number) if number > _LAST_SHARED_INT else 0


class Record:
    """One entry in an order of leaving.

    Attributes:
        pieces: of the n-gram.
        count: how often it was touched.
        older, younger: its neighbours in a ring; itself while it is in none.
    """

    __slots__ = ("count", "older", "pieces", "younger")

    def __init__(self, pieces: Pieces, count: int = 0) -> None:
        self.pieces, self.count = pieces, count
        self.older = self.younger = self

    def join(self, end: "Record") -> None:
        """Enter the ring of `end` as the youngest."""
        self.older, self.younger = end.older, end
        self.older.younger = end.older = self

    def leave(self) -> None:
        """Leave the ring."""
        self.older.younger, self.younger.older = self.younger, self.older
        self.older = self.younger = self


RECORD_BYTES = getsizeof(Record(()))


def _ring(end: Record) -> Iterator[Record]:
    """The records of a ring, oldest first."""
    record = end.younger
    while record is not end:
        yield record
        record = record.younger


class Eviction(Protocol):
    """The order in which entries leave. Called by the cache only, between blocks, in stream order.

    Attributes:
        bytes: memory that the order has taken since it was made, counts included, without the records themselves.
            Both calls may change it.
    """

    bytes: int

    def touch(self, record: Record, times: int = 1) -> None:
        """The entry was inserted or emitted again: add `times` to its count."""
        ...

    def forget(self, record: Record) -> None:
        """An entry that was touched is taken out."""
        ...

    def victim(self) -> Record | None:
        """The entry that leaves next; None where nothing may leave. It stays until it is forgotten."""
        ...

    def order(self) -> Iterator[Record]:
        """Entries such that touching them anew in this order, each as often as it was, gives the same order of leaving.

        Nothing where entries never leave.
        """
        ...


class LeastRecentlyUsed:
    """Evict what was touched longest ago."""

    def __init__(self) -> None:
        self._end = Record(())
        self.bytes = 0

    def touch(self, record: Record, times: int = 1) -> None:
        """Move to the young end."""
        record.leave()
        self.bytes -= int_bytes(record.count)
        record.count += times
        self.bytes += int_bytes(record.count)
        record.join(self._end)

    def forget(self, record: Record) -> None:
        """Take it out of the ring."""
        record.leave()
        self.bytes -= int_bytes(record.count)

    def victim(self) -> Record | None:
        """The entry at the old end."""
        record = self._end.younger
        return None if record is self._end else record

    def order(self) -> Iterator[Record]:
        """From the old end on."""
        return _ring(self._end)


class LeastFrequentlyUsed:
    """Evict what was touched least often; of equals, what was touched longest ago."""

    def __init__(self) -> None:
        self._ends: dict[int, Record] = {}  # per count the ring of its records
        self.bytes = 0

    def touch(self, record: Record, times: int = 1) -> None:
        """Move to the young end of the ring of its new count."""
        self.forget(record)
        count = record.count + times
        if count not in self._ends:
            self._open(count)
        end = self._ends[count]
        record.count = end.count  # the ring's own number: a large one is kept once
        record.join(end)

    def forget(self, record: Record) -> None:
        """Take it out of its ring, and the ring away with its last record."""
        record.leave()
        end = self._ends.get(record.count)
        if end is not None and end.younger is end:
            self._close(record.count)

    def victim(self) -> Record | None:
        """The oldest of those with the fewest touches."""
        return self._ends[min(self._ends)].younger if self._ends else None

    def order(self) -> Iterator[Record]:
        """Ring by ring, each from its old end on."""
        return (record for end in self._ends.values() for record in _ring(end))

    def _open(self, count: int) -> None:
        table = getsizeof(self._ends)
        self._ends[count] = Record((), count)
        self.bytes += RECORD_BYTES + int_bytes(count) + getsizeof(self._ends) - table

    def _close(self, count: int) -> None:
        table = getsizeof(self._ends)
        del self._ends[count]
        self._ends = dict(self._ends.items())  # a new one has no room for what has left
        self.bytes -= RECORD_BYTES + int_bytes(count) + table - getsizeof(self._ends)


class NeverEvict:
    """Keep everything: for a cache without a limit."""

    def __init__(self) -> None:
        self.bytes = 0

    def touch(self, record: Record, times: int = 1) -> None:
        """Count it."""
        self.bytes -= int_bytes(record.count)
        record.count += times
        self.bytes += int_bytes(record.count)

    def forget(self, record: Record) -> None:
        """Its count is gone."""
        self.bytes -= int_bytes(record.count)

    def victim(self) -> None:
        """Nothing leaves."""
        return

    def order(self) -> Iterator[Record]:
        """There is none."""
        return iter(())


EVICTIONS: dict[str, Callable[[], Eviction]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "unbounded": NeverEvict,
}
