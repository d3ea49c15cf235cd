"""What the n-gram cache holds: the entries of each target's last version, by their spelling."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dashboards.web.queries.memory import SHOWN, spell_tokens
from dashboards.web.queries.tables import read_statement, read_version_files, rows
from dashboards.web.queries.tokens import visible
from store.errors import CorruptError
from store.query.log_reader import LogReader
from store.registry.ngram_file import SavedNgram, read_ngrams

NGRAM_FILE = "ngrams.parquet"  # in the folder of a version
TOKENIZER_FILE = "tokenizer.json"  # of the drafter, there too
_SPACE = "▁"  # as SentencePiece writes it

# The cache holds what the target emitted, so the log has the text of each entry, unless the cache was filled before.
_TEXTS = """
    SELECT run, target, emitted_id AS token, any_value(emitted_bytes) AS content
    FROM decisions WHERE emitted_id IN (SELECT unnest({tokens}::INTEGER[])) AND emitted_bytes IS NOT NULL GROUP BY ALL
"""
_HITS = read_statement("held_ngrams/hits")


def list_held(log: LogReader, folders: Mapping[str, Path], search: str = "") -> dict[str, Any]:
    """List the entries that the caches hold, the most used first, of the runs with these folders.

    `search` is text that the token must contain, in upper or lower case. Returns `entries` with the `token` as text,
    the number of `uses` and of hits `judged` and `accepted`; `total`, the number of entries that were found; `held`,
    one row per run and target with the `version` that was read and its number of `entries`.
    """
    caches = [*read_version_files(log, folders, NGRAM_FILE, _read_cache)]
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
    held = [{name: row[name] for name in ("run", "target", "version")} | {"entries": len(one)} for row, one in caches]
    return {"entries": add_spelling(entries[:SHOWN], log, folders), "total": len(entries), "held": held}


def _key_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["run"], row["target"], row["token"]


def _read_cache(path: Path) -> list[SavedNgram] | None:
    try:
        return read_ngrams(path, None)
    except CorruptError:
        return None


def add_spelling(entries: list[dict[str, Any]], log: LogReader, folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Add to rows with a `run` and the ids of `pieces` how each piece is `spelt`, by the drafter of a version.

    A piece is spelt as its id where no version's folder is left.
    """
    tokenizers = {row["run"]: one for row, one in read_version_files(log, folders, TOKENIZER_FILE, _read_tokenizer)}
    return [
        {**row, "spelt": [_spell_piece(tokenizers.get(row["run"]), piece) for piece in row["pieces"]]}
        for row in entries
    ]


@lru_cache(maxsize=8)
def _read_tokenizer(path: Path) -> Tokenizer | None:
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # a damaged file raises many kinds of errors
        return None


def _spell_piece(tokenizer: Tokenizer | None, piece: int) -> str:
    token: str | None = tokenizer.id_to_token(piece) if tokenizer else None
    if tokenizer is None or token is None:
        return f"#{piece}"
    text = token.replace(_SPACE, " ") if _SPACE in token else tokenizer.decode([piece], skip_special_tokens=False)
    return visible(text or token).replace("\n", "")
