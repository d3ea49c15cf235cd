"""The curves of the paper's figures, from the counts of a study's runs, and their tables.

Rates along the stream are over a window of prompts in the order of the stream, at the window's last prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from benchmarks.studies.metrics import NONE, acceptance
from benchmarks.studies.paper.figures import CurveKind, PaperFigure
from benchmarks.studies.paper.report import BlockResults
from benchmarks.studies.records import PromptCounts, Record
from benchmarks.studies.report import Results
from benchmarks.tables import Table

Points = Sequence[tuple[float, float]]
WINDOWS = 8  # windows that fit side by side into the stream
POINTS = 8  # of a curve in a table
_LABELS = {
    CurveKind.ACCEPTANCE: ("prompt", "acceptance rate"),
    CurveKind.HITS: ("prompt", "accepted n-grams per response"),
    CurveKind.GROWTH: ("emitted tokens", "entries of the n-gram cache"),
    CurveKind.FREQUENCY: ("rank of the n-gram", "emissions"),
}


@dataclass(frozen=True)
class Series:
    """A curve."""

    name: str
    points: Points  # in rising order


def make_curve_tables(chosen: PaperFigure, blocks: Sequence[BlockResults]) -> list[Table]:
    """Return the tables of a paper's figure: all its curves together, or apart by block."""
    groups = [[one] for one in blocks] if chosen.is_split else [list(blocks)]
    return [_make_table(chosen, group) for group in groups]


def _make_table(chosen: PaperFigure, blocks: Sequence[BlockResults]) -> Table:
    """Return the curves at some of their points, the first and the last among them."""
    found = [
        make_series(
            " ".join(_name_curve(one, results, arm, blocks)),
            records,
            chosen.curve,
            shift=len(records[0].passed) if records and one.block.name in chosen.late else 0,
        )
        for one in blocks
        for results in one.by_target
        for arm, records in results.by_arm.items()
    ]
    longest = [at for at, _ in max((series.points for series in found), key=len, default=())]
    places = sorted({round(step * (len(longest) - 1) / (POINTS - 1)) for step in range(POINTS)}) if longest else []
    across, value = _LABELS[chosen.curve]
    rows = [(series.name, *(_format_point(series.points, longest[place]) for place in places)) for series in found]
    heads = (value, *(f"{across} {longest[place]:,.0f}" for place in places))
    return Table(heads, rows, blocks[0].block.title if chosen.is_split else value)


def _format_point(points: Points, wanted: float) -> str:
    """The value at the last point up to `wanted`, if the curve is that long."""
    found = [value for at, value in points if at <= wanted]
    return f"{found[-1]:,.3f}".rstrip("0").rstrip(".") if found and wanted <= points[-1][0] else NONE


def _name_curve(one: BlockResults, results: Results, arm: str, blocks: Sequence[BlockResults]) -> list[str]:
    """Return what distinguishes a curve from the others: its block, its target, its arm."""
    parts = [f"{one.block.title}:"] if len(blocks) > 1 else []
    parts += [results.target] if len(one.by_target) > 1 else []
    return [*parts, arm]


def make_series(name: str, records: Sequence[Record], curve: CurveKind, shift: int = 0) -> Series:
    """Make the curve of an arm: the mean over its runs, one per seed.

    Args:
        shift: added to the prompts, for a stream that is shown as the end of a longer one.
    """
    found = [_CURVES[curve](record) for record in records]
    at_places = list(zip(*found, strict=False))  # as far as the shortest run
    return Series(name, [(fmean(at for at, _ in one) + shift, fmean(value for _, value in one)) for one in at_places])


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
