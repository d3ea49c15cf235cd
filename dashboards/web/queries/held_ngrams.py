"""What the n-gram cache holds: the entries of each target's last version, by their spelling."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dashboards.web.queries.memory import SHOWN, spell_tokens
from dashboards.web.queries.tables import rows
from store.errors import CorruptError
from store.query.log_reader import LogReader
from store.registry.ngram_file import SavedNgram, list_ngrams

_Cache = tuple[dict[str, Any], list[SavedNgram]]

NGRAM_FILE = "ngrams.parquet"  # in the folder of a version

_VERSIONS = "SELECT run, target, version, folder FROM versions ORDER BY run, target, version DESC"
# The cache holds what the target emitted, so the log has the text of each entry, unless the cache was filled before.
_TEXTS = """
    SELECT run, target, emitted_id AS token, any_value(emitted_bytes) AS content
    FROM decisions WHERE emitted_id IN (SELECT unnest({tokens}::INTEGER[])) AND emitted_bytes IS NOT NULL GROUP BY ALL
"""
_HITS = """
    SELECT run, target, proposed_id AS token, count(*) FILTER (outcome IN ('accepted', 'rejected')) AS judged,
        count(*) FILTER (outcome = 'accepted') AS accepted
    FROM decisions WHERE translation = 'ngram' GROUP BY ALL
"""


def list_held(log: LogReader, folders: Mapping[str, Path], search: str = "") -> dict[str, Any]:
    """List the entries that the caches hold, the most used first.

    Args:
        log: log of one or several runs.
        folders: their folders, by name.
        search: text that the token must contain, in upper or lower case.

    Returns:
        `entries` with the `token` as text, the number of `uses` and of hits `judged` and `accepted`; `total`, the
        number of entries that were found; `held`, one row per run and target with the `version` that was read and its
        number of `entries`. A version whose folder was pruned is passed over.
    """
    caches = [*_read_caches(log, folders)]
    ids = sorted({token for _, found in caches for _, token, _ in found})
    texts = {_key_of(row): row["content"] for row in log.select(_TEXTS.format(tokens=ids)).to_pylist()}
    hits = {_key_of(row): row for row in rows(log.select(_HITS))}
    entries = []
    for version, found in caches:
        for pieces, token, uses in found:
            key = version["run"], version["target"], token
            hit = hits.get(key, {"judged": 0, "accepted": 0})
            spelt = spell_tokens([token], [texts.get(key)])
            if search.lower() in spelt.lower():
                place = {"run": version["run"], "target": version["target"], "token": spelt, "pieces": list(pieces)}
                entries.append({**place, "uses": uses, "judged": hit["judged"], "accepted": hit["accepted"]})
    entries.sort(key=lambda row: (-row["uses"], row["token"]))
    held = [{**version, "entries": len(found)} for version, found in caches]
    return {"entries": entries[:SHOWN], "total": len(entries), "held": held}


def _read_caches(log: LogReader, folders: Mapping[str, Path]) -> Iterator[_Cache]:
    """Yield the last version of each run and target whose cache can be read, and its entries."""
    done = set()
    for row in rows(log.select(_VERSIONS)):
        line, path = (row["run"], row["target"]), folders[row["run"]] / row["folder"] / NGRAM_FILE
        if line in done or not path.is_file():
            continue
        try:
            found = list_ngrams(path)
        except CorruptError:
            continue
        done.add(line)
        yield {"run": row["run"], "target": row["target"], "version": row["version"]}, found


def _key_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["run"], row["target"], row["token"]
