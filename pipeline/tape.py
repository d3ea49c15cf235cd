"""The source stream with a counter: how far it was read, and whether it is the one that was read before."""

from collections.abc import Iterator
from hashlib import sha256

from stages.snapshot import Json
from store.errors import SourceError
from store.events import PromptReceived, PromptRejected


class Tape:
    """Passes a stream on, event by event.

    Args:
        events: the stream from its beginning.
    """

    def __init__(self, events: Iterator[PromptReceived | PromptRejected]) -> None:
        self._events, self._taken, self._digest = events, 0, ""

    def __iter__(self) -> "Tape":
        return self

    def __next__(self) -> PromptReceived | PromptRejected:
        event = next(self._events)
        self.count(event)
        return event

    def count(self, event: PromptReceived | PromptRejected) -> None:
        """One more was taken: for who reads ahead and takes later."""
        self._taken += 1
        self._digest = sha256(f"{self._digest}{event!r}".encode()).hexdigest()

    def save(self) -> Json:
        """How much was taken, and a digest of it."""
        return [self._taken, self._digest]

    def skip(self, saved: Json) -> None:
        """Take as much as when `save` was called. Raises as `again`."""
        for _ in self.again(saved):
            pass

    def again(self, saved: Json) -> Iterator[PromptReceived | PromptRejected]:
        """What was taken when `save` was called.

        Raises:
            SourceError: behind the last of it: it is not the same.
        """
        taken, digest = saved
        while self._taken < taken and (event := next(self, None)) is not None:
            yield event
        if [self._taken, self._digest] != [taken, digest]:
            raise SourceError(
                f"The sources must begin with the {taken} rows that the run has read already, but they differ; give it "
                "the same files (on standard input: from the beginning), or begin a new run."
            )
