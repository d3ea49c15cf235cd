"""The paper's tables as studies: their numbers are the paper's, and a table is measured, resumed and printed."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import typer
from places import ROOT
from replaying import config_of
from study_making import record
from tiny_pair import TinyPair, sentences
from typer.testing import CliRunner, Result

from benchmarks.studies import task as study_run
from benchmarks.studies.command import USUAL
from benchmarks.studies.definitions import FIXED
from benchmarks.studies.paper.command import study_paper
from benchmarks.studies.paper.report import BlockResults, make_sections
from benchmarks.studies.paper.tables import NO_STEP, PAPER_TABLES, PaperTable
from benchmarks.studies.report import results_of
from benchmarks.studies.runner import StudyPlan
from benchmarks.studies.task import choose_prompts
from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import load_only_target
from pipeline.config.settings import Config
from store.events import Updated

PAPER = ROOT.parent / "shared" / "PAPER.md"
app = typer.Typer()
app.command("study-paper")(study_paper)
app.command("other")(lambda: None)


@pytest.mark.parametrize("table", PAPER_TABLES.values(), ids=lambda table: str(table.number))
def test_every_block_is_a_study_whose_arms_differ(table: PaperTable):
    for block in table.blocks:
        study = block.study
        made = [Config().with_overrides({**USUAL, **study.settings, **arm.settings}) for arm in study.arms]
        seen = {(config.to_json(), arm.share) for config, arm in zip(made, study.arms, strict=True)}
        names = {arm.name for arm in study.arms}
        assert len(seen) == len(names) == len(study.arms)
        assert {block.reference, *block.hits, *(name for one in study.paper for name in one.values)} <= names
    assert len({block.name for block in table.blocks}) == len(table.blocks)


@pytest.mark.skipif(not PAPER.is_file(), reason="the notes on the paper are not here")
@pytest.mark.parametrize("table", PAPER_TABLES.values(), ids=lambda table: str(table.number))
def test_every_number_is_one_of_the_papers(table: PaperTable):
    """Each pair of numbers is in the paper's table, written as `.32/1.58`."""
    lines = PAPER.read_text(encoding="utf-8").splitlines()
    begin = rf"Table {table.number}\b" if table.number.isdigit() else "Rank 32 everywhere"
    first = next(n for n, line in enumerate(lines) if re.match(begin, line))
    end = next(n for n in range(first + 1, len(lines)) if re.match(r"(Table \d|Drift|Reading|##)", lines[n]))
    text = re.sub(r"\*\*", "", "\n".join(lines[first:end]))
    numbers = set(re.findall(r"\d*\.\d+|\d[\d,]*", text))
    wanted = [
        number for block in table.blocks for one in block.study.paper for pair in one.values.values() for number in pair
    ]
    wanted += [number for block in table.blocks for number in block.hits.values() if number]
    sizes = [block.cache for block in table.blocks if block.cache]
    wanted += [number for size in sizes for number in (size.megabytes,)]
    assert wanted
    known = {float(number.replace(",", "")) for number in numbers}
    assert [number for number in wanted if number not in known] == []
    assert {f"{size.entries:,}" for size in sizes} <= numbers


