"""A study's tables, from records with known metrics."""

import io
from typing import Any

import pytest
from rich.console import Console
from study_making import fall, record

from benchmarks.studies.definitions import STUDIES, StudyName
from benchmarks.studies.report import (
    as_markdown,
    best_fixed,
    circumstances,
    heading,
    markdown,
    print_report,
    results_of,
    tables,
)
from benchmarks.studies.runner import StudyPlan
from pipeline.config.settings import Config
from pipeline.reports.tables import Table


def plan_of(name: StudyName, *arms: str, **changes: Any) -> StudyPlan:
    study = STUDIES[name]
    chosen = tuple(study.arm(arm) for arm in arms)
    return StudyPlan(study, chosen, Config(), **{"targets": ("big",), "seeds": 2, **changes})


def table_of(found: list[Table], begin: str) -> Table:
    return next(table for table in found if table.title.startswith(begin))


def test_gains_are_paired_by_seed():
    plan = plan_of(StudyName.LOSSES, "none", "hybrid", "trie")
    levels = {("none", 0): 5, ("none", 1): 10, ("hybrid", 0): 10, ("hybrid", 1): 5, ("trie", 0): 12, ("trie", 1): 7}
    (results,) = results_of(plan, [record([level] * 5, arm=arm, seed=seed) for (arm, seed), level in levels.items()])
    table = table_of(tables(results), "acceptance as a multiple of 'hybrid'")
    assert table.heads == ("arm", "ours", "gain", "Llama3-8B", "Qwen2-7B", "k=3", "k=4")
    assert table.rows[1] == ("hybrid", "1.00 ± 0.00", "+0.0% ± 0.0%", "1.00", "1.00", "1.00", "1.00")
    assert table.rows[2][:4] == ("trie", "1.30 ± 0.10", "+30.0% ± 10.0%", "–")  # 12 / 10 and 7 / 5
    assert table.rows[0][1:4] == ("1.25 ± 0.75", "+25.0% ± 75.0%", "0.24")  # 5 / 10 and 10 / 5; the paper's .10 / .42


def test_the_best_fixed_length_is_found_afterwards():
    plan = plan_of(StudyName.HEAD, "fixed 2", "fixed 5", "cost, interleaved", seeds=1)
    seconds = {"fixed 2": (40.0, 10.0), "fixed 5": (20.0, 20.0), "cost, interleaved": (10.0, 8.0)}
    runs = [record([10] * 5, arm=arm, seconds=wall, cpu_seconds=cpu) for arm, (wall, cpu) in seconds.items()]
    (results,) = results_of(plan, runs)
    assert best_fixed(results) == "fixed 5"
    assert best_fixed(results, "tokens_per_cpu_second") == "fixed 2"
    notes = table_of(tables(results), "speed as").notes
    assert notes[0].endswith("chosen afterwards: fixed 5. Over it, paired by seed: cost, interleaved 2.000.")
    assert notes[1].endswith("chosen afterwards: fixed 2. Over it, paired by seed: cost, interleaved 1.250.")


def test_seeds_that_never_recovered_are_reported():
    plan = plan_of(StudyName.DRIFT, "no detector")
    stream = [16] * 25 + [4] * 15 + [16] * 25
    runs = [
        record(stream, arm="no detector", seed=0, segments=(0, 25, 65), alarms=(fall(30, "none"),)),
        record([16] * 25 + [4] * 40, arm="no detector", seed=1, segments=(0, 25, 65)),
    ]
    (results,) = results_of(plan, runs)
    made = tables(results)
    assert table_of(made, "acceptance around").rows == (
        ("no detector", "0.800 ± 0.000", "0.275 ± 0.075", "0.525 ± 0.075", "0.656 ± 0.094", "0.500 ± 0.300"),
    )
    recovery = table_of(made, "alarms and recovery").rows[0]
    assert recovery[1] == "5.0 (1 of 2)"
    assert recovery[6] == "33.0 (1 of 2)"  # windows of 20 with at least 18 prompts after the valley


def test_warnings_are_reported_once_with_their_arms():
    plan = plan_of(StudyName.LOSSES, "none", "hybrid", "trie", seeds=1)
    warnings = {"none": ("too small", "left out"), "hybrid": ("left out",), "trie": ("left out",)}
    runs = [record([10] * 5, arm=arm, notices=found) for arm, found in warnings.items()]
    assert circumstances(plan, results_of(plan, runs))[2:] == ["none: too small", "all arms: left out"]


def test_an_unfinished_study_reports_what_is_missing():
    plan = plan_of(StudyName.LOSSES, "none", "hybrid", targets=("big", "small"))
    first, second = results_of(plan, [record([10] * 5, arm="none")])
    assert table_of(tables(first), "whole stream").rows[1] == ("hybrid", "–", "–", "–", "–", "–")
    assert circumstances(plan, [first, second])[-1] == "7 of 8 runs are missing."
    assert heading(second).endswith("no run yet")


@pytest.mark.parametrize("name", StudyName)
def test_tables_fit_a_hundred_columns(name: StudyName):
    plan = StudyPlan(
        STUDIES[name], STUDIES[name].arms, Config(), ("builtin:target-12m",), 3, 10 if name == "drift" else None
    )
    stream = [5 + n % 7 for n in range(40)]
    runs = [
        record(
            stream, target=key.target, arm=key.arm, seed=key.seed, segments=(0, 10, 20, 30, 40), seconds=9.0 + key.seed
        )
        for key in plan.order()
    ]
    text = io.StringIO()
    print_report(Console(width=100, file=text), plan, results_of(plan, runs))
    assert max(map(len, text.getvalue().splitlines())) <= 100
    assert "…" not in text.getvalue()
    for arm in plan.arms:
        assert arm.name.split(",")[0] in text.getvalue()


def test_markdown_is_a_section_with_command_date_and_tables():
    plan = plan_of(StudyName.CACHE, "full", "none", seeds=1)
    results = results_of(plan, [record([10] * 5, arm="full"), record([5] * 5, arm="none")])
    page = markdown(plan, results, "omnidraft study cache", "2026-11-21")
    assert page.startswith("## Study: cache, 2026-11-21\n\n    omnidraft study cache\n\n5 prompts of builtin:docs,")
    assert "### Target big, drafter builtin:drafter-4m, two vocabularies" in page
    assert "**Acceptance as a multiple of 'full'" in page
    assert "| none | 0.50 | -50.0% | 0.82 |" in page
    assert page.endswith("with the same seed.\n")
    assert as_markdown(Table(("arm", "b"), (("x|y", "1"),), "a")).splitlines()[2:] == [
        "| arm | b |",
        "| --- | ---: |",
        "| x\\|y | 1 |",
    ]
