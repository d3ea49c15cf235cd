"""What the last version of each target holds, by its spelling: n-grams of the cache and contexts of the memory.

The memory stores contexts as hashes. They are spelt by the hashes of all tokens that were emitted according to the
log, so a context that reaches into a prompt, or lies before the newest prompts that are read, has no spelling.

Shapes: U contexts, C continuations of each, E emitted tokens.
"""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from dashboards.web.queries.memory import LONGEST, MOST_PROMPTS, SHOWN
from dashboards.web.queries.tables import read_statement, read_version_files, rows
from dashboards.web.queries.tokens import spell_tokens, visible
from store.errors import CorruptError
from store.query.log_reader import LogReader
from store.query.views import quote_text
from store.registry.ngram_file import SavedNgram, read_ngrams

NGRAM_FILE = "ngrams.parquet"  # in the folder of a version
TOKENIZER_FILE = "tokenizer.json"  # of the drafter, there too
_SPACE = "▁"  # as SentencePiece writes it

# The cache holds what the target emitted, so the log has the text of each entry, unless the cache was filled before.
_TEXTS = """
    SELECT run, target, emitted_id AS token, any_value(emitted_bytes) AS content
    FROM decisions WHERE {chosen} AND emitted_bytes IS NOT NULL GROUP BY ALL
"""
_HITS = read_statement("held/hits")
MEMORY_FILE = "memory.safetensors"  # in the folder of a version
MOST_CONTEXTS = 200_000  # of a memory, the most seen ones: spelling takes about 5 microseconds each
# As in stages/memory/ngram_table.py; a test compares the hashes.
_MULTIPLIER, _SEED = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_ARRAYS = ("hashes", "tokens", "counts", "totals", "scopes")
_Numbers = npt.NDArray[Any]
_EMITTED = read_statement("held/emitted")


def list_held_ngrams(log: LogReader, folders: Mapping[str, Path], search: str = "") -> dict[str, Any]:
    """List the entries that the caches hold, the most used first, of the runs with these folders.

    `search` is text that the token must contain, in upper or lower case. Returns `entries` with the `token` as text,
    the number of `uses` and of hits `judged` and `accepted`; `total`, the number of entries that were found; `held`,
    one row per run and target with the `version` that was read and its number of `entries`.
    """
    caches = [*read_version_files(log, folders, NGRAM_FILE, _read_cache)]
    ids = sorted({token for _, found in caches for _, token, _ in found})
    chosen = f"emitted_id IN (SELECT unnest({ids}::INTEGER[]))"
    texts = {_key_of(row): row["content"] for row in log.select(_TEXTS.format(chosen=chosen)).to_pylist()}
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


def list_held_contexts(log: LogReader, folders: Mapping[str, Path], search: str = "") -> dict[str, Any]:
    """List the contexts that the memories hold, the most seen first, of the runs with these folders.

    `search` is text that a context with one of its continuations must contain, in upper or lower case. Returns
    `entries` with the `context` as text (None without a spelling), its number of tokens `length`, how often it was
    `seen`, and `followed`, the text and count of each continuation; `total`, the number of entries that were found;
    `held`, one row per run and target with the numbers of `contexts`, of those `spelt`, and of `texts`, and the
    `version`.
    """
    entries: list[dict[str, Any]] = []
    held = []
    for version, (texts, arrays) in read_version_files(log, folders, MEMORY_FILE, _read_memory):
        named = {"run": version["run"], "target": version["target"]}
        found = _spell(log, named, arrays)
        spelt = sum(entry["context"] is not None for entry in found)
        counts = {"contexts": len(arrays["hashes"]), "spelt": spelt, "texts": texts}
        held.append({**named, **counts, "version": version["version"]})
        entries += [{**named, **entry} for entry in found if _contains(entry, search.lower())]
    entries.sort(key=lambda entry: (-entry["seen"], -(entry["length"] or 0), entry["context"] or ""))
    return {"entries": entries[:SHOWN], "total": len(entries), "held": held}


