"""Figures of a study, made from its records: rates of a run or a part of it, means over seeds, standard errors.

All are prequential: a prompt is counted before anything learns from it. Arms are compared seed by seed, because the
runs of one seed have the same prompts and draws.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import fmean, stdev

from pipeline.study_records import Passed, Record

WINDOW = 20  # prompts over which a rate around a switch is taken
RECOVERED = 0.9  # share of a level at which it counts as reached again


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        value: the mean.
        error: its standard error; None for one seed.
        seeds: of how many seeds.
    """

    value: float
    error: float | None
    seeds: int


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """Of the values that there are; None if there is none.

    >>> estimate([0.5, None])
    Estimate(value=0.5, error=None, seeds=1)
    """
    found = [value for value in values if value is not None]
    if not found:
        return None
    return Estimate(fmean(found), stdev(found) / sqrt(len(found)) if len(found) > 1 else None, len(found))


@dataclass(frozen=True)
class Rates:
    """Of some prompts of a run; None where nothing was judged or no time passed.

    Attributes:
        acceptance: accepted / judged.
        block_efficiency: emitted target tokens per target forward.
        accepted_length: accepted target tokens per target forward.
        tokens_per_second: emitted over all wall time, learning included.
        tokens_per_cpu_second: the same over processor time, which other processes on the machine disturb less.
    """

    acceptance: float | None
    block_efficiency: float | None
    accepted_length: float | None
    tokens_per_second: float | None
    tokens_per_cpu_second: float | None


def rates(passed: Sequence[Passed], seconds: float, cpu: float) -> Rates:
    """Of prompts that took so many seconds of wall and processor time together.

    >>> rates([Passed(0, 30, 10, 50, 40, 20, 1.0, 1.0)], 2.0, 1.5).tokens_per_second
    15.0
    """
    emitted, blocks = sum(one.emitted for one in passed), sum(one.blocks for one in passed)
    accepted = sum(one.accepted for one in passed)
    return Rates(
        acceptance=acceptance(passed),
        block_efficiency=emitted / blocks if blocks else None,
        accepted_length=accepted / blocks if blocks else None,
        tokens_per_second=emitted / seconds if seconds > 0 else None,
        tokens_per_cpu_second=emitted / cpu if cpu > 0 else None,
    )


def acceptance(passed: Sequence[Passed]) -> float | None:
    """Accepted over judged; None if nothing was judged."""
    judged = sum(one.judged for one in passed)
    return sum(one.accepted for one in passed) / judged if judged else None


def whole(record: Record) -> Rates:
    """Over the whole stream."""
    return rates(record.passed, record.seconds, record.cpu_seconds)


def last_fifth(record: Record) -> Rates:
    """Over the last fifth of the prompts, rounded up, in the order of completion."""
    number = ceil(len(record.passed) / 5)
    if number == len(record.passed):
        return whole(record)
    before = record.passed[-number - 1]
    return rates(record.passed[-number:], record.seconds - before.at, record.cpu_seconds - before.cpu)


Figure = Callable[[Record], float | None]


def ratio(own: Sequence[Record], reference: Sequence[Record], figure: Figure) -> Estimate | None:
    """Mean over seeds of an arm's figure over the reference's at the same seed."""
    theirs = {record.key.seed: figure(record) for record in reference}
    return estimate(_divided(figure(record), theirs.get(record.key.seed)) for record in own)


def _divided(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


@dataclass(frozen=True)
class Switch:
    """What one change of the source did to a run. Rates are accepted / judged over `WINDOW` prompts in stream order.

    Attributes:
        before: the rate in the last window before the switch.
        deepest: the lowest rate in a window behind it.
        end: the rate in the last fifth of the segment behind it.
        delay: prompts from the switch to the first alarm on a fall; None without one.
        alarms: alarms on a fall behind it.
        false_alarms: alarms on a fall before it.
        recalls: times that an earlier version was taken back behind it.
        to_end, to_before: prompts from the switch to the end of the first window that reaches nine tenths of the
            rate at the end of the segment, and of the rate before the switch; None if none does.
    """

    before: float | None
    deepest: float | None
    end: float | None
    delay: int | None
    alarms: int
    false_alarms: int
    recalls: int
    to_end: int | None
    to_before: int | None

    @property
    def drop(self) -> float | None:
        """Depth of the fall, in points of the rate."""
        return self.before - self.deepest if self.before is not None and self.deepest is not None else None

    @property
    def relative_drop(self) -> float | None:
        """Depth of the fall over the rate before it."""
        return _divided(self.drop, self.before)


def segment(record: Record, number: int) -> list[Passed]:
    """The completed prompts of one segment, in stream order."""
    first, end = record.segments[number : number + 2]
    return sorted((one for one in record.passed if first <= one.offset < end), key=lambda one: one.offset)


def switch(record: Record, number: int = 1, window: int = WINDOW) -> Switch:
    """What the change to segment `number` did; alarms before it are those since the segment before began."""
    before = acceptance(segment(record, number - 1)[-window:])
    behind = segment(record, number)
    windows = _windows(behind, window)
    end = acceptance(_part(behind, last=True))
    begin, at, stop = record.segments[number - 1 : number + 2]
    falls = [alarm.offset for alarm in record.alarms if alarm.direction == "fall"]
    found = [offset - at for offset in falls if at <= offset < stop]
    return Switch(
        before=before,
        deepest=min((rate for _, rate in windows), default=None),
        end=end,
        delay=min(found, default=None),
        alarms=len(found),
        false_alarms=sum(begin <= offset < at for offset in falls),
        recalls=sum(at <= offset < stop for offset in record.recalls),
        to_end=_reached(windows, end),
        to_before=_reached(windows, before),
    )


def _windows(passed: Sequence[Passed], size: int) -> list[tuple[int, float]]:
    """Every whole window, by how many prompts it ends at, where something was judged."""
    ends = range(min(size, len(passed)), len(passed) + 1)
    found = ((end, acceptance(passed[max(0, end - size) : end])) for end in ends)
    return [(end, rate) for end, rate in found if rate is not None]


def _reached(windows: Sequence[tuple[int, float]], level: float | None) -> int | None:
    if level is None:
        return None
    return next((end for end, rate in windows if rate >= RECOVERED * level), None)


def _part(passed: Sequence[Passed], *, last: bool) -> Sequence[Passed]:
    number = ceil(len(passed) / 5)
    return passed[-number:] if last else passed[:number]


def segment_rates(record: Record, number: int) -> tuple[float | None, float | None]:
    """Acceptance in the first and last fifth of a segment."""
    passed = segment(record, number)
    return acceptance(_part(passed, last=False)), acceptance(_part(passed, last=True))


def back_again(record: Record) -> float | None:
    """A B A B: where the third segment starts over where the first ended."""
    if len(record.segments) < 4:
        return None
    return _divided(segment_rates(record, 2)[0], segment_rates(record, 0)[1])
