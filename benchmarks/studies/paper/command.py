"""The command `python -m benchmarks.studies paper`: the paper's tables and figures on models and data at hand."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.command import MOST_TOKENS
from benchmarks.studies.command import PIPE_COLUMNS, QUICK, USUAL, RunLogger
from benchmarks.studies.paper.blocks import PaperBlock
from benchmarks.studies.paper.figures import PAPER_FIGURES, PaperFigure
from benchmarks.studies.paper.tables import PAPER_TABLES, PaperTable
from pipeline.config.cli_options import option, overrides_of, parse_settings, set_option
from pipeline.reports.terminal import make_console
from store.errors import UsageError

if TYPE_CHECKING:
    from benchmarks.studies.paper.report import BlockResults, Section
    from benchmarks.studies.runner import StudyPlan

LOG = logging.getLogger("omnidraft.study")

LIMIT = 120  # prompts of a block
_TABLE_HELP = f"Table of the paper: one of {', '.join(PAPER_TABLES)}."
_PAPER_FIGURE_HELP = f"One of the paper's figures: {', '.join(PAPER_FIGURES)}."
_TARGETS_HELP = "Target model; may be repeated, with tables for each. Figure 6 swaps between two."
_DATA_HELP = "Folder with gsm8k, mbpp, humaneval, alpaca, dialogsum and scitldr as .parquet, as far as needed."
_ONLY_HELP = "Blocks of the table, separated by commas, such as gsm8k,code. Default: all."
_LIMIT_HELP = f"Prompts per block; several data sets share them. [default: {LIMIT}, with --quick 16]"
_OUT_HELP = "Folder of finished runs, to resume from. [default: runs/paper-table-N or runs/paper-figure-N]"


def study_paper(
    table: Annotated[str | None, typer.Option(help=_TABLE_HELP, show_default=False)] = None,
    paper_figure: Annotated[str | None, typer.Option("--figure", help=_PAPER_FIGURE_HELP, show_default=False)] = None,
    data: Annotated[Path, typer.Option(metavar="FOLDER", help=_DATA_HELP)] = Path("data"),
    targets: Annotated[list[str] | None, typer.Option("--target", help=_TARGETS_HELP)] = None,
    drafter: Annotated[str | None, option("drafter")] = None,
    only: Annotated[str | None, typer.Option(help=_ONLY_HELP)] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds per arm. [default: 3]", min=1)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A trial: one seed, few and short prompts.")] = False,
    limit: Annotated[int | None, typer.Option(min=2, help=_LIMIT_HELP)] = None,
    max_new_tokens: Annotated[int | None, option("sampling.max_new_tokens", f"{MOST_TOKENS} [default: 48]")] = None,
    settings: Annotated[list[str] | None, set_option("Any other setting of all arms; may be repeated.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs in parallel, each in its own process.")] = 1,
    out: Annotated[Path | None, typer.Option(help=_OUT_HELP)] = None,
) -> None:
    """Measure a table or figure of the OmniDraft paper, and show its ratios next to ours.

    Tables: **1** losses on four tasks, **2** the adaptive head, **3** sizes of models, **4** size of the n-gram cache,
    **5** draft lengths and n-grams, **6** losses at two temperatures, **14** budgets of the cache, **lora** ranks of
    the adapters.

    Figures: **5** a switch of the data, **6** swaps of the target, **7** frequencies of n-grams, **8** accepted n-grams
    along the stream, **9** growth of the cache. 7 and 9 show the runs of table 4, 8 those of table 5.

    Finished runs are saved, and the same command resumes with the missing ones; give --quick a folder of its own with
    --out. Only ratios between arms can be compared: models, hardware and the definition of the rates differ.
    """
    chosen = _choose(table, paper_figure)
    given = parse_settings(settings) | overrides_of(study_paper, locals())
    prompts = limit or (QUICK["source.limit"] if quick else LIMIT)
    overrides = {**USUAL} | (QUICK if quick else {}) | given | _swap_targets(chosen, targets, prompts)
    named = targets[:1] if targets and isinstance(chosen, PaperFigure) and chosen.swaps else targets
    plans = [
        (block, _plan(block, overrides, data, prompts, named, seeds or (1 if quick else 3)))
        for block in _choose_blocks(chosen, only)
    ]
    for block, _ in plans:
        block.study.check(given)
    _report(chosen, _measure(chosen, plans, out or Path("runs", _name_folder(chosen)), jobs))


def _choose(table: str | None, paper_figure: str | None) -> PaperTable | PaperFigure:
    """Return what the options name. Raises `UsageError` unless it is one table or figure that exists."""
    if (table is None) == (paper_figure is None):
        raise UsageError("name what to measure by --table or --figure, one of them")
    named: dict[str, PaperTable | PaperFigure] = {**PAPER_TABLES} if paper_figure is None else {**PAPER_FIGURES}
    number = table or paper_figure or ""
    if number not in named:
        kind = "--table" if paper_figure is None else "--figure"
        raise UsageError(f"{kind} must be one of {', '.join(named)}, got {number}")
    return named[number]


def _name_folder(chosen: PaperTable | PaperFigure) -> str:
    return chosen.folder if isinstance(chosen, PaperFigure) else f"paper-table-{chosen.number}"


def _swap_targets(chosen: PaperTable | PaperFigure, targets: list[str] | None, prompts: int) -> dict[str, Any]:
    """Return the setting of the swaps between two targets: parts of equal length.

    Raises:
        UsageError: it needs two targets.
    """
    if not isinstance(chosen, PaperFigure) or not chosen.swaps:
        return {}
    if not targets or len(targets) != 2:
        raise UsageError(f"the paper's figure {chosen.number} swaps between two targets; name both by --target")
    parts = len(chosen.swaps)
    return {"swaps": tuple(f"{prompts * n // parts}={targets[chosen.swaps[n]]}" for n in range(1, parts))}


def _choose_blocks(chosen: PaperTable | PaperFigure, only: str | None) -> list[PaperBlock]:
    """The named blocks, in the order of the table or figure.

    Raises:
        UsageError: a name is unknown.
    """
    known = [block.name for block in chosen.blocks]
    names = [name.strip() for name in only.split(",")] if only else known
    for name in names:
        if name not in known:
            kind = "figure" if isinstance(chosen, PaperFigure) else "table"
            raise UsageError(
                f"--only must name blocks of the paper's {kind} {chosen.number} ({', '.join(known)}), got '{name}'"
            )
    return [block for block in chosen.blocks if block.name in names]


def _plan(
    block: PaperBlock, overrides: dict[str, Any], data: Path, limit: int, targets: list[str] | None, seeds: int
) -> "StudyPlan":
    from benchmarks.studies.runner import StudyPlan
    from pipeline.config.settings import Config

    files = [data / name for name in block.task.files]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise UsageError(f"--data must be a folder with {', '.join(block.task.files)}, but {missing[0]} is no file")
    sources = {"sources": tuple(map(str, files)), "source.limit": block.task.prompts_of_file(limit)}
    config = Config().with_overrides({**overrides, **sources})
    return StudyPlan(block.study, block.study.arms, config, tuple(targets or config.targets), seeds)


def _measure(
    chosen: PaperTable | PaperFigure, plans: Sequence[tuple[PaperBlock, "StudyPlan"]], folder: Path, jobs: int
) -> list["BlockResults"]:
    """Make the runs that are missing in the folder. Returns the results of all blocks."""
    from benchmarks.studies.records import StudyFile
    from benchmarks.studies.runner import run

    files = [(block, plan, StudyFile(folder / f"{block.name}.json", plan.shared_settings())) for block, plan in plans]
    try:
        for block, plan, file in files:
            LOG.info("%s, %s", chosen.title, block.title)
            run(plan, file, jobs, RunLogger(plan, file).finish_run)
    except KeyboardInterrupt:
        LOG.info("stopped; finished runs are in %s, and the same command resumes", folder)
        raise typer.Exit(130) from None
    return [_collect(*one) for one in files]


def _collect(block: PaperBlock, plan: "StudyPlan", file: Any) -> "BlockResults":
    from benchmarks.studies.paper.report import BlockResults
    from benchmarks.studies.report import results_json, results_of

    results = results_of(plan, list(file.records.values()))
    file.write(results_json(results))
    return BlockResults(block, plan, results)


def _report(chosen: PaperTable | PaperFigure, blocks: Sequence["BlockResults"]) -> None:
    """Print the results."""
    from benchmarks.studies.paper.curves import make_curve_tables
    from benchmarks.studies.paper.report import describe, make_sections
    from benchmarks.studies.report import as_rich

    if isinstance(chosen, PaperFigure):
        sections: list[Section] = [(f"drafter {blocks[0].plan.config.drafter}", make_curve_tables(chosen, blocks))]
    else:
        sections = make_sections(blocks)
    console = make_console(PIPE_COLUMNS)
    for line in describe(blocks):
        console.print(line, markup=False, highlight=False)
    for heading, tables in sections:
        console.rule(heading, align="left")
        for one in tables:
            console.print(as_rich(one))
    console.print(chosen.remark, style="dim", markup=False, highlight=False)
