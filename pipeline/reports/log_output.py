"""Writes the project's log to standard error, as lines of text or of JSON.

Only this module gives a logger of the project a handler, and only commands and `pipeline.replay(progress=True)` use it.
Loggers of other libraries stay as they are.
"""

import json
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum

from typing_extensions import override

from pipeline.reports.terminal import LOADING, own_stderr_console, stderr_console
from store.log_records import PROJECT

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class LogLevel(StrEnum):
    """The lowest level that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class TextHandler(logging.Handler):
    """Prints messages above what is live on the console, however long they are."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            stderr_console().print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)
        except Exception:
            self.handleError(record)


class JsonHandler(logging.Handler):
    """Writes one JSON object a line: time, level, logger, message, and the fields that the record was given."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(json.dumps(self._fields(record), ensure_ascii=False, default=str) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def _fields(self, record: logging.LogRecord) -> dict[str, object]:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.processName not in (None, "MainProcess"):
            fields["process"] = record.processName
        if record.exc_info:
            fields["exception"] = logging.Formatter().formatException(record.exc_info)
        for name in sorted(record.__dict__.keys() - _STANDARD - fields.keys()):
            if name.startswith("_"):  # private to a library: Ray stamps every record of a process that imported it
                continue
            value = record.__dict__[name]
            # JSON has no NaN and no infinity: they become text.
            fields[name] = str(value) if isinstance(value, float) and not math.isfinite(value) else value
        return fields


def log_details(wanted: bool) -> None:
    """Lower the level of the log to `debug` until `write_log` ends, if that is wanted."""
    if wanted:
        PROJECT.setLevel(logging.DEBUG)


@contextmanager
def write_log(level: LogLevel, *, as_json: bool) -> Iterator[None]:
    """Write the project's log to standard error while the block runs. As lines of JSON nothing else is shown on
    standard error: no live display, no progress bar.
    """
    handler: logging.Handler = JsonHandler() if as_json else TextHandler()
    before = PROJECT.level, PROJECT.propagate
    handler.addFilter(lambda record: record.name != LOADING.name)  # shown by `status`, or not at all
    PROJECT.addHandler(handler)
    PROJECT.setLevel(level.upper())
    PROJECT.propagate = False  # else a handler that another library gave to the root writes every line again
    try:
        with own_stderr_console(quiet=as_json):
            yield
    finally:
        PROJECT.removeHandler(handler)
        PROJECT.setLevel(before[0])
        PROJECT.propagate = before[1]
