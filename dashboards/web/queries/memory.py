"""What each source of drafts proposed and how often it was accepted, by the spelling of context and token; and contents
of the memory: contexts of target tokens and their continuations, from the last version of a target.

The memory stores contexts as hashes. They are spelt by the hashes of all tokens that were emitted according to the
log, so a context that reaches into a prompt, or lies before the newest prompts that are read, has no spelling.

Shapes: U contexts, C continuations of each, E emitted tokens.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from dashboards.web.queries.tables import acceptance_of, read_statement, read_version_files, rows, tell_runs
from dashboards.web.queries.tokens import SOURCES, visible
from store.errors import UsageError
from store.query.log_reader import LogReader
from store.query.views import quote_text

MEMORY_FILE = "memory.safetensors"  # in the folder of a version
MOST_CONTEXTS = 200_000  # of a memory, the most seen ones: spelling takes about 5 microseconds each
LONGEST = 8  # tokens of a context, as many as the memory matches
# As in stages/memory/ngram_table.py; a test compares the hashes.
_MULTIPLIER, _SEED = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_ARRAYS = ("hashes", "tokens", "counts", "totals", "scopes")
_Numbers = npt.NDArray[Any]
_EMITTED = read_statement("held_contexts/emitted")
_TEXTS = """
    SELECT emitted_id AS token, any_value(emitted_bytes) AS content FROM decisions
    WHERE run = {run} AND target = {target} AND emitted_bytes IS NOT NULL GROUP BY ALL
"""
MOST_PROMPTS = 10_000  # the newest prompts that are read: spelling the contexts of more takes seconds
SHOWN = 200  # entries of a list
_JUDGED = read_statement("memory/judged")
_ENTRIES = _JUDGED + read_statement("memory/entries")
_TEXT = "array_to_string(list_transform(parts, lambda part: text_of(part)), '') || text_of(proposed_bytes)"
_SOURCES = _JUDGED + read_statement("memory/sources")
_LENGTHS = _JUDGED + read_statement("memory/lengths")


def read_memory(log: LogReader) -> dict[str, Any]:
    """Read what each source gave, and the acceptance by the number of context tokens that a copy matched. Returns
    `sources` and `lengths` with the counts `judged` and `accepted`, the rate `acceptance` and its interval, per source
    of drafts; `prompts`, the largest number of prompts that are read; `story` with the sentences of each run. An
    alternative of a tree counts as judged and not accepted.
    """
    bounds = {"prompts": MOST_PROMPTS, "spelt": LONGEST}
    sources, lengths = (
        [row | acceptance_of(row) for row in rows(log.select(query.format(**bounds)))] for query in (_SOURCES, _LENGTHS)
    )
    story = tell_runs(log, sources, _describe)
    return {"sources": sources, "lengths": lengths, "prompts": MOST_PROMPTS, "story": story}


def _describe(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    total = sum(row["accepted"] for row in sources)
    if not total:
        return ["No token of a draft was accepted."]
    shares = list[str]()
    for row in sorted(sources, key=lambda row: -row["accepted"]):
        matched = "" if row["matched"] is None else f" ({row['matched']:.1f} tokens of context matched)"
        if row["accepted"]:
            came = "" if shares else "came "
            shares.append(f"{row['accepted'] / total:.0%} {came}from the {SOURCES[row['source']]}{matched}")
    return [f"Of {total:,} accepted tokens, {', '.join(shares)}."]


def list_accepted(log: LogReader, source: str = "", search: str = "") -> dict[str, Any]:
    """List the contexts and tokens with the most accepted tokens, from one source or from all.

    `search` is text that context and token together must contain, in upper or lower case. Raises UsageError for an
    unknown source.
    """
    if source and source not in SOURCES:
        raise UsageError(f"a source must be one of {', '.join(SOURCES)}; got {source!r}")
    conditions = ["true"]
    if source:
        conditions.append(f"source = {quote_text(source)}")
    if search:
        conditions.append(f"contains(lower({_TEXT}), lower({quote_text(search)}))")
    query = _ENTRIES.format(prompts=MOST_PROMPTS, spelt=LONGEST, condition=" AND ".join(conditions), most=SHOWN)
    found = log.select(query).to_pylist()
    return {"entries": [_spell_entry(row) for row in found], "total": found[0]["total"] if found else 0}


def _spell_entry(row: dict[str, Any]) -> dict[str, Any]:
    """The entry with its context and token as text; ids if the run keeps no text."""
    kept = {name: row[name] for name in ("run", "target", "source", "matched", "chance", "seen", "offset")}
    counts = {"judged": row["judged"], "accepted": row["accepted"]}
    context = spell_tokens(row["context"], row["parts"]) if row["matched"] else ""
    token = spell_tokens([row["proposed_id"]], [row["proposed_bytes"]])
    longer = row["matched"] > len(row["context"])
    return {**kept, **counts, **acceptance_of(counts), "context": f"… {context}" if longer else context, "token": token}


def spell_tokens(ids: list[int], parts: list[bytes | None]) -> str:
    """Return tokens as one line of text, with visible control characters; as ids if the text of one is not known."""
    known = [part for part in parts if part is not None]
    if len(known) < len(ids):
        return " ".join(f"#{token}" for token in ids)
    return visible(b"".join(known).decode(errors="replace")).replace("\n", "")


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
    texts = {row["token"]: row["content"] for row in log.select(_TEXTS.format(**quoted)).to_pylist()}
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
