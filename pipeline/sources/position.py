"""Position in the stream of the sources, with a digest of what was read, and prefetching on a background thread."""

import queue
import threading
from collections.abc import Iterator
from hashlib import sha256
from typing import Generic, TypeVar

from store.errors import SourceError
from store.events import PromptReceived, PromptRejected

T = TypeVar("T")


class SourcePosition:
    """A source stream that records its position and a digest: a resumed run checks that it reads the same."""

    def __init__(self, events: Iterator[PromptReceived | PromptRejected]) -> None:
        self._events, self._taken, self._digest = events, 0, ""

    def __iter__(self) -> "SourcePosition":
        return self

    def __next__(self) -> PromptReceived | PromptRejected:
        event = next(self._events)
        self.count(event)
        return event

    def count(self, event: PromptReceived | PromptRejected) -> None:
        """Count one event that was read from a prefetcher instead of this iterator."""
        self._taken += 1
        self._digest = sha256(f"{self._digest}{event!r}".encode()).hexdigest()

    @property
    def state(self) -> tuple[int, str]:
        """The number of events read from the sources so far, and a digest of them."""
        return self._taken, self._digest

    def skip(self, saved: tuple[int, str]) -> None:
        """Read up to a saved position. Raises as `reread`."""
        for _ in self.reread(saved):
            pass

    def reread(self, saved: tuple[int, str]) -> Iterator[PromptReceived | PromptRejected]:
        """Yield the events up to a saved position. Raises `SourceError` after the last event, if the events differ from
        those of the saved position.
        """
        taken, digest = saved
        while self._taken < taken and (event := next(self, None)) is not None:
            yield event
        if (self._taken, self._digest) != (taken, digest):
            raise SourceError(
                f"The sources must begin with the {taken} rows that the run has read already, but they differ; give it "
                "the same files (on standard input: from the beginning), or begin a new run."
            )


class Prefetcher(Generic[T]):
    """Prefetches a source on a background thread. Used by one other thread."""

    def __init__(self, events: Iterator[T], limit: int) -> None:
        self._ready: queue.Queue[tuple[T | None, Exception | None]] = queue.Queue(limit)
        self.ended = False
        threading.Thread(target=self._read, args=(events,), name="prefetcher", daemon=True).start()

    def take(self) -> T | None:
        """Return the next event if one is ready, else None. `ended` is true after the last."""
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
