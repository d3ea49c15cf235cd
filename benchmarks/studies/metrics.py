"""Computes the results of a study from its records: rates of runs and of parts of runs, means and standard errors.

All rates are prequential: a prompt is counted before anything learns from it. Arms are compared seed by seed, because
the runs of one seed have the same prompts and random draws.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import fmean, stdev

from benchmarks.studies.records import PromptCounts, Record

WINDOW = 20  # prompts per window around a switch
RECOVERED = 0.9  # share of a rate at which it counts as recovered
NONE = "–"  # in tables, where there is no value


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds."""

    value: float  # the mean
    error: float | None  # standard error of the mean; None for one seed
    seeds: int  # number of seeds


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """Mean and standard error of the values that are not None; None if there is none.

    >>> estimate([0.5, None])
    Estimate(value=0.5, error=None, seeds=1)
    """
    found = [value for value in values if value is not None]
    if not found:
        return None
    return Estimate(fmean(found), stdev(found) / sqrt(len(found)) if len(found) > 1 else None, len(found))


def format_estimate(found: Estimate | None, digits: int) -> str:
    """Format an estimate as `0.512 ± 0.004`, without the error for one seed."""
    if found is None:
        return NONE
    error = "" if found.error is None else f" ± {found.error:.{digits}f}"
    return f"{found.value:.{digits}f}{error}"


@dataclass(frozen=True)
class RunRates:
    """Rates over some prompts of a run. A rate is None if its denominator is 0."""

    acceptance: float | None  # accepted / judged tokens
    block_efficiency: float | None  # emitted target tokens per target forward
    accepted_length: float | None  # accepted target tokens per target forward
    tokens_per_second: float | None  # emitted tokens per second of wall time, learning included
    # emitted tokens per second of processor time, which other processes disturb less
    tokens_per_cpu_second: float | None


def rates(passed: Sequence[PromptCounts], seconds: float, cpu: float) -> RunRates:
    """Rates of prompts that together took `seconds` of wall time and `cpu` seconds of processor time.

    >>> rates([PromptCounts(0, 30, 10, 50, 40, 20, 1.0, 1.0)], 2.0, 1.5).tokens_per_second
    15.0
    """
    emitted, blocks = sum(one.emitted for one in passed), sum(one.blocks for one in passed)
    accepted = sum(one.accepted for one in passed)
    return RunRates(
        acceptance=acceptance(passed),
        block_efficiency=emitted / blocks if blocks else None,
        accepted_length=accepted / blocks if blocks else None,
        tokens_per_second=emitted / seconds if seconds > 0 else None,
        tokens_per_cpu_second=emitted / cpu if cpu > 0 else None,
    )


def acceptance(passed: Sequence[PromptCounts]) -> float | None:
    """Accepted / judged tokens; None if nothing was judged."""
    judged = sum(one.judged for one in passed)
    return sum(one.accepted for one in passed) / judged if judged else None


def whole(record: Record) -> RunRates:
    """Rates over the whole stream."""
    return rates(record.passed, record.seconds, record.cpu_seconds)


def last_fifth(record: Record) -> RunRates:
    """Rates over the last fifth of the prompts, rounded up, in the order of completion."""
    number = ceil(len(record.passed) / 5)
    if number == len(record.passed):
        return whole(record)
    before = record.passed[-number - 1]
    return rates(record.passed[-number:], record.seconds - before.at, record.cpu_seconds - before.cpu)


