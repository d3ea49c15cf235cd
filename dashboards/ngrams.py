"""The n-gram cache along the stream: size, changes, hits, and the entries that pay."""

from typing import Any

from dashboards.plain import columns, rows
from dashboards.windows import stretch_of, window_of
from store.queries import LogReader

MOST = 100  # points of a cache's size

# The cache's version counts insertions and removals, so that with the entries at two versions both follow.
_STEPS = """
    WITH steps AS (
        SELECT run, target, version, "offset", cache_entries AS entries,
            cache_version - lag(cache_version) OVER before AS changed,
            cache_entries - lag(cache_entries) OVER before AS grown,
            (changed + grown) // 2 AS inserted,
            (changed - grown) // 2 AS evicted
        FROM versions
        WINDOW before AS (PARTITION BY run, target ORDER BY version)
    )
"""
# Versions that follow one another closely are one point.
_SIZES = (
    _STEPS
    + """
    SELECT run, target, max(version) AS version, max("offset") AS "offset", arg_max(entries, version) AS entries,
        sum(inserted) AS inserted, sum(evicted) AS evicted
    FROM steps GROUP BY run, target, "offset" // {stretch} ORDER BY run, target, version
"""
)
_CHANGES = (
    _STEPS
    + """,
    targets AS (
        SELECT run, target, sum(inserted) AS inserted, sum(evicted) AS evicted, arg_max(entries, version) AS entries
        FROM steps GROUP BY run, target
    )
    SELECT run, count(*) AS targets, sum(entries) AS entries, sum(inserted) AS inserted, sum(evicted) AS evicted
    FROM targets GROUP BY run
"""
)
# Counted by outcome first: a filter for each figure would look at every decision as often.
_HITS = """
    WITH counted AS (
        SELECT run, "offset" // {window} AS number, translation = 'ngram' AS hit, outcome, count(*) AS decisions,
            min("offset") AS first, max("offset") AS last
        FROM decisions WHERE outcome = 'accepted' OR translation = 'ngram'
        GROUP BY ALL
    )
    SELECT run, min(first) AS first, max(last) AS last,
        coalesce(sum(decisions) FILTER (hit), 0) AS proposed,
        coalesce(sum(decisions) FILTER (hit AND outcome IN ('accepted', 'rejected')), 0) AS judged,
        coalesce(sum(decisions) FILTER (hit AND outcome = 'accepted'), 0) AS accepted,
        accepted / nullif(sum(decisions) FILTER (outcome = 'accepted'), 0) AS share
    FROM counted GROUP BY run, number ORDER BY run, first
"""
_PAYING = "ngrams-that-pay"
_LENGTHS = "by-ngram-length"


def read_ngrams(log: LogReader, window: int = 0) -> dict[str, Any]:
    """Sizes at each published version, hits per `window` prompts (0 for a good number), and the entries that pay."""
    window = window_of(log, window)
    return {
        "window": window,
        "sizes": rows(log.select(_SIZES.format(stretch=stretch_of(log, MOST)))),
        "changes": rows(log.select(_CHANGES)),
        "hits": columns(log.select(_HITS.format(window=window))),
        "paying": rows(log.recipe(_PAYING)),
        "lengths": rows(log.recipe(_LENGTHS)),
    }
