"""A source that is read on another thread keeps nobody waiting, and loses nothing."""

import threading
import time
from collections.abc import Iterator

import pytest

from pipeline.read_ahead import ReadAhead
from store.errors import SourceError


def taken(reader: ReadAhead[int], count: int) -> list[int]:
    """So many events, however long they take to come."""
    found: list[int] = []
    end = time.monotonic() + 30
    while len(found) < count and not reader.ended and time.monotonic() < end:
        event = reader.take()
        if event is not None:
            found.append(event)
        else:
            time.sleep(0.001)
    return found


def test_all_events_come_in_order_then_the_end():
    reader = ReadAhead(iter(range(50)), 3)
    assert taken(reader, 51) == list(range(50))
    assert reader.ended
    assert reader.take() is None


def test_nothing_is_there_yet_and_nobody_waits():
    go = threading.Event()

    def slow() -> Iterator[int]:
        go.wait(30)
        yield 7

    reader = ReadAhead(slow(), 3)
    assert reader.take() is None
    assert not reader.ended
    go.set()
    assert taken(reader, 1) == [7]


def test_it_reads_no_further_than_it_may():
    read: list[int] = []
    reader = ReadAhead((read.append(number) or number for number in range(100)), 4)
    assert taken(reader, 10) == list(range(10))
    time.sleep(0.05)
    assert len(read) <= 10 + 4 + 1  # taken, waiting, and one in the reader's hand


def test_what_the_source_raises_comes_behind_what_it_gave():
    def broken() -> Iterator[int]:
        yield 1
        raise SourceError("the file ended in the middle of a row")

    reader = ReadAhead(broken(), 3)
    assert taken(reader, 1) == [1]
    with pytest.raises(SourceError, match="middle"):
        taken(reader, 1)
    assert reader.ended
