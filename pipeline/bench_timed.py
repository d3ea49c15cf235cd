"""Parts of the pipeline that are timed as they are."""

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TypeVar

from pipeline.publish import Publisher
from stages.snapshot import Json
from store.events import Drifted, PromptCompleted, VersionPublished

T = TypeVar("T")


class Stopwatch:
    """Adds up the seconds of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, call: Callable[[], T]) -> T:
        """Call and return what it returns."""
        started = perf_counter()
        result = call()
        self.seconds += perf_counter() - started
        return result


class TimedPublisher:
    """Another publisher, timed."""

    def __init__(self, publisher: Publisher, watch: Stopwatch) -> None:
        self._publisher, self._watch = publisher, watch

    def floor(self) -> Iterator[VersionPublished]:
        """As the other's."""
        yield from self._watch.time(lambda: list(self._publisher.floor()))

    def at(self, drifted: Drifted) -> Iterator[VersionPublished]:
        """As the other's."""
        yield from self._watch.time(lambda: list(self._publisher.at(drifted)))

    def after(self, prompt: PromptCompleted) -> Iterator[VersionPublished]:
        """As the other's."""
        yield from self._watch.time(lambda: list(self._publisher.after(prompt)))

    def end(self) -> Iterator[VersionPublished]:
        """As the other's."""
        yield from self._watch.time(lambda: list(self._publisher.end()))

    def save(self) -> Json:
        """As the other's."""
        return self._publisher.save()

    def restore(self, saved: Json) -> None:
        """As the other's."""
        self._publisher.restore(saved)
