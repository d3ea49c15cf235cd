"""Calibration of the head and of the chances of copies, compared with known counts, and its page."""

from pathlib import Path
from typing import Any

from serving_runs import Serve, read_table
from stream_making import block_of_every_kind, prompt, write
from tree_making import NODES, make_tree

from dashboards.web.queries.calibration import read_calibration
from store.events import DraftSource, Event
from store.query.log_reader import LogReader


def make_estimated(prompts: int = 20) -> list[Event]:
    """Make trees of the memory with chance 0.5, and drafts for which the head estimates 0.75.

    In each draft two tokens are accepted, one is rejected, one is not judged, and a copied one is accepted. In each
    tree two candidates are accepted and two are alternatives.
    """
    events: list[Event] = []
    for offset in range(prompts):
        events += block_of_every_kind(2 * offset)
        events += make_tree(NODES, [0.4, 0.6], offset=2 * offset + 1)
        events += [prompt(2 * offset), prompt(2 * offset + 1)]
    return events


def read(folder: Path, events: list[Event]) -> dict[str, Any]:
    with LogReader([write(folder, events)]) as log:
        return read_calibration(log)


def test_bins_have_counts_and_intervals(tmp_path: Path):
    head, memory = read(tmp_path / "run", make_estimated())["bins"]
    assert (head["source"], head["start"], head["end"], head["mean"]) == ("head", 0.7, 0.8, 0.75)
    assert (head["judged"], head["accepted"], head["acceptance"]) == (100, 60, 0.6)
    assert 0.5 < head["low"] < 0.6 < head["high"] < 0.7
    assert (memory["source"], memory["start"], memory["judged"], memory["accepted"]) == ("memory", 0.5, 80, 40)


def test_sentences_compare_estimates_with_results(tmp_path: Path):
    (story,) = read(tmp_path / "run", make_estimated())["story"]
    assert story["sentences"] == [
        "The acceptance head expects 75.0% of 100 tokens to be accepted, and 60.0% were; within a bin the difference "
        "is 15.0 percentage points on average.",
        "The chances of the memory expect 50.0% of 80 tokens to be accepted, and 50.0% were; within a bin the "
        "difference is 0.0 percentage points on average.",
    ]


def test_too_few_and_missing_tokens_are_reported(tmp_path: Path):
    (story,) = read(tmp_path / "few", make_estimated(prompts=5))["story"]
    assert story["sentences"][0].endswith(", of so few tokens mostly noise.")
    (story,) = read(tmp_path / "none", [prompt(0)])["story"]
    assert story["sentences"] == [
        "The acceptance head estimated nothing.",
        "Neither the own text nor the memory proposed a tree, so there are no chances to check.",
    ]


def test_the_page_has_reliability_curves(serve: Serve, tmp_path: Path, page: Any):
    own = make_tree(NODES, [0.4, 0.6], offset=99, drafter=DraftSource.LOOKUP)
    write(tmp_path / "runs" / "a", [*make_estimated(), *own, prompt(99)])
    write(tmp_path / "runs" / "b", make_estimated())
    address = serve(tmp_path / "runs")
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{address}/calibration?run=a")
    page.wait_for_selector("#copies .barlayer .trace")
    names = (
        "place => document.getElementById(place).data.filter(trace => trace.type === 'bar').map(trace => trace.name)"
    )
    assert page.evaluate(names, "head") == ["acceptance head"]
    assert page.evaluate(names, "copies") == ["own text", "memory"]
    diagonal = page.evaluate("document.getElementById('head').data[0]")
    assert (diagonal["x"], diagonal["y"]) == ([0, 1], [0, 1])
    page.click("text=The bins as a table")
    assert [row[:3] for row in read_table(page, "#bins")] == [
        ["acceptance head", "0.7 to 0.8", "100"],
        ["own text", "0.5 to 0.6", "4"],
        ["memory", "0.5 to 0.6", "80"],
    ]
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.goto(f"{address}/calibration?run=a&run=b")
    page.wait_for_selector("#copies .barlayer .trace")
    assert page.evaluate(names, "copies") == ["a: own text", "a: memory", "b: memory"]