def _contains(entry: Mapping[str, Any], search: str) -> bool:
    context = entry["context"] or ""
    return not search or any(search in f"{context}{text}".lower() for text, _ in entry["followed"])


def hash_contexts(tokens_E: _Numbers, starts_E: _Numbers) -> Iterator[tuple[_Numbers, _Numbers]]:
    """Yield, for each length of a context from 1 on, the places of its last tokens and its hashes.

    `starts_E` has for each of the emitted tokens the place of the first one of its prompt.
    """
    places_E = np.arange(len(tokens_E))
    values_E = np.full(len(tokens_E), _SEED, np.uint64)
    for length in range(1, LONGEST + 1):
        first_E = places_E - length + 1
        inside_E = first_E >= starts_E
        token_E = tokens_E[np.maximum(first_E, 0)].astype(np.uint64)
        values_E = (values_E ^ (token_E + np.uint64(1))) * _MULTIPLIER
        values_E ^= values_E >> np.uint64(29)
        yield places_E[inside_E], values_E[inside_E]


def _spell(log: LogReader, named: Mapping[str, str], arrays_U: Mapping[str, _Numbers]) -> list[dict[str, Any]]:
    quoted = {name: quote_text(text) for name, text in named.items()}
    chosen = "run = {run} AND target = {target}".format(**quoted)
    texts = {row["token"]: row["content"] for row in log.select(_TEXTS.format(chosen=chosen)).to_pylist()}
    emitted = log.select(_EMITTED.format(**quoted, prompts=MOST_PROMPTS))
    tokens_E, offsets_E = (emitted.column(name).to_numpy() for name in ("token", "offset"))
    ends = _find_ends(arrays_U["hashes"], tokens_E, offsets_E)
    arrays = {name: array.tolist() for name, array in arrays_U.items()}
    order = np.argsort(-arrays_U["totals"].astype(np.int64), kind="stable")[:MOST_CONTEXTS]
    found = []
    for slot in order.tolist():
        end, length = ends.get(arrays["hashes"][slot], (0, None))
        ids = [] if length is None else tokens_E[end - length + 1 : end + 1].tolist()
        counted = zip(arrays["tokens"][slot], arrays["counts"][slot], strict=True)
        followed = [(spell_tokens([token], [texts.get(token)]), count) for token, count in counted if count]
        context = spell_tokens(ids, [texts.get(token) for token in ids]) if ids else None
        followed.sort(key=lambda pair: -pair[1])
        found.append({"context": context, "length": length, "seen": arrays["totals"][slot], "followed": followed})
    return found


def _find_ends(hashes_U: _Numbers, tokens_E: _Numbers, offsets_E: _Numbers) -> dict[int, tuple[int, int]]:
    """Return by hash the place of the last token and the length of each held context that was emitted."""
    if not len(tokens_E):
        return {}
    begins_E = np.r_[True, offsets_E[1:] != offsets_E[:-1]]
    starts_E = np.maximum.accumulate(np.where(begins_E, np.arange(len(tokens_E)), 0))
    found: dict[int, tuple[int, int]] = {}
    for length, (places, values) in enumerate(hash_contexts(tokens_E, starts_E), 1):
        held = np.isin(values, hashes_U)
        found |= zip(values[held].tolist(), ((place, length) for place in places[held].tolist()), strict=True)
    return found


def _read_memory(path: Path) -> tuple[int, Mapping[str, _Numbers]] | None:
    """Return the number of texts that were learned, and the table's arrays; None if it cannot be read."""
    try:
        with safe_open(path, framework="numpy") as file:
            texts = int(json.loads((file.metadata() or {})["memory"])["clock"])
            saved = {name: file.get_tensor(name) for name in _ARRAYS}
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None
    unsigned = {name: one.view(one.dtype.str.replace("i", "u")) for name, one in saved.items() if name != "tokens"}
    arrays = {**saved, **unsigned}  # as the table has them
    shared_U = arrays["scopes"] == 0  # contexts of tenants have no place in a list
    return texts, {name: array[shared_U] for name, array in arrays.items()}
