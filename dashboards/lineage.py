"""Published versions with their lineage and how the drafter did while each was the latest."""

from typing import Any

from dashboards.plain import rows
from store.queries import LogReader

MOST = 1000  # versions of a run; the last ones

_LATEST = """
    WITH latest AS (
        SELECT *, CASE WHEN parent IS NULL THEN -1 ELSE "offset" END AS since
        FROM versions QUALIFY row_number() OVER (PARTITION BY run ORDER BY seq DESC) <= {most}
    )
"""
# Of two that were published behind the same prompt the later one served: at a drift that is noticed with the prompt
# behind an interval's last one.
_SERVING = (
    _LATEST
    + """, serving AS (
        SELECT * FROM latest QUALIFY row_number() OVER (PARTITION BY run, target, since ORDER BY version DESC) = 1
    )
"""
)
_VERSIONS = (
    _LATEST
    + """
    SELECT run, target, version, parent, reason, "offset", drafter_version, head_version, cache_version, cache_entries,
        acceptance AS acceptance_before, folder, digest
    FROM latest ORDER BY run, version
"""
)
# A version is the latest of its target for the prompts behind it, up to and with the next version's; a floor from the
# first prompt.
_SERVED = (
    _SERVING
    + """
    SELECT prompts.run, serving.version, prompts.dataset, count(*) AS prompts,
        sum(judged)::BIGINT AS judged, sum(accepted)::BIGINT AS accepted,
        sum(emitted)::BIGINT AS emitted, sum(blocks)::BIGINT AS blocks
    FROM prompts
    ASOF JOIN serving
        ON prompts.run = serving.run AND prompts.target = serving.target AND prompts."offset" > serving.since
    GROUP BY ALL ORDER BY prompts.run, serving.version, min(prompts."offset")
"""
)
_LEARNED = (
    _SERVING
    + """
    SELECT updates.run, serving.version, count(*) AS steps, count(*) FILTER (updates.served) AS served,
        sum(seconds::DOUBLE) AS seconds, sum(tokens_gained) AS tokens_gained
    FROM updates
    ASOF JOIN serving
        ON updates.run = serving.run AND updates.target = serving.target AND updates."offset" > serving.since
    WHERE part = 'drafter'
    GROUP BY ALL
"""
)
_DRIFTS = """
    SELECT run, "offset", target, dataset, direction, action, rate_before, rate_after
    FROM drifts WHERE action IN ('reset', 'recall')
    QUALIFY row_number() OVER (PARTITION BY run ORDER BY seq DESC) <= {most} ORDER BY run, seq
"""
_RECALLS = 'SELECT run, "offset", target, version, acceptance_present, acceptance_best FROM recalls ORDER BY seq'


def read_versions(log: LogReader) -> dict[str, Any]:
    """Versions; what was accepted and learned while each was the latest; the drifts and recalls of their runs."""
    return {
        "total": log.select("SELECT count(*) AS n FROM versions").to_pylist()[0]["n"],
        "versions": rows(log.select(_VERSIONS.format(most=MOST))),
        "served": rows(log.select(_SERVED.format(most=MOST))),
        "learned": rows(log.select(_LEARNED.format(most=MOST))),
        "drifts": rows(log.select(_DRIFTS.format(most=MOST))),
        "recalls": rows(log.select(_RECALLS)),
    }
