"""Data of the charts: curves and marks along the stream, and the n-gram cache."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dashboards.web.queries.story import compare_runs, read_story
from dashboards.web.queries.tables import (
    acceptance_of,
    columns,
    read_datasets,
    read_statement,
    read_totals,
    rows,
    tell_runs,
)
from store.errors import UsageError
from store.query.log_reader import LogReader
from store.query.rates import FEW

POINTS = 40  # points of one curve, by default
MOST_POINTS = 1000  # points of one curve, at most
SMALLEST = 5  # minimum prompts per point; a rate over fewer is mostly noise
MOST_MARKS = 400  # marks of one kind
MOST_SIZES = 100  # points of the curve of cache sizes
SPLITS = {"none": "''", "dataset": "dataset", "target": "target"}

_CURVES = read_statement("charts/curves")
_SOURCES = read_statement("charts/sources")
_ANSWERED = """
    SELECT run, count(*) AS detected, count(*) FILTER (action IN ('reset', 'recall')) AS answered
    FROM drifts GROUP BY run
"""
# If there are too many to distinguish, select one from each of `most` stretches of the stream.
_THINNED = """
    QUALIFY count(*) OVER () <= {most} OR row_number() OVER (PARTITION BY run, "offset" // {stretch} ORDER BY seq) = 1
    ORDER BY seq DESC
"""
_DRIFT_MARKS = read_statement("charts/drift_marks")
_RECALL_MARKS = read_statement("charts/recall_marks")
_VERSION_MARKS = """
    SELECT run, "offset", target, version, parent, reason, acceptance, cache_entries, count(*) OVER () AS total
    FROM versions
"""
_UPDATE_MARKS = read_statement("charts/update_marks")

_SIZES = read_statement("charts/sizes")
_HITS = read_statement("charts/hits")
_NGRAM_TOTALS = read_statement("charts/ngram_totals")


def read_stream(
    log: LogReader, window: int = 0, split: str = "none", folders: Mapping[str, Path] | None = None
) -> dict[str, Any]:
    """Read curves and marks along the stream. Rates weigh each prompt by its judged tokens. A window of 0 prompts per
    point is a suitable one; `split` is `none`, or `dataset` or `target` for one curve each. `folders` are those of the
    runs, by name, in the order of the page: the first is compared with the others, and their summaries have the result
    of the check.
    """
    if split not in SPLITS:
        raise UsageError(f"curves can be split by {', '.join(SPLITS)}; got {split!r}")
    window = window_of(log, window)
    whole = _read_curves(log, "none", window)
    parts = whole if split == "none" else _read_curves(log, split, window)
    return {
        "window": window,
        "compared": compare_runs(log, list(folders or ())),
        "story": read_story(log, folders),
        "whole": whole,
        "parts": parts,
        "sources": columns(log.select(_SOURCES.format(window=window))),
        "datasets": read_datasets(log),
        "totals": read_totals(log),
        "answered": rows(log.select(_ANSWERED)),
        "marks": _marks(log, window),
    }


def _read_curves(log: LogReader, split: str, window: int) -> dict[str, list[Any]]:
    found = columns(log.select(_CURVES.format(part=SPLITS[split], window=window)))
    rates = [
        acceptance_of({"accepted": accepted, "judged": judged})
        for accepted, judged in zip(found["accepted"], found["judged"], strict=True)
    ]
    return found | {name: [rate[name] for rate in rates] for name in ("acceptance", "low", "high")}


def _marks(log: LogReader, window: int) -> dict[str, list[dict[str, Any]]]:
    """Marks by kind of event. The updates of one window become two marks: applied ones and refused ones."""
    kinds = {"drifts": _DRIFT_MARKS, "recalls": _RECALL_MARKS, "versions": _VERSION_MARKS}
    thinned = _THINNED.format(most=MOST_MARKS, stretch=stretch_of(log, MOST_MARKS))
    marks = {kind: rows(log.select(query + thinned)) for kind, query in kinds.items()}
    return marks | {"updates": rows(log.select(_UPDATE_MARKS.format(window=window)))}


def read_ngrams(log: LogReader, window: int = 0) -> dict[str, Any]:
    """Read cache sizes at published versions, hits per window (0 chooses a suitable size), and entries that pay.

    `story` has the sentences of each run.
    """
    window = window_of(log, window)
    return {
        "story": tell_runs(log, rows(log.select(_NGRAM_TOTALS)), _describe_ngrams),
        "window": window,
        "sizes": rows(log.select(_SIZES.format(stretch=stretch_of(log, MOST_SIZES)))),
        "hits": columns(log.select(_HITS.format(window=window))),
        "paying": rows(log.recipe("ngrams-that-pay")),
        "lengths": rows(log.recipe("by-ngram-length")),
    }


def _describe_ngrams(totals: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not totals:
        yield "No token of the drafter model was judged."
        return
    (row,) = totals
    accepted, hits = row["accepted"], row["accepted_hits"]
    share = f" ({hits / accepted:.1%})" if accepted else ""
    yield (
        f"{hits:,} of {accepted:,} accepted tokens of the drafter model came from an n-gram{share}; the others are one "
        "piece of the drafter."
    )
    if not row["judged_hits"]:
        yield "No n-gram was judged."
        return
    rate, other = hits / row["judged_hits"], (accepted - hits) / max(1, row["judged"] - row["judged_hits"])
    if row["judged_hits"] < FEW:
        yield f"Only {row['judged_hits']:,} n-grams were judged: too few to compare with other tokens."
    else:
        yield f"{rate:.0%} of {row['judged_hits']:,} judged n-grams were accepted, and {other:.0%} of the other tokens."


def window_of(log: LogReader, wanted: int = 0) -> int:
    """Prompts per point: as requested, but enough for at most 1,000 points; 0 chooses a suitable number."""
    if wanted < 0:
        raise UsageError(f"prompts per point must be positive, or 0 for a suitable number; got {wanted}")
    good = max(SMALLEST, _round_number(_prompts(log) / POINTS))
    return max(wanted or good, stretch_of(log, MOST_POINTS))


def stretch_of(log: LogReader, most: int) -> int:
    """Prompts per stretch so that the longest run has at most `most` stretches."""
    return max(1, -(-_prompts(log) // most))


def _prompts(log: LogReader) -> int:
    (row,) = log.select('SELECT coalesce(max("offset") + 1, 0) AS prompts FROM prompts').to_pylist()
    return int(row["prompts"])


def _round_number(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is at least `least`."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10
