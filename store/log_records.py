"""Log records that do not go to a handler of this process, but to another process.

All loggers of the project are below `omnidraft`. Commands alone give it handlers (pipeline/reports/log_output.py). A
process that a command starts forwards its records to the command's process, which handles them like its own.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import QueueHandler
from queue import SimpleQueue

from typing_extensions import override

PROJECT = logging.getLogger("omnidraft")


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
