"""What each source of drafts proposed and how often it was accepted, by the spelling of context and token."""

from collections.abc import Mapping, Sequence
from typing import Any

from dashboards.web.queries.tables import acceptance_of, read_statement, rows, tell_runs
from dashboards.web.queries.tokens import SOURCES, spell_tokens
from store.errors import UsageError
from store.query.log_reader import LogReader
from store.query.views import quote_text

LONGEST = 8  # tokens of a context, as many as the memory matches
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
        matched = "" if not row["matched"] else f" ({row['matched']:.1f} tokens of context matched)"
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
