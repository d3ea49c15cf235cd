"""The table at the end of a run fits a terminal of 80 columns, and has the numbers of the summary."""

from io import StringIO
from typing import Any

from rich.console import Console

from pipeline.reports.terminal import make_summary_table


def make_metrics(**others: Any) -> dict[str, Any]:
    rates = {"acceptance_rate": 0.25, "block_efficiency": 1.5, "judged_tokens": 900}
    return {
        "prompts": 1319,
        "emitted_tokens": 128_000,
        "tokens_per_second": 1234.56,
        "first_fifth": rates,
        "last_fifth": {"acceptance_rate": 0.625, "block_efficiency": 2.25, "judged_tokens": 10},
        "drifts": [],
        "versions": [],
        **others,
    }


NO_COSTS = {"update_seconds": 0.0, "waited_seconds": 0.0, "recall_seconds": 0.0}
NO_LEDGER = {**NO_COSTS, "tokens_gained": 0.0, "seconds_saved": None}


def print_summary(
    datasets: dict[str, Any],
    rejected: int = 0,
    targets: dict[str, Any] | None = None,
    ledger: dict[str, Any] = NO_LEDGER,
) -> list[str]:
    console = Console(file=StringIO(), width=80, record=True)
    totals = {"datasets": datasets, "targets": targets or {"big": make_metrics()}, "totals": {"ledger": ledger}}
    console.print(make_summary_table({"run": "tuesday", "rejected_rows": rejected, **totals}))
    return console.export_text().splitlines()


def find_row(lines: list[str], dataset: str) -> list[str]:
    return next(line for line in lines if line.startswith(dataset)).split()


def test_every_number_is_complete_in_80_columns():
    drifts = [
        {"offset": 612, "action": "recall"},
        {"offset": 640, "action": "cooldown"},
        {"offset": 660, "action": "none"},
        {"offset": 700, "action": "ignored"},
    ]
    versions = [{"version": number} for number in range(10, 28)]
    lines = print_summary({"humaneval": make_metrics(drifts=drifts, versions=versions)})
    expected = ["humaneval", "1,319", "128,000", "1,234.6", "0.250→0.625", "1.50→2.25", "612", "10-27"]
    assert find_row(lines, "humaneval") == expected
    assert "tuesday" in lines[0]
    assert "first fifth→last fifth" in lines[-1]


def test_the_acceptance_of_the_run_has_its_interval_and_count():
    console = Console(file=StringIO(), width=80, record=True)
    rates = {"acceptance_rate": 0.322, "acceptance_interval": [0.2341, 0.4256], "judged_tokens": 1087}
    groups = {"datasets": {"docs": make_metrics()}, "targets": {"big": make_metrics()}}
    summary = {"run": "tuesday", "rejected_rows": 0, **groups, "totals": {"ledger": NO_LEDGER, **rates}}
    console.print(make_summary_table(summary))
    assert "acceptance of the drafter model: 0.322 (0.23 to 0.43, 1,087 judged)" in console.export_text()


def test_several_targets_have_a_table_of_their_own_and_one_has_none():
    few = make_metrics(prompts=7)
    lines = print_summary({"docs": make_metrics()}, targets={"big": few, "small": make_metrics(prompts=9)})
    assert find_row(lines, "big")[1:4] == ["7", "128,000", "1,234.6"]
    assert find_row(lines, "small")[1] == "9"
    assert "by target" not in "".join(print_summary({"docs": make_metrics()}, targets={"big": few}))


def test_the_answers_to_the_first_questions_come_first():
    console = Console(file=StringIO(), width=200, record=True)
    groups = {"datasets": {"docs": make_metrics()}, "targets": {"big": make_metrics()}}
    totals = {"totals": {"ended_by_length": 3, "prompts": 9}, "rejected_rows": 0}
    findings = {"findings": {"drafting": "1.27 times as fast", "learning": "nothing was learned"}}
    console.print(make_summary_table({"run": "tuesday", **totals, **groups, **findings}))
    lines = console.export_text().splitlines()
    after = lines.index("drafting: 1.27 times as fast")
    assert lines[after + 1] == "learning: nothing was learned"
    assert "answers that ended by their length: 3 of 9 (--max-new-tokens)" in lines
