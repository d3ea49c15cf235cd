"""Acceptance, block efficiency and speed along the stream of one or several runs, and what happened there."""

from typing import Any

from dashboards.plain import columns, rows
from dashboards.windows import stretch_of, window_of
from store.errors import UsageError
from store.queries import LogReader

MOST_MARKS = 400  # of a kind
SPLITS = {"none": "''", "dataset": "dataset", "target": "target"}

# A window's seconds run from the end of all windows before to its own end: prompts overlap, windows share no time.
_CURVES = """
    WITH windows AS (
        SELECT run, {part} AS part, "offset" // {window} AS number,
            min("offset") AS first, max("offset") AS last, count(*) AS prompts,
            sum(judged) AS judged, sum(accepted) AS accepted, sum(emitted) AS emitted, sum(blocks) AS blocks,
            min(started) AS started, max(finished) AS finished
        FROM prompts GROUP BY ALL
    ),
    timed AS (
        SELECT *, coalesce(max(finished) OVER before, started) AS entered
        FROM windows
        WINDOW before AS (PARTITION BY run, part ORDER BY number ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
    )
    SELECT run, part, first, last, prompts, judged,
        accepted / nullif(judged, 0) AS acceptance,
        emitted / nullif(blocks, 0) AS efficiency,
        CASE WHEN finished > entered THEN emitted / (finished - entered) END AS speed
    FROM timed ORDER BY run, part, number
"""
_TOTALS = """
    SELECT run, count(*) AS prompts, sum(emitted) AS tokens, count(DISTINCT target) AS targets,
        sum(accepted) / nullif(sum(judged), 0) AS acceptance,
        sum(emitted) / nullif(sum(blocks), 0) AS efficiency,
        sum(emitted) / nullif(max(finished) - min(started), 0) AS speed,
        sum(lookup_blocks) / nullif(sum(blocks), 0) AS lookup_share
    FROM prompts GROUP BY run
"""
_LEARNING = """
    SELECT run, count(*) FILTER (part = 'drafter') AS updates, sum(seconds::DOUBLE) AS seconds,
        sum(waited::DOUBLE) AS waited, sum(tokens_gained) AS tokens_gained
    FROM updates GROUP BY run
"""
_DATASETS = 'SELECT run, dataset, min("offset") AS first, max("offset") AS last FROM prompts GROUP BY ALL ORDER BY 1, 3'
_ANSWERED = """
    SELECT run, count(*) AS noticed, count(*) FILTER (action IN ('reset', 'recall')) AS answered
    FROM drifts GROUP BY run
"""
# Where there are more than can be told apart, one of each stretch of the stream, as many in all.
_THINNED = """
    QUALIFY count(*) OVER () <= {most} OR row_number() OVER (PARTITION BY run, "offset" // {stretch} ORDER BY seq) = 1
    ORDER BY seq DESC
"""
_DRIFTS = """
    SELECT run, "offset", target, dataset, detector, direction, changed_at, rate_before, rate_after, action,
        count(*) OVER () AS total
    FROM drifts
"""
_RECALLS = """
    SELECT run, "offset", target, version, candidates, prompts, acceptance_present, acceptance_best,
        count(*) OVER () AS total
    FROM recalls
"""
_VERSIONS = """
    SELECT run, "offset", target, version, parent, reason, acceptance, cache_entries, count(*) OVER () AS total
    FROM versions
"""
_UPDATES = """
    SELECT run, min("offset") AS "offset", max("offset") AS last, count(*) AS steps, count(*) FILTER (served) AS served,
        sum(seconds::DOUBLE) AS seconds, sum(tokens_gained) AS tokens_gained, max(drafter_version) AS drafter_version
    FROM updates WHERE part = 'drafter'
    GROUP BY run, "offset" // {window}, served ORDER BY run, 2
"""


def read_stream(log: LogReader, window: int = 0, split: str = "none") -> dict[str, Any]:
    """Curves and marks. `window`: prompts of one point, 0 for a good number; `split`: a curve per dataset or target.

    Rates weigh each prompt by what was judged. Raises `UsageError` for an unknown split or a negative window.
    """
    if split not in SPLITS:
        raise UsageError(f"curves can be split by {', '.join(SPLITS)}; got {split!r}")
    window = window_of(log, window)
    whole = columns(log.select(_CURVES.format(part=SPLITS["none"], window=window)))
    parts = whole if split == "none" else columns(log.select(_CURVES.format(part=SPLITS[split], window=window)))
    return {
        "window": window,
        "whole": whole,
        "parts": parts,
        "datasets": rows(log.select(_DATASETS)),
        "totals": rows(log.select(_TOTALS)),
        "learning": rows(log.select(_LEARNING)),
        "answered": rows(log.select(_ANSWERED)),
        "marks": _marks(log, window),
    }


def _marks(log: LogReader, window: int) -> dict[str, list[dict[str, Any]]]:
    """What happened, by kind. Updates of one window are one mark, those that were served apart."""
    kinds = {"drifts": _DRIFTS, "recalls": _RECALLS, "versions": _VERSIONS}
    thinned = _THINNED.format(most=MOST_MARKS, stretch=stretch_of(log, MOST_MARKS))
    marks = {kind: rows(log.select(query + thinned)) for kind, query in kinds.items()}
    return marks | {"updates": rows(log.select(_UPDATES.format(window=window)))}
