"""A prefetched source does not block its reader and loses no event."""

import threading
import time
from collections.abc import Iterator

import pytest

from pipeline.sources.position import Prefetcher
from store.errors import SourceError


def take_events(reader: Prefetcher[int], count: int) -> list[int]:
    """Take `count` events, waiting as long as needed."""
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
    reader = Prefetcher(iter(range(50)), 3)
    assert take_events(reader, 51) == list(range(50))
    assert reader.ended
    assert reader.take() is None


def test_a_reader_does_not_wait_for_a_slow_source():
    go = threading.Event()

    def slow() -> Iterator[int]:
        go.wait(30)
        yield 7

    reader = Prefetcher(slow(), 3)
    assert reader.take() is None
    assert not reader.ended
    go.set()
    assert take_events(reader, 1) == [7]


def test_the_number_of_prefetched_events_is_limited():
    read: list[int] = []
    reader = Prefetcher((read.append(number) or number for number in range(100)), 4)
    assert take_events(reader, 10) == list(range(10))
    time.sleep(0.05)
    assert len(read) <= 10 + 4 + 1  # taken, waiting, and one that is being read


def test_an_error_of_the_source_is_raised_after_its_events():
    def break_off() -> Iterator[int]:
        yield 1
        raise SourceError("the file ended in the middle of a row")

    reader = Prefetcher(break_off(), 3)
    assert take_events(reader, 1) == [1]
    with pytest.raises(SourceError, match="middle"):
        take_events(reader, 1)
    assert reader.ended
