"""Log records that go to another process instead of a handler of this one, and a filter for the log of a server.

All loggers of the project are below `omnidraft`. Commands alone give it handlers (pipeline/reports/log_output.py). A
process that a command starts forwards its records to the command's process, which handles them like its own.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import QueueHandler
from queue import SimpleQueue

from typing_extensions import override

PROJECT = logging.getLogger("omnidraft")
EVERY_SECONDS = 60.0  # in which a server's log shows a warning once
_MOST_MESSAGES = 100  # different ones that are remembered


class _Forwarder(QueueHandler):
    """Sends records, with formatted messages, so that they can be pickled."""

    def __init__(self, send: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(SimpleQueue())
        self._send = send

    @override
    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # nobody listens any more
            self._send(record)


def forward_records(send: Callable[[logging.LogRecord], None], level: int) -> None:
    """Send the project's records of this process from `level` on through `send`, and nowhere else.

    `send` takes a record that can be pickled, on any thread, one call at a time; its OSError is ignored.
    """
    PROJECT.handlers, PROJECT.propagate = [_Forwarder(send)], False
    PROJECT.setLevel(level)


class RecordQueue:
    """The project's records of this process, from `level` on, until they are sent with a result; none if it is None."""

    def __init__(self, level: int | None) -> None:
        self._queue: SimpleQueue[logging.LogRecord] = SimpleQueue()
        if level is not None:
            forward_records(self._queue.put, level)

    def drain(self) -> tuple[logging.LogRecord, ...]:
        return tuple(self._queue.get() for _ in range(self._queue.qsize()))


def handle_record(record: logging.LogRecord, process: str) -> None:
    """Handle a record of another process, named `process`, as if it were of this one."""
    record.processName = process
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


class RepeatedWarnings(logging.Filter):
    """Passes each warning once in so many seconds; the next one that passes has the number of those that did not. A
    client must not be able to fill a disk with warnings about its requests.
    """

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
