"""The summary of a run, per dataset, per target and in total, computed by SQL over its committed log.

`omnidraft replay` writes it to `RUN/summary.json` at its end; it can be computed again from the log at any time.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from store.files import json_bytes, write_chunks, write_whole
from store.log.partitions import log_folders
from store.log.run_log import REJECTED
from store.query.findings import NO_LEDGER, read_findings
from store.query.log_reader import LogReader, statement
from store.query.rates import Acceptance

LOG = logging.getLogger("omnidraft.log")

SUMMARY = "summary.json"
ANSWERS = "answers.jsonl"
_AT_ONCE = 4096  # answers that are read together

Rows = Mapping[tuple[str, str, str], Mapping[str, Any]]  # by kind, name and section
Events = Sequence[Mapping[str, Any]]

_COUNTS = ("prompts", "emitted_tokens", "target_forwards")
_RATES = (
    "mean_accepted_length",
    "block_efficiency",
    "lookup_share",
    "lookup_acceptance_rate",
)
_STAGES = ("decode", "translate", "verify", "learn")

_DRIFTS = 'SELECT dataset, target, "offset", action, rate_before, rate_after, description FROM drifts ORDER BY seq'
_TEXTS = "SELECT 1 FROM prompts WHERE prompt_text <> '' OR completion_text <> '' LIMIT 1"
_ANSWERS = """
    SELECT "offset", dataset, prompt_id, prompt_text AS prompt, completion_text AS text, finish FROM prompts
    WHERE "offset" > {last} ORDER BY "offset" LIMIT {most}
"""
# A published version belongs to the dataset of the last prompt before it.
_VERSIONS = """
    SELECT prompts.dataset, versions.target, version, versions."offset", reason
    FROM versions
    ASOF LEFT JOIN prompts ON versions."offset" >= prompts."offset"
    ORDER BY versions.seq
