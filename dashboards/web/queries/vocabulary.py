"""How the target's tokens are spelt by the drafter's pieces, from the report that a run writes at its start."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from dashboards.web.queries.tables import read_statement, rows
from store.query.log_reader import LogReader

VOCABULARY = "vocabulary.json"  # in the folder of a run, as `omnidraft vocab --json` without a text
MOST_BYTES = 32 << 20
MOST_SPECIALS = 100
_MEANT = ("role", "name")  # special tokens that mean something to the drafter

_JUDGED = read_statement("vocabulary/judged")
_NOTHING = "This run's folder has no report on its vocabularies. The command omnidraft vocab TARGET DRAFTER prints it."


class _Report(BaseModel):
    """What `omnidraft vocab` reports on a target and a drafter."""

    target: str
    drafter: str
    target_size: int
    drafter_size: int
    direct: int
    unspelt: int
    silent: int
    ngrams: dict[str, int]
    specials: list[dict[str, Any]]


_REPORTS = TypeAdapter(list[_Report])


def read_vocabularies(log: LogReader, folders: Mapping[str, Path], runs: Sequence[str]) -> dict[str, Any]:
    """Read the reports of the named runs. Returns `pairs`, one row per run and target: names and sizes, the `classes`
    of the target's tokens by their number of pieces, with the tokens that the run judged and accepted of each, and the
    map of special tokens; `story` with the sentences of each run.
    """
    judged = rows(log.select(_JUDGED))
    pairs, story = [], []
    for run in runs:
        found = [_describe_pair(run, report, judged) for report in _read_reports(folders[run])]
        pairs += found
        story.append({"run": run, "sentences": [_summarize(pair) for pair in found] or [_NOTHING]})
    return {"pairs": pairs, "story": story}


def _read_reports(folder: Path) -> list[_Report]:
    """The reports in a run's folder; none if the file is not what a run writes."""
    path = folder / VOCABULARY
    try:
        return _REPORTS.validate_json(path.read_bytes()) if path.stat().st_size <= MOST_BYTES else []
    except (OSError, ValueError):
        return []


def _describe_pair(run: str, report: _Report, judged: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    mine = [row for row in judged if (row["run"], row["target"]) == (run, report.target)]
    bands: dict[str, tuple[int, tuple[int, float]]] = {"one piece (direct)": (report.direct, (1, 1))}
    bands |= {f"{band} pieces": (count, _ends_of(band)) for band, count in report.ngrams.items()}
    bands |= {"not spelt": (report.unspelt, (0, 0)), "never proposed": (report.silent, (0, 0))}
    classes = []
    for name, (count, (least, most)) in bands.items():
        used = [row for row in mine if least <= row["pieces"] <= most]
        counts = {key: sum(row[key] for row in used) for key in ("judged", "accepted")}
        classes.append({"name": name, "count": count, "share": count / max(1, report.target_size), **counts})
    specials = sorted(report.specials, key=lambda one: one.get("how") not in _MEANT)  # keeps the order of ids
    counts = {"ngrams": sum(report.ngrams.values()), "specials_total": len(specials)}
    lists = {"classes": classes, "specials": specials[:MOST_SPECIALS]}
    return {"run": run, **report.model_dump(exclude={"silent"}), **counts, **lists}


def _ends_of(band: str) -> tuple[int, float]:
    """The least and the largest number of pieces of a band such as `2`, `5-8` or `9+`."""
    first, _, last = band.removesuffix("+").partition("-")
    if not first.isdecimal() or (last and not last.isdecimal()):
        return (0, 0)
    return int(first), float("inf") if band.endswith("+") else int(last or first)


def _summarize(pair: Mapping[str, Any]) -> str:
    whole = max(pair["target_size"], 1)
    return (
        f"Of the {pair['target_size']:,} tokens of {pair['target']}, {pair['direct'] / whole:.1%} are one piece of "
        f"{pair['drafter']} and {pair['ngrams'] / whole:.1%} are n-grams of several pieces; {pair['unspelt']:,} cannot "
        "be spelt."
    )