@pytest.fixture(scope="module")
def data(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data with prompts of the tiny pair in place of GSM8K."""
    import pyarrow as pa
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("data")
    parquet.write_table(pa.table({"prompt": [text[:30] for text in sentences(300, 306)]}), folder / "gsm8k.parquet")
    return folder


def run_table(pair: TinyPair, data: Path, *arguments: object) -> Result:
    fixed = ["--drafter", pair.drafter, "--target", pair.target, "--set", "device=cpu", "--set", "learn.interval=2"]
    line = [str(word) for word in ("study-paper", "--data", data, *fixed, "--quick", "--max-new-tokens", 8, *arguments)]
    with patch.object(sys, "argv", ["studies", *line]):
        return CliRunner().invoke(app, line)


@pytest.mark.slow
def test_a_table_is_measured_and_resumed(tiny_pair: TinyPair, data: Path, tmp_path: Path):
    out = tmp_path / "runs"
    arguments = ("--table", 5, "--limit", 6, "--out", out)
    done = run_table(tiny_pair, data, "--only", "k3", *arguments)
    assert done.exit_code == 0, done.output
    kept = json.loads((out / "k3.json").read_text())
    assert {run["key"]["arm"] for run in kept["runs"]} == {arm.name for arm in PAPER_TABLES["5"].blocks[0].study.arms}
    assert kept["settings"]["draft.max_draft"] == 3
    assert not (out / "k4.json").exists()
    run_task, started = study_run.run_task, list[str]()

    def count(task):
        started.append(task.key.arm)
        return run_task(task)

    with patch.object(study_run, "run_task", count):
        again = run_table(tiny_pair, data, *arguments)
    assert again.exit_code == 0, again.output
    assert len(started) == len(PAPER_TABLES["5"].blocks[1].study.arms)  # k4 alone
    assert "k=4: accepted n-grams per response" in again.output
    assert re.search(r"^ *cache only .* 1\.25 *$", again.output, re.MULTILINE)  # .20 / .16
    hits = run_table(tiny_pair, data, "--figure", 8, "--limit", 6, "--out", out)
    assert hits.exit_code == 0, hits.output
    assert len(started) == len(PAPER_TABLES["5"].blocks[1].study.arms)  # the runs of table 5 are shown
    assert [line for line in hits.output.splitlines() if line in ("k=3", "k=4")] == ["k=3", "k=4"]


def test_ratios_are_printed_next_to_the_papers(tmp_path: Path):
    """The reference accepts 4 of 20 tokens, direct only 8, hybrid 10: 2 and 2.5 times as many."""
    block = PAPER_TABLES["1"].blocks[0]
    plan = StudyPlan(block.study, block.study.arms, Config(), ("big",), 1)
    accepted = {"none": 4, "direct only": 8, "hybrid": 10}
    records = [record([number] * 5, arm=arm) for arm, number in accepted.items()]
    done = BlockResults(block, plan, results_of(plan, records))
    ((heading, tables),) = make_sections([done])
    assert heading.startswith("target big, ")
    overview, acceptance, _ = tables
    cells = {row[0]: list(row[1:]) for row in overview.rows}
    assert cells["none"] == ["1.00 (1.00)"]
    assert cells["direct only"] == ["2.00 (2.36 to 3.20)"]  # .33 / .14 and .32 / .10
    assert cells["memory"] == cells["no drafts"] == ["–"]
    assert next(row for row in acceptance.rows if row[0] == "hybrid")[1:] == ("0.500", "0.500", "2.50", "4.20", "2.64")
    assert cells["hybrid"] == ["2.50 (2.64 to 4.20)"]


def test_the_size_of_the_cache_is_next_to_the_papers():
    block = PAPER_TABLES["4"].blocks[0]
    plan = StudyPlan(block.study, block.study.arms, Config(), ("big",), 1)
    found = replace(record([4] * 5), cache_entries=8, cache_bytes=2048)
    ((_, (table,)),) = make_sections([BlockResults(block, plan, results_of(plan, [found]))])
    assert [tuple(row) for row in table.rows] == [
        ("prompts", "5", "7,473"),
        ("entries", "8", "5,569"),
        ("KiB", "2.0", "1,339.8"),
        ("bytes per entry", "256", "246"),
        ("entries per prompt", "1.60", "0.75"),
    ]


def test_the_drafter_of_adapt_only_stays_as_loaded_while_its_head_learns(tiny_pair: TinyPair, tmp_path: Path):
    arm = PAPER_TABLES["2"].blocks[0].study.arm("adapt only")
    assert arm.settings["learn.rate"] == NO_STEP
    assert arm.settings["draft.max_draft"] > FIXED["draft.max_draft"]
    quick = {"draft.sources": ("model",), "learn.spacing": "fixed", "learn.interval": 1}
    config = config_of(tiny_pair).with_overrides({**quick, **arm.settings})
    models = load_only_target(config, tmp_path)
    loaded = [weight.detach().clone() for weight in models.drafter.trained_weights]
    loop = build_loop(config, (models,), tmp_path / "run")
    prompts = choose_prompts(config, None).chosen
    updates = [event for event in loop.run(iter(prompts)) if isinstance(event, Updated)]
    assert any(update.part == "drafter" and update.served for update in updates)
    assert any(update.part == "head" for update in updates)
    assert all(map(torch.equal, models.drafter.trained_weights, loaded))
