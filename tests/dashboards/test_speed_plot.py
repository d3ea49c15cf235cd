"""Plots of the benchmark's results: over the batch for one target, over parameters for several."""

import json
from pathlib import Path
from typing import Any

import pytest

from dashboards.scale import draw
from dashboards.speed import make_curves, read_runs
from store.errors import CorruptError, RunError


def run_of(parameters: float, batch: int, **speeds: float) -> dict[str, Any]:
    arms = {
        name: {"tokens_per_second": {"median": speed, "lower": 0.9 * speed, "upper": 1.2 * speed}}
        for name, speed in speeds.items()
    }
    settings, machine = {"batch": batch}, {"target_parameters": parameters}
    return {"settings": settings, "machine": machine, "labels": {"engine": "Engine 1.0"}, "arms": arms}


def write_runs(path: Path, *runs: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"runs": runs}))
    return path


def test_one_target_is_plotted_over_the_batch(tmp_path: Path):
    file = write_runs(tmp_path / "one.json", run_of(134.5e6, 8, memory=600, engine=500), run_of(134.5e6, 1, memory=300))
    curves = make_curves(read_runs(file))
    (curve,) = curves.values()
    assert curve["title"] == "target of 134 million parameters"
    (memory, engine) = curve["lines"]
    assert [(point["size"], point["median"]) for point in memory["points"]] == [(1, 300), (8, 600)]
    assert (engine["name"], engine["points"]) == ("Engine 1.0", [{"size": 8, "median": 500, "low": 450, "high": 600}])


def test_several_targets_are_plotted_over_their_parameters(tmp_path: Path):
    write_runs(tmp_path / "small.json", run_of(7e6, 1, memory=900), run_of(7e6, 4, memory=2000))
    write_runs(tmp_path / "large.json", run_of(3e8, 1, memory=200), run_of(3e8, 4, memory=500))
    curves = make_curves(read_runs(tmp_path))
    assert list(curves) == ["batch 1", "batch 4"]
    (line,) = curves["batch 4"]["lines"]
    assert [(point["size"], point["median"]) for point in line["points"]] == [(7, 2000), (300, 500)]
    draw(curves, tmp_path / "speed.svg")
    text = (tmp_path / "speed.svg").read_text()
    assert all(f"<!-- {name} -->" in text for name in curves)


def test_files_that_cannot_be_plotted_are_refused(tmp_path: Path):
    with pytest.raises(RunError, match="must hold results, but has none"):
        read_runs(tmp_path)
    with pytest.raises(RunError, match="must be a file of results"):
        read_runs(tmp_path / "none.json")
    (tmp_path / "curves.json").write_text('{"curves": {}}')
    with pytest.raises(CorruptError, match="cannot be parsed"):
        read_runs(tmp_path / "curves.json")
