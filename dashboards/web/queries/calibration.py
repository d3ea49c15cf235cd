"""Calibration: how often a token is accepted, compared with the estimate that was made before."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dashboards.web.queries.tables import acceptance_of, rows, tell_runs
from dashboards.web.queries.tokens import SOURCES
from store.query.log_reader import LogReader
from store.query.rates import FEW

HEAD = "head"  # source of the rows of the acceptance head


def read_calibration(log: LogReader) -> dict[str, Any]:
    """Read the recipes `calibration-of-head` and `memory-calibration`, and describe them. Returns `bins` with one row
    per run, source and bin of the estimate: its ends `start` and `end`, the `mean` estimate, the counts `judged` and
    `accepted`, and the accepted share `acceptance` with its interval `low` and `high`. The source is `head`, or one of
    copies (`lookup`, `memory`). `story` has the sentences of each run.
    """
    bins = [
        _make_bin(row, HEAD, "estimate", row["decisions"], round(row["accepted_fraction"] * row["decisions"]))
        for row in rows(log.recipe("calibration-of-head"))
    ]
    bins += [
        _make_bin(row, row["source"], "chance", row["judged"], row["accepted"])
        for row in rows(log.recipe("memory-calibration"))
    ]
    return {"bins": bins, "story": tell_runs(log, bins, _describe)}


def _make_bin(row: Mapping[str, Any], source: str, kind: str, judged: int, accepted: int) -> dict[str, Any]:
    counts = {"judged": judged, "accepted": accepted}
    ends = {"start": row[f"{kind}_from"], "end": row[f"{kind}_to"], "mean": row[f"mean_{kind}"]}
    return {"run": row["run"], "source": source, **ends, **counts, **acceptance_of(counts)}


def _describe(bins: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    head = [row for row in bins if row["source"] == HEAD]
    yield _compare("acceptance head", head) if head else "The acceptance head estimated nothing."
    copies = {name: [row for row in bins if row["source"] == name] for name in SOURCES}
    if not any(copies.values()):
        yield "Neither the own text nor the memory proposed a tree, so there are no chances to check."
    yield from (_compare(f"chances of the {SOURCES[name]}", mine) for name, mine in copies.items() if mine)


def _compare(name: str, bins: Sequence[Mapping[str, Any]]) -> str:
    """The mean estimate, the share that was accepted, and the mean difference of a bin."""
    judged = sum(row["judged"] for row in bins)
    expected = sum(row["mean"] * row["judged"] for row in bins) / judged
    found = sum(row["accepted"] for row in bins) / judged
    error = sum(abs(row["mean"] * row["judged"] - row["accepted"]) for row in bins) / judged
    verb = "expects" if name.endswith("head") else "expect"
    sentence = (
        f"The {name} {verb} {expected:.1%} of {judged:,} tokens to be accepted, and {found:.1%} were; "
        f"within a bin the difference is {100 * error:.1f} percentage points on average"
    )
    return f"{sentence}, of so few tokens mostly noise." if judged < FEW else f"{sentence}."
