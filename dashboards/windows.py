"""How many prompts make one point of a curve."""

from store.errors import UsageError
from store.queries import LogReader

POINTS = 40  # of one curve, unless asked otherwise
MOST_POINTS = 1000
SMALLEST = 5  # prompts; fewer say little about a rate


def window_of(log: LogReader, asked: int = 0) -> int:
    """Prompts of one point: as asked, but never so few that there are more than 1,000 points; 0 means a good number.

    Raises `UsageError` for a negative number.
    """
    if asked < 0:
        raise UsageError(f"prompts per point must be positive, or 0 for a good number; got {asked}")
    good = max(SMALLEST, _round_number(_prompts(log) / POINTS))
    return max(asked or good, stretch_of(log, MOST_POINTS))


def stretch_of(log: LogReader, most: int) -> int:
    """Prompts of one stretch, such that the longest run has at most `most` of them."""
    return max(1, -(-_prompts(log) // most))


def _prompts(log: LogReader) -> int:
    (row,) = log.select('SELECT coalesce(max("offset") + 1, 0) AS prompts FROM prompts').to_pylist()
    return int(row["prompts"])


def _round_number(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is not below `least`."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10
