"""A filter for the log of a server: a client must not be able to fill a disk with warnings about its requests."""

import logging
import time
from collections.abc import Callable

from typing_extensions import override

EVERY_SECONDS = 60.0
_MOST_MESSAGES = 100  # different ones that are remembered


class RepeatedWarnings(logging.Filter):
    """Passes each warning once in so many seconds; the next one that passes has the number of those that did not."""

    def __init__(self, seconds: float = EVERY_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds, self._clock = seconds, clock
        self._seen: dict[str, tuple[float, int]] = {}  # by message: when it passed, and how often it did not since

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes. Errors always do."""
        if record.levelno != logging.WARNING:
            return True
        message, now = record.getMessage(), self._clock()
        passed, dropped = self._seen.get(message, (now - self._seconds, 0))
        if now - passed < self._seconds:
            self._seen[message] = passed, dropped + 1
            return False
        if len(self._seen) >= _MOST_MESSAGES:
            self._seen.clear()
        self._seen[message] = now, 0
        if dropped:
            record.msg, record.args = f"{message} ({dropped} more like it were not shown)", ()
        return True


def limit_warnings(logger: str) -> None:
    """Let a logger pass each warning once per interval; harmless if called again."""
    found = logging.getLogger(logger)
    if not any(isinstance(one, RepeatedWarnings) for one in found.filters):
        found.addFilter(RepeatedWarnings())