def fifths(record: Record) -> list[tuple[PromptCounts, ...]]:
    """Divide the prompts, in the order of completion, into five parts that differ by one prompt at most."""
    count = len(record.passed)
    return [record.passed[part * count // 5 : (part + 1) * count // 5] for part in range(5)]


def right_first_pieces(passed: Sequence[PromptCounts]) -> float | None:
    """Share of the tokens whose first piece the drafter had as its likeliest; None if that was not measured."""
    places = sum(one.places for one in passed)
    return sum(one.first_right for one in passed) / places if places else None


Metric = Callable[[Record], float | None]


def ratio(own: Sequence[Record], reference: Sequence[Record], metric: Metric) -> Estimate | None:
    """Mean over seeds of the ratio of a value in one arm to that in the reference arm, paired by seed."""
    theirs = {record.key.seed: metric(record) for record in reference}
    return estimate(_divide(metric(record), theirs.get(record.key.seed)) for record in own)


def _divide(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


@dataclass(frozen=True)
class Switch:
    """Effect of a switch of the source on a run. Rates are accepted / judged over `WINDOW` prompts in stream order."""

    before: float | None  # rate in the last window before the switch
    deepest: float | None  # lowest rate in a window after the switch
    end: float | None  # rate in the last fifth of the segment after the switch
    delay: int | None  # prompts from the switch to the first alarm on a drop; None if there is none
    alarms: int  # number of alarms on a drop after the switch
    false_alarms: int  # number of alarms on a drop before the switch
    recalls: int  # number of recalls of an earlier version after the switch
    # to_end, to_before: prompts from the switch to the end of the first window that reaches nine tenths of the
    # rate at the end of the segment, and of the rate before the switch; None if none does
    to_end: int | None
    to_before: int | None

    @property
    def drop(self) -> float | None:
        """Rate before the switch minus the lowest rate after it."""
        return self.before - self.deepest if self.before is not None and self.deepest is not None else None

    @property
    def relative_drop(self) -> float | None:
        """Drop as a share of the rate before the switch."""
        return _divide(self.drop, self.before)


def segment(record: Record, number: int) -> list[PromptCounts]:
    """The completed prompts of one segment, in stream order."""
    first, end = record.segments[number : number + 2]
    return sorted((one for one in record.passed if first <= one.offset < end), key=lambda one: one.offset)


def switch(record: Record, number: int = 1, window: int = WINDOW) -> Switch:
    """Effect of the switch to segment `number`. False alarms are counted from the start of the segment before."""
    before = acceptance(segment(record, number - 1)[-window:])
    after = segment(record, number)
    windows = _windows(after, window)
    end = acceptance(_part(after, last=True))
    begin, at, stop = record.segments[number - 1 : number + 2]
    falls = [alarm.offset for alarm in record.alarms]
    found = [offset - at for offset in falls if at <= offset < stop]
    return Switch(
        before=before,
        deepest=min((rate for _, rate in windows), default=None),
        end=end,
        delay=min(found, default=None),
        alarms=len(found),
        false_alarms=sum(begin <= offset < at for offset in falls),
        recalls=sum(at <= offset < stop for offset in record.recalls),
        to_end=_first_recovered(windows, end),
        to_before=_first_recovered(windows, before),
    )


def _windows(passed: Sequence[PromptCounts], size: int) -> list[tuple[int, float]]:
    """End (in prompts) and rate of every full window in which something was judged."""
    ends = range(min(size, len(passed)), len(passed) + 1)
    found = ((end, acceptance(passed[max(0, end - size) : end])) for end in ends)
    return [(end, rate) for end, rate in found if rate is not None]


def _first_recovered(windows: Sequence[tuple[int, float]], level: float | None) -> int | None:
    if level is None:
        return None
    return next((end for end, rate in windows if rate >= RECOVERED * level), None)


def _part(passed: Sequence[PromptCounts], *, last: bool) -> Sequence[PromptCounts]:
    number = ceil(len(passed) / 5)
    return passed[-number:] if last else passed[:number]


def segment_rates(record: Record, number: int) -> tuple[float | None, float | None]:
    """Acceptance rates in the first and the last fifth of a segment."""
    passed = segment(record, number)
    return acceptance(_part(passed, last=False)), acceptance(_part(passed, last=True))


def back_again(record: Record) -> float | None:
    """Rate at the start of the third segment / rate at the end of the first; None if the stream is not A B A B."""
    if len(record.segments) < 4:
        return None
    return _divide(segment_rates(record, 2)[0], segment_rates(record, 0)[1])
