"""What a run logs, as part of its record."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from store.log_records import PROJECT, forward_records


@contextmanager
def collect_messages(level: int = logging.INFO) -> Iterator[list[str]]:
    """The messages of the project's loggers from `level` on while the block runs, which go nowhere else."""
    found: list[str] = []
    before = PROJECT.handlers, PROJECT.propagate, PROJECT.level
    forward_records(lambda record: found.append(record.getMessage()), level)
    try:
        yield found
    finally:
        PROJECT.handlers, PROJECT.propagate = before[:2]
        PROJECT.setLevel(before[2])
