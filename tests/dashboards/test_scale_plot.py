"""Plots of cost over the amount of work, from given curves."""

import json
from pathlib import Path
from typing import Any

import pytest

from dashboards.scale import _values, draw, read_curves
from store.errors import CorruptError, RunError


def line(name: str, **medians: float) -> dict[str, Any]:
    points = [
        {"size": int(size[1:]), "median": median, "low": 0.9 * median, "high": 1.3 * median, "repeats": 3}
        for size, median in medians.items()
    ]
    return {"name": name, "points": points}


def curve(title: str, *lines: dict[str, Any]) -> dict[str, Any]:
    return {"title": title, "size": "things", "unit": "ms", "lines": list(lines), "also": {}}


FOUR = {
    "batch": curve("By batch", line("plain", s1=20, s2=30, s32=90), line("frozen", s1=41, s2=60, s32=110)),
    "context": curve("By context", line("target", s128=10, s256=11)),
    "cache": curve("By n-grams", line("levels", s0=10, s100=12, s100000=300)),
    "vocabulary": curve("By vocabulary", *(line(f"line {n}", s4000=n + 1, s8000=n + 2) for n in range(6))),
}


def write_json(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("names", [("batch",), ("batch", "context", "cache"), tuple(FOUR)])
def test_a_plot_has_a_panel_for_every_curve(tmp_path: Path, names: tuple[str, ...]):
    curves = {name: FOUR[name] for name in names}
    assert read_curves(write_json(tmp_path / "scale.json", {"curves": curves})) == curves
    draw(curves, tmp_path / "scale.svg")
    text = (tmp_path / "scale.svg").read_text()
    for name, given in FOUR.items():
        assert (f"<!-- {given['title']} -->" in text) == (name in names)
    assert len([1 for each in range(1, 9) if f'id="axes_{each}"' in text]) == len(names)


def test_bars_reach_from_quartile_to_quartile():
    sizes, values, below, above = _values(line("plain", s4=10)["points"])
    assert (sizes, values) == ([4], [10])
    assert below == pytest.approx([1.0])
    assert above == pytest.approx([3.0])


def test_files_that_cannot_be_plotted_are_refused(tmp_path: Path):
    with pytest.raises(RunError, match="must be a file of curves"):
        read_curves(tmp_path / "none.json")
    with pytest.raises(RunError, match="at least one curve"):
        read_curves(write_json(tmp_path / "empty.json", {"curves": {}}))
    with pytest.raises(CorruptError, match="cannot be parsed"):
        read_curves(write_json(tmp_path / "other.json", {"figures": 1}))
    with pytest.raises(CorruptError, match="cannot be parsed"):
        read_curves(write_json(tmp_path / "half.json", {"curves": {"batch": {"title": "By batch"}}}))
