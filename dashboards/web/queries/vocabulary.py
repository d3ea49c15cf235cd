"""How the target's tokens are spelt by the drafter's pieces, from the report that a run writes at its start."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dashboards.web.queries.tables import rows
from store.query.log_reader import LogReader

VOCABULARY = "vocabulary.json"  # in the folder of a run, as `omnidraft vocab --json` without a text
MOST_BYTES = 32 << 20
MOST_SPECIALS = 100
_SIZES = ("target_size", "drafter_size", "direct", "unspelt", "silent")
_MEANT = ("role", "name")  # special tokens that mean something to the drafter

_JUDGED = """
    SELECT run, target, pieces_count AS pieces, sum(decisions)::BIGINT AS judged,
        coalesce(sum(decisions) FILTER (outcome = 'accepted'), 0)::BIGINT AS accepted
    FROM counts_by_place
    WHERE outcome IN ('accepted', 'rejected') AND drafter = 'model' AND pieces_count > 0 GROUP BY ALL
"""
_NOTHING = "This run's folder has no report on its vocabularies. The command omnidraft vocab TARGET DRAFTER prints it."


def read_vocabularies(log: LogReader, folders: Mapping[str, Path], runs: Sequence[str]) -> dict[str, Any]:
    """Read the reports of the named runs.

    Args:
        log: their log.
        folders: folders of runs, by name.
        runs: their names.

    Returns:
        `pairs`, one row per run and target: names and sizes, the `classes` of the target's tokens by their number of
        pieces, with the tokens that the run judged and accepted of each, and the map of special tokens; `story` with
        the sentences of each run.
    """
    judged = rows(log.select(_JUDGED))
    pairs, story = [], []
    for run in runs:
        found = [_describe_pair(run, report, judged) for report in _read_reports(folders[run])]
        pairs += found
        story.append({"run": run, "sentences": [_summarize(pair) for pair in found] or [_NOTHING]})
    return {"pairs": pairs, "story": story}


def _read_reports(folder: Path) -> list[dict[str, Any]]:
    """The reports in a run's folder; those that are not what a run writes are passed over."""
    path = folder / VOCABULARY
    try:
        found = json.loads(path.read_bytes()) if path.stat().st_size <= MOST_BYTES else []
    except (OSError, ValueError, RecursionError):
        return []
    return [report for report in found if _is_report(report)] if isinstance(found, list) else []


def _is_report(report: Any) -> bool:
    return (
        isinstance(report, dict)
        and all(isinstance(report.get(name), int) for name in _SIZES)
        and all(isinstance(report.get(name), str) for name in ("target", "drafter"))
        and isinstance(report.get("ngrams"), dict)
        and all(isinstance(count, int) for count in report["ngrams"].values())
        and isinstance(report.get("specials"), list)
        and all(isinstance(one, dict) for one in report["specials"])
    )


def _describe_pair(run: str, report: Mapping[str, Any], judged: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    mine = [row for row in judged if (row["run"], row["target"]) == (run, report["target"])]
    bands: dict[str, tuple[int, tuple[int, float]]] = {"one piece (direct)": (report["direct"], (1, 1))}
    bands |= {f"{band} pieces": (count, _ends_of(band)) for band, count in report["ngrams"].items()}
    classes = [_count_class(name, count, report, mine, ends) for name, (count, ends) in bands.items()]
    classes.append(_count_class("not spelt", report["unspelt"], report, [], (0, 0)))
    classes.append(_count_class("never proposed", report["silent"], report, [], (0, 0)))
    specials = sorted(report["specials"], key=lambda one: one.get("how") not in _MEANT)  # keeps the order of ids
    named = {name: report[name] for name in ("target", "drafter", "target_size", "drafter_size", "direct", "unspelt")}
    counts = {"ngrams": sum(report["ngrams"].values()), "specials_total": len(specials)}
    return {"run": run, **named, **counts, "classes": classes, "specials": specials[:MOST_SPECIALS]}


def _ends_of(band: str) -> tuple[int, float]:
    """The least and the largest number of pieces of a band such as `2`, `5-8` or `9+`."""
    first, _, last = band.removesuffix("+").partition("-")
    if not first.isdecimal() or (last and not last.isdecimal()):
        return (0, 0)
    return int(first), float("inf") if band.endswith("+") else int(last or first)


def _count_class(
    name: str, count: int, report: Mapping[str, Any], judged: Sequence[Mapping[str, Any]], ends: tuple[int, float]
) -> dict[str, Any]:
    mine = [row for row in judged if ends[0] <= row["pieces"] <= ends[1]]
    share = count / report["target_size"] if report["target_size"] else None
    used = {key: sum(row[key] for row in mine) for key in ("judged", "accepted")}
    return {"name": name, "count": count, "share": share, **used}


def _summarize(pair: Mapping[str, Any]) -> str:
    whole = max(pair["target_size"], 1)
    return (
        f"Of the {pair['target_size']:,} tokens of {pair['target']}, {pair['direct'] / whole:.1%} are one piece of "
        f"{pair['drafter']} and {pair['ngrams'] / whole:.1%} are n-grams of several pieces; {pair['unspelt']:,} cannot "
        "be spelt."
    )