"""


def summarize(run_folder: Path) -> dict[str, Any]:
    """Compute the metrics of a run from its log.

    `datasets` has an entry per dataset and `targets` one per target, in stream order; `totals` covers the whole stream:

    - `prompts`, `emitted_tokens`, `target_forwards` (blocks) of the completed prompts;
    - `wall_seconds`, `tokens_per_second`: wall-clock time; while n prompts are in flight, each is charged 1/n of it;
    - `seconds` per stage: `decode`, `translate`, `verify`, `learn`;
    - `acceptance_rate` (accepted / judged) and `mean_accepted_length` (accepted / blocks) of drafts by the model, with
      `judged_tokens`, the number of tokens that the rate is over, and `acceptance_interval`, its interval of 95%;
      `block_efficiency` (emitted / blocks) of all blocks; `lookup_share`, the share of blocks with a copied draft (from
      the own text or the memory), and `lookup_acceptance_rate`; null if nothing was judged or no block was run;
    - `drifts` and `versions`, with their stream offsets.

    Datasets and targets also have `first_fifth` and `last_fifth`: the rates and the speed over that share of their
    prompts, rounded up. The totals have the `ledger` of learning: updates took `update_seconds`, and scores of earlier
    versions after drifts `recall_seconds`; the updates gained `tokens_gained` accepted tokens over the baseline; each
    of these saves its sequence's share of a target forward (`seconds_per_target_forward`), `seconds_saved` in total;
    `net_seconds` is `seconds_saved` less the seconds of updates and scores; `predicted` and `predicted_loaded` are the
    shares of the tokens of held-out prompts that the drafter predicts now, and predicted as it was loaded. After
    a completed prompt the totals also have the numbers of the run's `Findings`, and `findings` has its sentences.

    `rejected_rows` counts the source rows that could not become prompts. Raises what `LogReader` raises.
    """
    with LogReader([run_folder]) as log:
        found = log.select(statement("_summary")).to_pylist()
        finding = next(iter(read_findings(log).values()), None)
        drifts = log.select(_DRIFTS).to_pylist()
        versions = log.select(_VERSIONS).to_pylist()
    rows = {(row["kind"], row["name"], row["section"]): row for row in found}
    totals = _group_metrics(rows.get(("totals", None, "all"), {}))
    ledger = {
        name: _round_value(value, 6 if name == "seconds_per_target_forward" else 3)
        for name, value in (finding.ledger if finding else NO_LEDGER).items()
    }
    numbers = {name: _round_value(value, 4) for name, value in finding.list_numbers().items()} if finding else {}
    return {
        "run": run_folder.resolve().name,
        "datasets": _groups("dataset", rows, drifts, versions),
        "targets": _groups("target", rows, drifts, versions),
        "totals": totals
        | numbers
        | {"drifts": list(map(_round_event, drifts)), "versions": versions, "ledger": ledger},
        "findings": {"drafting": finding.describe_drafting(), "learning": finding.describe_learning()}
        if finding
        else {},
        "rejected_rows": _count_rejected(run_folder),
    }


def write_summary(run_folder: Path) -> dict[str, Any]:
    """Compute the summary, write it to `RUN/summary.json` atomically, and return it. If the log has texts, also write
    `RUN/answers.jsonl`: a line per completed prompt.

    It also has the `check` of the log (`omnidraft check`): the numbers of `decisions`, of `judged` ones that were
    derived again, and of `mismatches`, contradictions in the log. A warning reports contradictions.
    """
    with LogReader([run_folder]) as log:
        found = log.check()
        if log.select(_TEXTS).num_rows:
            write_chunks(run_folder / ANSWERS, _list_answers(log))
    mismatches = len(found.mismatches) + len(found.miscounts)
    if mismatches:
        LOG.warning("the log contradicts itself in %d places; `omnidraft check` lists them", mismatches)
    summary = summarize(run_folder) | {
        "check": {"decisions": found.decisions, "judged": found.judged, "mismatches": mismatches}
    }
    write_whole(run_folder / SUMMARY, json_bytes(summary))
    return summary


def _list_answers(log: LogReader) -> Iterator[bytes]:
    """Yield the lines of `answers.jsonl` in stream order."""
    last = -1
    while found := log.select(_ANSWERS.format(last=last, most=_AT_ONCE)).to_pylist():
        last = found[-1].pop("offset")
        for row in found:
            row.pop("offset", None)
            yield (json.dumps(row, ensure_ascii=False) + "\n").encode()


def _groups(kind: str, rows: Rows, drifts: Events, versions: Events) -> dict[str, Any]:
    return {
        name: _group_metrics(row)
        | {section: _section(rows[kind, name, section]) for section in ("first_fifth", "last_fifth")}
        | {"drifts": _events_of(kind, name, drifts), "versions": _events_of(kind, name, versions)}
        for (kind_of_row, name, section), row in rows.items()
        if (kind_of_row, section) == (kind, "all")
    }


def _group_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a dataset or of the stream; zeros and nulls for a stream without a completed prompt."""
    counts = {name: row.get(name, 0) for name in _COUNTS}
    seconds = {stage: _round_value(row.get(stage, 0.0), 3) for stage in _STAGES}
    return (
        counts | {"wall_seconds": _round_value(row.get("seconds", 0.0), 3), "seconds": seconds} | _speed_and_rates(row)
    )


def _section(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompts": row["prompts"]} | _speed_and_rates(row)


def _speed_and_rates(row: Mapping[str, Any]) -> dict[str, Any]:
    found = Acceptance(row.get("accepted", 0), row.get("judged", 0))
    return {
        "tokens_per_second": _round_value(row.get("tokens_per_second"), 2),
        "acceptance_rate": _round_value(found.rate, 4),
        "acceptance_interval": [round(end, 4) for end in found.interval] if found.interval else None,
        "judged_tokens": found.judged,
        **{name: _round_value(row.get(name), 4) for name in _RATES},
    }


def _events_of(kind: str, name: str, events: Events) -> list[dict[str, Any]]:
    mine = [event for event in events if event[kind] == name]
    return [{key: value for key, value in _round_event(event).items() if key != kind} for event in mine]


def _round_event(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _round_value(value, 4) if isinstance(value, float) else value for name, value in event.items()}


def _round_value(value: float | None, digits: int) -> float | None:
    """Round a value for display; None if it is not finite, which JSON cannot represent."""
    return round(value, digits) if value is not None and math.isfinite(value) else None


def _count_rejected(run_folder: Path) -> int:
    count = 0
    for folder in log_folders(run_folder):
        if (path := folder / REJECTED).exists():
            with path.open("rb") as lines:
                count += sum(1 for line in lines if line.strip())
    return count
