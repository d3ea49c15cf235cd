"""The page of studies lists the files of studies and shows their plots and tables."""

import json
from pathlib import Path
from typing import Any

import pytest
from serving_runs import Serve
from stream_making import stream, write

from dashboards.web.studies import LARGEST, list_studies
from pipeline.study.paper.panels import Panel, PlotFile, Series

ARMS = Panel(
    "GSM8K",
    "acceptance rate",
    [Series("ours", [1.0, None], errors=[0.1, None]), Series("paper", [1.5, 2.5], is_paper=True)],
    categories=["none", "hybrid <b>"],
)
CURVES = Panel("", "rate", [Series("hybrid", [0.25, 0.5], (1, 2))], "prompt", marks={"swap": 1.5})


def put(runs: Path, name: str, *panels: Panel, file: str = "table") -> Path:
    folder = runs / name
    folder.mkdir(parents=True)
    return PlotFile(f"Title {name}", "remark", "omnidraft study-paper", "2026-01-01", panels, ["One seed."]).write(
        folder, file
    )


def test_the_studies_of_a_folder_are_listed_by_title(tmp_path: Path):
    put(tmp_path, "b", CURVES)
    put(tmp_path, "a", ARMS, file="figure-8")
    found = list_studies(tmp_path)
    assert [(one["title"], one["file"]) for one in found] == [
        ("Title a", "a/figure-8-panels.json"),
        ("Title b", "b/table-panels.json"),
    ]
    assert found[0]["panels"][0]["series"][1] == {
        "name": "paper", "values": [1.5, 2.5], "at": [], "errors": None, "is_paper": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"title": "t"}', " " * (LARGEST + 1)],
    ids=["empty", "cut off", "a list", "no panels", "too long"],
)
def test_files_that_are_not_studies_are_skipped(tmp_path: Path, content: str):
    put(tmp_path, "a").write_text(content, encoding="utf-8")
    assert list_studies(tmp_path) == []


def test_a_series_without_a_value_for_each_point_is_skipped(tmp_path: Path):
    path = put(tmp_path, "a", CURVES)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["panels"][0]["series"][0]["at"] = [1]
    path.write_text(json.dumps(content), encoding="utf-8")
    assert list_studies(tmp_path) == []


def test_the_page_draws_studies_without_any_run(serve: Serve, tmp_path: Path, page: Any):
    put(tmp_path / "runs", "a", ARMS, CURVES)
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{serve(tmp_path / 'runs')}/studies")
    page.wait_for_selector("#studies .main-svg")
    assert page.locator("#contents a").inner_text() == "Title a"
    assert "One seed." in page.locator("#studies .note").all_inner_texts()
    assert page.locator("nav [aria-current]").first.evaluate("link => link.getBoundingClientRect().right <= innerWidth")
    assert page.locator("#studies .chart").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator("#studies summary").first.click()
    rows = page.locator("#studies table").first.locator("tbody tr").all_inner_texts()
    assert [row.split("\t") for row in rows] == [["none", "1", "1.5"], ["hybrid <b>", "–", "2.5"]]


def test_the_page_reports_that_there_is_no_study(serve: Serve, tmp_path: Path, page: Any):
    write(tmp_path / "runs" / "a", stream(5))
    page.goto(f"{serve(tmp_path / 'runs')}/studies")
    page.wait_for_selector("#none:not([hidden])")
    assert "study-paper" in page.locator("#none").inner_text()
