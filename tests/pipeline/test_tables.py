"""The table at the end of a run fits a terminal of 80 columns, and says what the summary says."""

from io import StringIO
from typing import Any

from rich.console import Console

from pipeline.tables import summary_table


def figures(**others: Any) -> dict[str, Any]:
    rates = {"acceptance_rate": 0.25, "block_efficiency": 1.5}
    return {
        "prompts": 1319,
        "emitted_tokens": 128_000,
        "tokens_per_second": 1234.56,
        "first_fifth": rates,
        "last_fifth": {"acceptance_rate": 0.625, "block_efficiency": 2.25},
        "drifts": [],
        "versions": [],
        **others,
    }


def printed(datasets: dict[str, Any], rejected: int = 0) -> list[str]:
    console = Console(file=StringIO(), width=80, record=True)
    console.print(summary_table({"run": "tuesday", "datasets": datasets, "rejected_rows": rejected}))
    return console.export_text().splitlines()


def row_of(lines: list[str], dataset: str) -> list[str]:
    return next(line for line in lines if line.startswith(dataset)).split()


def test_every_figure_is_whole_in_80_columns():
    drifts = [
        {"offset": 612, "action": "reset"},
        {"offset": 640, "action": "cooldown"},
        {"offset": 700, "action": "ignored"},
    ]
    versions = [{"version": number} for number in range(10, 28)]
    lines = printed({"humaneval": figures(drifts=drifts, versions=versions)})
    expected = ["humaneval", "1,319", "128,000", "1,234.6", "0.250→0.625", "1.50→2.25", "612", "10-27"]
    assert row_of(lines, "humaneval") == expected
    assert "tuesday" in lines[0]
    assert "first fifth→last fifth" in lines[-1]


def test_what_there_is_none_of_is_a_dash():
    nothing = {"acceptance_rate": None, "block_efficiency": None}
    lines = printed({"docs": figures(tokens_per_second=None, first_fifth=nothing, last_fifth=nothing)})
    assert row_of(lines, "docs")[3:] == ["-", "-→-", "-→-", "-", "-"]


def test_versions_that_do_not_follow_each_other_are_listed():
    lines = printed(
        {"docs": figures(versions=[{"version": 3}, {"version": 5}]), "code": figures(versions=[{"version": 4}])}
    )
    assert " ".join(row_of(lines, "docs")).endswith("3, 5")
    assert row_of(lines, "code")[-1] == "4"


def test_rejected_rows_are_told_with_where_they_are():
    assert "rejected.jsonl" not in "".join(printed({"docs": figures()}))
    assert "1,234, see rejected.jsonl" in "".join(printed({"docs": figures()}, rejected=1234))
