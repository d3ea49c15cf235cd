"""The command `omnidraft study paper`: the tables of the OmniDraft paper on models and data at hand."""

import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.bench.study import PIPE_COLUMNS, QUICK, USUAL, show_progress, typed_command
from pipeline.config.cli_options import (
    MOST_TOKENS,
    MarkdownOption,
    PrintJsonOption,
    option,
    overrides_of,
    parse_settings,
    set_option,
)
from pipeline.reports.terminal import make_console, require_file, stderr_console
from pipeline.study.paper_tables import PAPER_TABLES, PaperBlock, PaperTable
from store.errors import UsageError

if TYPE_CHECKING:
    from pipeline.study.paper_report import BlockResults
    from pipeline.study.runner import StudyPlan

LOG = logging.getLogger("omnidraft.study")

LIMIT = 120  # prompts of a block
_TABLE_HELP = f"Table of the paper: one of {', '.join(map(str, PAPER_TABLES))}."
_DATA_HELP = "Folder with gsm8k, mbpp, humaneval, alpaca, dialogsum and scitldr as .parquet, as far as needed."
_ONLY_HELP = "Blocks of the table, separated by commas, such as gsm8k,code. Default: all."
_LIMIT_HELP = f"Prompts per block; several data sets share them. [default: {LIMIT}, with --quick 16]"


def study_paper(
    table: Annotated[int, typer.Option(help=_TABLE_HELP, show_default=False)],
    data: Annotated[Path, typer.Option(metavar="FOLDER", help=_DATA_HELP)] = Path("data"),
    targets: Annotated[
        list[str] | None, typer.Option("--target", help="Target model; may be repeated, with tables for each.")
    ] = None,
    drafter: Annotated[str | None, option("drafter")] = None,
    only: Annotated[str | None, typer.Option(help=_ONLY_HELP)] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds per arm. [default: 3]", min=1)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A trial: one seed, few and short prompts.")] = False,
    limit: Annotated[int | None, typer.Option(min=2, help=_LIMIT_HELP)] = None,
    batch: Annotated[int | None, option("batch", "Prompts decoded at the same time. [default: 8]", min=1)] = None,
    max_new_tokens: Annotated[int | None, option("sampling.max_new_tokens", f"{MOST_TOKENS} [default: 48]")] = None,
    settings: Annotated[list[str] | None, set_option("Any other setting of all arms; may be repeated.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs in parallel, each in its own process.")] = 1,
    threads: Annotated[int | None, option("threads", "CPU threads per run. [default: 1]", min=1)] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of finished runs, to resume from. [default: runs/paper-table-N]"),
    ] = None,
    markdown: MarkdownOption = None,
    as_json: PrintJsonOption = False,
) -> None:
    """Measure a table of the OmniDraft paper, and show its ratios next to ours.

    Tables: **1** losses on four tasks, **2** the adaptive head, **3** sizes of models, **4** size of the n-gram cache,
    **5** draft lengths and n-grams, **6** losses at two temperatures, **14** budgets of the cache.

    Finished runs are saved, and the same command resumes with the missing ones; give --quick a folder of its own with
    --out. Only ratios between arms can be compared: models, hardware and the definition of the rates differ.
    """
    if table not in PAPER_TABLES:
        raise UsageError(f"--table must be one of {', '.join(map(str, PAPER_TABLES))}, got {table}")
    require_file("--markdown", markdown)
    given = parse_settings(settings) | overrides_of(study_paper, locals())
    overrides = {**USUAL} | (QUICK if quick else {}) | given
    prompts = limit or (QUICK["source.limit"] if quick else LIMIT)
    chosen, folder = PAPER_TABLES[table], out or Path("runs", f"paper-table-{table}")
    plans = [
        (block, _plan(block, overrides, data, prompts, targets, seeds or (1 if quick else 3)))
        for block in _choose_blocks(chosen, only)
    ]
    for block, _ in plans:
        block.study.check(given)
    _run(chosen, plans, folder, jobs, markdown, as_json=as_json)


def _choose_blocks(table: PaperTable, only: str | None) -> list[PaperBlock]:
    """The named blocks, in the order of the table.

    Raises:
        UsageError: a name is unknown.
    """
    known = [block.name for block in table.blocks]
    names = [name.strip() for name in only.split(",")] if only else known
    for name in names:
        if name not in known:
            raise UsageError(f"--only must name blocks of table {table.number} ({', '.join(known)}), got '{name}'")
    return [block for block in table.blocks if block.name in names]


def _plan(
    block: PaperBlock, overrides: dict[str, Any], data: Path, limit: int, targets: list[str] | None, seeds: int
) -> "StudyPlan":
    from pipeline.config.settings import Config
    from pipeline.study.runner import StudyPlan

    files = [data / name for name in block.task.files]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise UsageError(f"--data must be a folder with {', '.join(block.task.files)}, but {missing[0]} is no file")
    sources = {"sources": tuple(map(str, files)), "source.limit": max(1, limit // len(files))}
    config = Config().with_overrides({**overrides, **sources})
    return StudyPlan(block.study, block.study.arms, config, tuple(targets or config.targets), seeds)


def _run(
    table: PaperTable,
    plans: list[tuple[PaperBlock, "StudyPlan"]],
    folder: Path,
    jobs: int,
    page: Path | None,
    *,
    as_json: bool,
) -> None:
    from pipeline.study.paper_report import to_markdown
    from pipeline.study.records import StudyFile
    from pipeline.study.report import results_json
    from pipeline.study.runner import run

    files = [(block, plan, StudyFile(folder / f"{block.name}.json", plan.shared_settings())) for block, plan in plans]
    try:
        for block, plan, file in files:
            LOG.info("table %d, %s", table.number, block.title)
            with show_progress(stderr_console(), plan, file, None) as progress:
                run(plan, file, jobs, progress.finish_run, progress.count_prompt)
    except KeyboardInterrupt:
        LOG.info("stopped; finished runs are in %s, and the same command resumes", folder)
        raise typer.Exit(130) from None
    blocks = [_collect(*one) for one in files]
    if as_json:
        print(json.dumps({one.block.name: results_json(one.by_target) for one in blocks}, indent=2))
    else:
        _print(table, blocks)
    if page is not None:
        page.write_text(to_markdown(table, blocks, typed_command(), time.strftime("%Y-%m-%d")), encoding="utf-8")


def _collect(block: PaperBlock, plan: "StudyPlan", file: Any) -> "BlockResults":
    from pipeline.study.paper_report import BlockResults
    from pipeline.study.report import results_json, results_of

    results = results_of(plan, list(file.records.values()))
    file.write(results_json(results))
    return BlockResults(block, plan, results)


def _print(table: PaperTable, blocks: list["BlockResults"]) -> None:
    from pipeline.study.paper_report import describe, make_sections
    from pipeline.study.report import as_rich

    console = make_console(PIPE_COLUMNS)
    for line in describe(blocks):
        console.print(line, markup=False, highlight=False)
    for heading, tables in make_sections(blocks):
        console.rule(heading, align="left")
        for one in tables:
            console.print(as_rich(one))
    console.print(table.remark, style="dim", markup=False, highlight=False)
