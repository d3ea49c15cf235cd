"""A run in a few sentences: what drafts and learning gave, and what a drift did.

Several runs are compared on the prompts that they have in common.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import exp, sqrt
from pathlib import Path
from typing import Any

from dashboards.web.queries.tables import plain, read_statement, rows
from store.query.findings import read_findings
from store.query.log_reader import LogReader
from store.query.rates import Z
from store.query.summary import SUMMARY
from store.query.views import quote_text

AROUND = 20  # prompts before a drift, and at the end, that are compared
FEWEST = 12  # prompts in common: of fewer, the interval would be too narrow

_ENDS = 'SELECT run, max("offset") AS last FROM prompts GROUP BY run'
_DRIFTS = read_statement("story/drifts")
_EFFICIENCY = """
    SELECT sum(emitted) / nullif(sum(blocks), 0) AS efficiency
    FROM prompts WHERE run = {run} AND "offset" BETWEEN {first} AND {last}
"""

_PAIRS = read_statement("story/pairs")


def read_story(log: LogReader, folders: Mapping[str, Path] | None = None) -> list[dict[str, Any]]:
    """Describe each run of the log with a completed prompt in `sentences`, the first of which is its headline. The
    summaries in `folders`, by the run's name, have the result of the check. `learning` has its ledger.
    """
    drifts = rows(log.select(_DRIFTS))
    ends = {row["run"]: row["last"] for row in rows(log.select(_ENDS))}
    found = []
    for run, findings in read_findings(log).items():
        sentences = [
            f"Drafting: {findings.describe_drafting()}.",
            f"Learning: {findings.describe_learning()}.",
            *_describe_drifts(log, [row for row in drifts if row["run"] == run], run, ends[run]),
        ]
        if folders and run in folders and (check := read_check(folders[run])) and check["mismatches"]:
            wrong = f"{check['mismatches']:,} of {check['judged']:,} judged decisions"
            sentences.append(f"{wrong} do not follow from their row in the log.")
        found.append(
            {
                "run": run,
                "sentences": sentences,
                "learning": {name: plain(value) for name, value in findings.ledger.items()},
            }
        )
    return found


def _describe_drifts(log: LogReader, detected: list[dict[str, Any]], run: str, end: int) -> Iterator[str]:
    """The drifts that were acted upon, and what the last one did to the tokens per target forward."""
    drifts = [row for row in detected if row["action"] in ("reset", "recall")]
    if not drifts:
        count = "one was detected" if len(detected) == 1 else f"{len(detected)} were detected, the last"
        seen = f", though {count} at prompt {detected[-1]['offset']}" if detected else ""
        yield f"No drift was acted upon{seen}."
        return
    last, restored, changed = drifts[-1], sum(row["version"] is not None for row in drifts), drifts[-1]["changed_at"]
    times = "once" if len(drifts) == 1 else f"{len(drifts)} times, the last was"
    yield f"Drift was acted upon {times}: {last['description']}."
    if restored:
        yield f"An earlier version was restored {_count_times(restored)}."
    parts = (changed - AROUND, changed - 1), (changed, last["offset"]), (end - AROUND + 1, end)
    queries = [_EFFICIENCY.format(run=quote_text(run), first=first, last=until) for first, until in parts]
    before, until, now = (log.select(query).to_pylist()[0]["efficiency"] for query in queries)
    if before is not None and until is not None:
        yield (
            f"Tokens per target forward were {before:.2f} in the {min(AROUND, changed)} prompts before the "
            f"{'last ' if len(drifts) > 1 else ''}change, at prompt {changed}, {until:.2f} from there until the drift "
            f"was detected, and {now:.2f} in the last {min(AROUND, end + 1)}."
        )


def read_check(folder: Path) -> dict[str, int] | None:
    """Read the result of `omnidraft check` from the summary of a run: the numbers of `decisions`, of `judged` ones that
    were derived again, and of `mismatches`. None if there is no summary with one.
    """
    try:
        found = json.loads((folder / SUMMARY).read_bytes())["check"]
        return {name: int(found[name]) for name in ("decisions", "judged", "mismatches")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _count_times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def compare_runs(log: LogReader, runs: Sequence[str]) -> list[str]:
    """Compare the first run with each of the others. None for a single run."""
    return [sentence for other in runs[1:] for sentence in _compare_pair(log, runs[0], other)]


def _compare_pair(log: LogReader, one: str, other: str) -> Iterator[str]:
    (found,) = rows(log.select(_PAIRS.format(one=quote_text(one), other=quote_text(other))))
    prompts = found["prompts"]
    if prompts < FEWEST:
        count = {0: "no prompt", 1: "one prompt"}.get(prompts, f"{prompts} prompts")
        yield f"{one} and {other} have {count} in common: too few to compare their speeds."
        return
    yield f"On the {prompts:,} prompts in common, {_describe_speed(one, other, found)}."
    yield (
        f"Tokens per target forward there: {found['efficiency']:.2f} and {found['other_efficiency']:.2f}; "
        f"{found['same']:,} of the {prompts:,} completions are the same text."
    )


def _describe_speed(one: str, other: str, found: dict[str, Any]) -> str:
    """The mean ratio of the prompts' speeds with its interval. The load of the machine at other times is not in it."""
    half = Z * found["deviation"] / sqrt(found["prompts"])
    low, value, high = (exp(found["faster"] + sign * half) for sign in (-1, 0, 1))
    ratio = f"{value:.2f} times as fast as {other} ({low:.2f} to {high:.2f}, by prompts)"
    if low <= 1 <= high:
        return f"neither run was clearly faster: {one} was {ratio}"
    return f"{one} was {'faster' if low > 1 else 'slower'}: {ratio}"
