"""Plots the results of `python -m benchmarks.speed`: `python -m benchmarks.plots.speed results.json speed.png`.

One model is plotted over the batch, models of several sizes over their parameters, with a panel for every batch.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.plots.curves import draw
from benchmarks.plots.results import read_json
from dashboards.plots import plot_parser, run_command
from store.errors import RunError

MAKER = "python -m benchmarks.speed --json FILE"
Curve = dict[str, Any]  # as `benchmarks.speed` writes them


def read_runs(source: Path) -> list[Mapping[str, Any]]:
    """Return the results of one file, or of all JSON files of a folder.

    Raises:
        RunError: there is no such file, or no results.
        CorruptError: a file is not one of results.
    """
    files = sorted(source.glob("*.json")) if source.is_dir() else [source]
    found = [run for file in files for run in read_json(file, "a file of results", MAKER, _runs)]
    if not found:
        raise RunError(f"{source} must hold results, but has none; run `{MAKER}`")
    return found


def _runs(content: Any) -> list[Mapping[str, Any]]:
    for run in content["runs"]:
        _ = run["settings"]["batch"], run["machine"]["target_parameters"], run["labels"]
        for found in run["arms"].values():
            _ = [found["tokens_per_second"][name] for name in ("median", "lower", "upper")]
    return list(content["runs"])


def make_curves(runs: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return the curves of results, by name."""
    by_batch: dict[int, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for run in runs:
        millions = round(run["machine"]["target_parameters"] / 1e6)
        by_batch[run["settings"]["batch"]][millions] = run
    sizes = {size for own in by_batch.values() for size in own}
    if len(sizes) == 1:
        (size,) = sizes
        of_model = {batch: own[size] for batch, own in sorted(by_batch.items())}
        return {"batch": _make_curve(f"target of {size:,} million parameters", "prompts at once", of_model)}
    return {
        f"batch {batch}": _make_curve(f"batch {batch}", "million parameters of the target", dict(sorted(own.items())))
        for batch, own in sorted(by_batch.items())
    }


def _make_curve(title: str, size: str, runs: Mapping[int, Mapping[str, Any]]) -> Curve:
    lines: dict[str, list[dict[str, float]]] = defaultdict(list)
    for place, run in runs.items():
        for arm, found in run["arms"].items():
            speed = found["tokens_per_second"]
            ends = {"median": speed["median"], "low": speed["lower"], "high": speed["upper"]}
            lines[run["labels"].get(arm, arm)].append({"size": place, **ends})
    return {
        "title": title,
        "size": size,
        "unit": "tokens per second",
        "lines": [{"name": name, "points": points} for name, points in lines.items()],
    }


SOURCE = f"a file that `{MAKER}` writes, or a folder of such files"
PARSER = plot_parser("Plot tokens per second.", "results", SOURCE)

if __name__ == "__main__":
    run_command(PARSER, lambda args: draw(make_curves(read_runs(args.results)), args.plot))
