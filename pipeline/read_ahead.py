"""Reading a source on a thread of its own, for who has other things to do while it keeps us waiting."""

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Reads a little ahead. Used by one thread beside its own.

    Args:
        events: the source; it is read on the other thread.
        most: events that wait to be taken.
    """

    def __init__(self, events: Iterator[T], most: int) -> None:
        self._ready: queue.Queue[tuple[T | None, Exception | None]] = queue.Queue(most)
        self.ended = False
        threading.Thread(target=self._read, args=(events,), name="reader", daemon=True).start()

    def take(self) -> T | None:
        """The next event if it is there. `ended` is true behind the last.

        Raises:
            Exception: what the source raised, behind the last event before it.
        """
        if self.ended:
            return None
        try:
            event, error = self._ready.get_nowait()
        except queue.Empty:
            return None
        self.ended = event is None
        if error:
            raise error
        return event

    def _read(self, events: Iterator[T]) -> None:
        try:
            for event in events:
                self._ready.put((event, None))
            self._ready.put((None, None))
        except Exception as error:
            self._ready.put((None, error))
