"""Plots of a study, from given results."""

import json
import math
from pathlib import Path

import pytest

from dashboards.study import _value, draw, read_results
from store.errors import CorruptError, RunError


def arm(acceptance: float | None, size: int) -> dict[str, object]:
    rate = None if acceptance is None else {"value": acceptance, "error": 0.01, "seeds": 3}
    part = {"acceptance": rate, "block_efficiency": {"value": 1.5, "error": None, "seeds": 1}}
    return {"last_fifth": part, "cache_bytes": {"value": size, "error": 0.0, "seeds": 3}}


CACHE = {"full": arm(0.5, 4096), "none": arm(0.4, 0), "1/4 LRU": arm(0.45, 1024), "1/4 LFU": arm(0.48, 1024)}


def write_json(path: Path, name: str, results: object) -> Path:
    path.write_text(json.dumps({"settings": {"study": name}, "figures": results, "runs": []}))
    return path


@pytest.mark.parametrize("name", ["cache", "losses"])
def test_a_plot_is_drawn(tmp_path: Path, name: str):
    results = {"big": CACHE, "small": {**CACHE, "none": arm(None, 0)}}
    read = read_results(write_json(tmp_path / "study.json", name, results))
    assert read == (name, results)
    draw(*read, tmp_path / "study.svg")
    text = (tmp_path / "study.svg").read_text()
    assert "<svg" in text
    assert len(text) > 10_000


def test_missing_values_are_not_drawn():
    assert math.isnan(_value(None)[0])
    assert _value({"value": 1.0, "error": None}) == (1.0, 0.0)


def test_files_that_cannot_be_plotted_are_refused(tmp_path: Path):
    with pytest.raises(RunError, match="must be the file of a study"):
        read_results(tmp_path / "none.json")
    with pytest.raises(RunError, match="has no results yet"):
        read_results(write_json(tmp_path / "study.json", "losses", {}))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(CorruptError, match="cannot be parsed"):
        read_results(tmp_path / "other.json")
