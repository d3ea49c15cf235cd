"""The paper's figures: curves from the counts of runs, swaps of targets, and the plots."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from study_making import record

from dashboards.paper import draw, read_panels
from pipeline.cli.bench.paper import _swap_targets
from pipeline.config.settings import Config
from pipeline.study.paper.curves import make_series
from pipeline.study.paper.figures import PAPER_FIGURES, CurveKind
from pipeline.study.paper.panels import Panel, PlotFile, Series
from pipeline.study.paper.plots import draw_figure
from pipeline.study.paper.report import BlockResults, make_curve_table
from pipeline.study.records import Record
from pipeline.study.report import results_of
from pipeline.study.runner import StudyPlan
from store.errors import CorruptError, RunError


def with_ngrams(found: Record) -> Record:
    """Each prompt has accepted one n-gram more than the one before it, and adds two entries."""
    passed = tuple(replace(one, ngrams=n, entries=2 * n + 2) for n, one in enumerate(found.passed))
    return replace(found, passed=passed, ngram_counts=(9, 4, 1))


def test_rates_are_of_windows_in_stream_order():
    """16 prompts: windows of two, the first at prompt 2. Completion in another order changes nothing."""
    found = record([0, 10, *[5] * 13, 20])
    series = make_series("hybrid", [replace(found, passed=found.passed[::-1])], CurveKind.ACCEPTANCE)
    assert list(series.at) == list(range(2, 17))
    assert series.values[0] == 10 / 40
    assert series.values[-1] == 25 / 40
    assert series.errors is None


def test_curves_of_several_seeds_are_means_with_errors():
    series = make_series("a", [record([2] * 8), record([6] * 8, seed=1)], CurveKind.ACCEPTANCE, shift=100)
    assert series.at[0] == 101
    assert series.values[0] == pytest.approx(0.2)
    assert series.errors is not None
    assert series.errors[0] == pytest.approx(0.1)


def test_ngrams_are_counted_ranked_and_the_growth_is_over_tokens():
    found = with_ngrams(record([0, 10, 10]))
    assert list(make_series("a", [found], CurveKind.HITS).values) == [0, 1, 2]
    growth = make_series("a", [found], CurveKind.GROWTH)
    assert (list(growth.at), list(growth.values)) == ([10, 30, 50], [2, 4, 6])
    ranks = make_series("a", [found], CurveKind.FREQUENCY)
    assert (list(ranks.at), list(ranks.values)) == ([1, 2, 3], [9, 4, 1])


def results(name: str, found: Record) -> list[BlockResults]:
    """One run of the first arm in every block."""
    made = []
    for block in PAPER_FIGURES[name].blocks:
        plan = StudyPlan(block.study, block.study.arms, Config(), ("big",), 1)
        own = replace(found, key=replace(found.key, arm=block.study.arms[0].name))
        made.append(BlockResults(block, plan, results_of(plan, [own])))
    return made


def test_the_data_after_a_switch_alone_is_drawn_as_the_second_half():
    found = replace(record([5] * 16), segments=(0, 8, 16))
    blocks = results("5", found)
    (panel,) = draw_figure(PAPER_FIGURES["5"], blocks)
    by_name = {series.name: series for series in panel.series}
    assert by_name["GSM8K, then MBPP: direct only"].at[0] == 2
    assert by_name["MBPP alone: hybrid"].at[0] == 18
    assert panel.marks == {"other data from 8": 8}


def test_a_swap_divides_the_stream_into_equal_parts():
    chosen = PAPER_FIGURES["6"]
    assert _swap_targets(chosen, ["a", "b"], 90) == {"swaps": ("30=b", "60=a")}
    assert _swap_targets(PAPER_FIGURES["5"], ["a"], 90) == {}
    block = results("6", record([5] * 9))[0]
    swapped = replace(block, plan=replace(block.plan, config=Config().with_overrides({"swaps": ("3=b", "6=a")})))
    (panel,) = draw_figure(chosen, [swapped])
    assert panel.marks == {"b from 3": 3, "a from 6": 6}


@pytest.mark.parametrize("name", PAPER_FIGURES)
def test_every_one_can_be_drawn(name: str, tmp_path: Path):
    found = draw_figure(PAPER_FIGURES[name], results(name, with_ngrams(record([5] * 16))))
    path = PlotFile("Title", "remark", "command", "2026-01-01", found).write(tmp_path, "name")
    draw(*read_panels(path), tmp_path / "name.svg")
    text = (tmp_path / "name.svg").read_text(encoding="utf-8")
    assert all(f"<!-- {series.name} -->" in text for panel in found for series in panel.series)
    assert all(panel.value in text for panel in found)


def test_a_table_has_points_of_each_curve_and_none_beyond_its_end():
    long = Series("long", [n / 10 for n in range(1, 10)], range(1, 10))
    table = make_curve_table(Panel("", "rate", [long, Series("short", [0.5, 0.25], (1, 2))], "prompt"))
    assert table.heads[:3] == ("rate", "prompt 1", "prompt 2")
    assert table.rows[0][0] == "long"
    assert (table.rows[0][-1], table.rows[1][1:4]) == ("0.9", ("0.5", "0.25", "–"))


def test_files_that_have_no_panels_are_refused(tmp_path: Path):
    with pytest.raises(RunError, match="omnidraft study-paper"):
        read_panels(tmp_path / "missing.json")
    (tmp_path / "other.json").write_text("[]", encoding="utf-8")
    with pytest.raises(CorruptError):
        read_panels(tmp_path / "other.json")
    (tmp_path / "empty.json").write_text(json.dumps({"title": "T", "panels": []}), encoding="utf-8")
    with pytest.raises(RunError, match="is empty"):
        read_panels(tmp_path / "empty.json")
