"""What the n-gram cache holds: the entries of each target's last version, by their spelling."""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dashboards.web.queries.memory import SHOWN, spell_tokens
from dashboards.web.queries.tables import find_version_files, rows
from dashboards.web.queries.tokens import visible
from store.errors import CorruptError
from store.query.log_reader import LogReader
from store.registry.ngram_file import SavedNgram, list_ngrams

_Cache = tuple[dict[str, Any], list[SavedNgram]]

NGRAM_FILE = "ngrams.parquet"  # in the folder of a version
TOKENIZER_FILE = "tokenizer.json"  # of the drafter, there too
_SPACE = "▁"  # as SentencePiece writes it

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
    return {"entries": add_spelling(entries[:SHOWN], log, folders), "total": len(entries), "held": held}


def add_spelling(entries: list[dict[str, Any]], log: LogReader, folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Add to rows with a `run` and the ids of `pieces` how each piece is `spelt`, by the drafter of a version.

    A piece is spelt as its id where no version's folder is left.
    """
    places: dict[str, Path] = {}
    for row, path in find_version_files(log, folders, TOKENIZER_FILE):
        places.setdefault(row["run"], path)
    spellers = {run: _make_speller(path) for run, path in places.items()}
    return [
        {**row, "spelt": [spellers.get(row["run"], _spell_as_id)(piece) for piece in row["pieces"]]} for row in entries
    ]


def _spell_as_id(piece: int) -> str:
    return f"#{piece}"


@lru_cache(maxsize=8)
def _make_speller(path: Path) -> Callable[[int], str]:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # a damaged file raises many kinds of errors
        return _spell_as_id

    def spell(piece: int) -> str:
        token: str | None = tokenizer.id_to_token(piece)
        if token is None:
            return _spell_as_id(piece)
        text = token.replace(_SPACE, " ") if _SPACE in token else tokenizer.decode([piece], skip_special_tokens=False)
        return visible(text or token).replace("\n", "")

    return spell


def _read_caches(log: LogReader, folders: Mapping[str, Path]) -> Iterator[_Cache]:
    """Yield the last version of each run and target whose cache can be read, and its entries."""
    done = set()
    for row, path in find_version_files(log, folders, NGRAM_FILE):
        line = row["run"], row["target"]
        if line in done:
            continue
        try:
            found = list_ngrams(path)
        except CorruptError:
            continue
        done.add(line)
        yield {"run": row["run"], "target": row["target"], "version": row["version"]}, found


def _key_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["run"], row["target"], row["token"]
