"""The curves of the paper's figures, from the counts of a study's runs.

Rates along the stream are over a window of prompts in the order of the stream, at the window's last prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean

from benchmarks.studies.metrics import acceptance, estimate
from benchmarks.studies.paper.figures import CurveKind
from benchmarks.studies.paper.panels import Series
from benchmarks.studies.records import PromptCounts, Record

Points = Sequence[tuple[float, float]]
WINDOWS = 8  # windows that fit side by side into the stream


def make_series(name: str, records: Sequence[Record], curve: CurveKind, shift: int = 0) -> Series:
    """Make the curve of an arm: the mean over its runs, with standard errors.

    Args:
        name: in the legend.
        records: one run per seed.
        curve: what is shown.
        shift: added to the prompts, for a stream that is shown as the end of a longer one.
    """
    found = [_CURVES[curve](record) for record in records]
    length = min(map(len, found), default=0)
    at = [fmean(points[place][0] for points in found) + shift for place in range(length)]
    means = [estimate(points[place][1] for points in found) for place in range(length)]
    errors = [one.error if one else None for one in means]
    return Series(name, [one.value if one else None for one in means], at, errors if len(records) > 1 else None)


def _windows(record: Record, value: Callable[[Sequence[PromptCounts]], float | None]) -> Points:
    passed = sorted(record.passed, key=lambda one: one.offset)
    size = max(1, len(passed) // WINDOWS)
    found = ((end, value(passed[end - size : end])) for end in range(size, len(passed) + 1))
    return [(end, rate) for end, rate in found if rate is not None]


def _read_acceptance(record: Record) -> Points:
    return _windows(record, acceptance)


def _count_hits(record: Record) -> Points:
    """Accepted n-grams per response."""
    return _windows(record, lambda passed: fmean(one.ngrams for one in passed))


def _count_entries(record: Record) -> Points:
    """Entries of the cache over the emitted tokens, as prompts complete."""
    emitted = accumulate(one.emitted for one in record.passed)
    return [(count, one.entries) for count, one in zip(emitted, record.passed, strict=True)]


def _rank_frequencies(record: Record) -> Points:
    """Emissions of each n-gram over its rank."""
    return [(rank, count) for rank, count in enumerate(record.ngram_counts, 1)]


_CURVES: Mapping[CurveKind, Callable[[Record], Points]] = {
    CurveKind.ACCEPTANCE: _read_acceptance,
    CurveKind.HITS: _count_hits,
    CurveKind.GROWTH: _count_entries,
    CurveKind.FREQUENCY: _rank_frequencies,
}
