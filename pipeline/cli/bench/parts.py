"""The commands `bench-scale`, `bench-translate` and `bench-store`, which measure parts of the pipeline."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.config.cli_options import (
    DeviceOption,
    DrafterOption,
    DtypeOption,
    JsonOption,
    MarkdownOption,
    MostTokensOption,
    PrintJsonOption,
    SetOption,
    TargetOption,
    TemplateOption,
    TextOption,
    TextTemplateOption,
    ThreadsOption,
    argument,
    option,
    overrides_of,
    parse_settings,
)
from pipeline.reports.artifacts import draw_results
from pipeline.reports.tables import Table
from pipeline.reports.terminal import (
    RESULT_COLUMNS,
    make_console,
    require_file,
    require_folders,
    require_plot_file,
    show_or_json,
    status,
)
from store.errors import RunError, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

    from pipeline.bench.scaling.curves import Curve, Point
    from pipeline.bench.scaling.scaling import ScalingReport
    from pipeline.bench.scaling.translate import TranslationReport

CURVES = ("batch", "context", "cache", "vocabulary")
_RUN_HELP = (
    "Folder of a run whose decisions are measured; may be repeated. Large logs are made from the last one. Default: "
    "two new runs of the built-in stream, at temperatures 0 and 1, that always draft."
)


def bench_scale(
    sources: Annotated[list[str] | None, argument("sources", "Prompt sources, as for `replay`.", "PROMPTS")] = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    threads: ThreadsOption = None,
    max_new_tokens: MostTokensOption = 32,
    temperature: Annotated[float, option("sampling.temperature", "Temperature of the target; 0 is greedy.")] = 0.0,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    template: TemplateOption = None,
    settings: SetOption = None,
    only: Annotated[str, typer.Option(help="Curves to measure, comma-separated.")] = ",".join(CURVES),
    quick: Annotated[bool, typer.Option("--quick", help="Two small sizes per curve, measured twice: a trial.")] = False,
    json_file: JsonOption = None,
    picture: Annotated[Path | None, typer.Option(help="Write a plot of the curves: .png, .svg or .pdf.")] = None,
) -> None:
    """Measure cost as work grows: tokens per second by batch size, forward passes by context length, translation of a
    block by active n-grams, and the work of a block outside the forward passes by vocabulary size.

    Models with rotary positions are also measured at contexts longer than they were made for: the cost is that of a
    model made for that length, the text is not.
    """
    names = _names(only)
    require_file("--json", json_file)
    require_file("--picture", picture)
    require_plot_file(picture)
    given = overrides_of(bench_scale, locals())
    report = _run(given | {"publish.enabled": False} | parse_settings(settings), names, quick)
    for curve in report.curves.values():
        _print(make_console(RESULT_COLUMNS), curve)
    _write(json.dumps(report.to_json(), indent=2, allow_nan=False, ensure_ascii=False) + "\n", json_file, picture)


def _write(results: str, json_file: Path | None, plot: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(results, encoding="utf-8")
    if plot is not None:
        draw_results("scale", results, plot)


def _names(text: str) -> list[str]:
    """Parse comma-separated names of curves, each once.

    Raises:
        UsageError: a name is unknown.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in CURVES:
            raise UsageError(f"--only must name curves, got '{name}'; there are {', '.join(CURVES)}")
    return names


def _run(settings: Mapping[str, object], names: list[str], quick: bool) -> "ScalingReport":
    from pipeline.bench.scaling.scaling import FULL, QUICK, run
    from pipeline.config.settings import Config

    config = Config().with_overrides(settings)
    with status() as progress:
        return run(config, names, QUICK if quick else FULL, progress)


def _print(console: "Console", curve: "Curve") -> None:
    console.print(_table(curve))
    console.print(f"\n{curve.sentence}\n", markup=False, highlight=False)


def _table(curve: "Curve") -> "RichTable":
    """One row per size with medians and quartiles."""
    heads = (curve.size, *(line.name for line in curve.lines), *curve.also)
    found = {(line.name, point.size): point for line in curve.lines for point in line.points}
    rows = []
    for size in sorted({size for _, size in found}):
        points = [found.get((line.name, size)) for line in curve.lines]
        cells = [_cell(point) if point else "-" for point in points]
        rows.append((f"{size:,}", *cells, *(f"{sizes[size]:,}" for sizes in curve.also.values())))
    table = Table(heads, rows, f"{curve.title}, {curve.unit}: median (quartiles)").rich()
    table.columns[0].justify = "right"
    return table


def _cell(point: "Point") -> str:
    from pipeline.bench.scaling.curves import format_number

    return f"{format_number(point.median)} ({format_number(point.low)}-{format_number(point.high)})"


def bench_translate(
    target: Annotated[str | None, argument("targets", "Tokenizer of the target.")] = None,
    drafter: Annotated[str | None, argument("drafter", "Tokenizer of the drafter.")] = None,
    texts: TextOption = None,
    template: TextTemplateOption = None,
    blocks: Annotated[int, typer.Option(min=1, help="Maximum number of blocks timed per context length.")] = 400,
    as_json: PrintJsonOption = False,
) -> None:
    """Measure the time to translate one block: along the trie, and by tokenising the context again as in the paper.

    Without arguments the built-in pair is measured. Only tokenizers are loaded, no weights.
    """
    from pipeline.config.settings import Config

    config = Config().with_overrides(overrides_of(bench_translate, locals()))
    with status("timing blocks"):
        from pipeline.bench.scaling.translate import CHARACTERS_OF_CONTEXT, CHARACTERS_PER_BLOCK, long_text, measure
        from pipeline.reports.vocab_report import load_pair, read_prompts

        text = long_text(read_prompts(config), CHARACTERS_PER_BLOCK * blocks + CHARACTERS_OF_CONTEXT)
        found = measure(*load_pair(config), text, blocks)
    show_or_json(found.to_json(), as_json, lambda console: _print_costs(console, found))


def _print_costs(console: "Console", found: "TranslationReport") -> None:
    from pipeline.bench.scaling.translate import DRAFTED, TARGET_STEP

    console.print(f"target  {found.target}, {found.target_size:,} tokens", markup=False, highlight=False)
    console.print(f"drafter {found.drafter}, {found.drafter_size:,} tokens\n", markup=False, highlight=False)
    heads = "way", "context", "blocks", "median", "95 %", f"share of {TARGET_STEP * 1e3:.0f} ms"
    rows = []
    for cost in found.costs:
        cells = f"{cost.median * 1e6:,.0f}", f"{cost.high * 1e6:,.0f}", f"{cost.share:.2%}"
        rows.append((cost.way, f"{cost.context:,}", f"{cost.blocks:,}", *cells))
    console.print(Table(heads, rows, f"Translating one block of {DRAFTED} pieces, microseconds").rich())
    console.print(
        f"\nFor comparison, verification's sums over {found.target_size:,} probabilities: {found.levels * 1e6:,.0f} "
        "microseconds per block.",
        highlight=False,
    )


def bench_store(
    run: Annotated[list[Path] | None, typer.Option("--run", help=_RUN_HELP)] = None,
    rows: Annotated[int, typer.Option(min=1, help="Decisions in the large log, 25 bytes each on disk.")] = 10_000_000,
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions of each measurement.")] = 5,
    scratch: Annotated[Path | None, typer.Option(help="Folder for temporary logs.")] = None,
    markdown: MarkdownOption = None,
    json_file: JsonOption = None,
) -> None:
    """Measure the log: decisions written per second, bytes by column, recipes on a large log, compaction."""
    from pipeline.bench.storage import report as bench_store_report
    from pipeline.bench.storage.benchmark import make_run, measure

    require_folders(markdown, json_file)
    if scratch and not scratch.is_dir():
        raise RunError(f"--scratch must be an existing folder, got {scratch}; create it first")
    with TemporaryDirectory(prefix="omnidraft-bench-store-", dir=scratch) as folder:
        runs = run or [make_run(Path(folder) / f"temperature-{number}", float(number)) for number in (0, 1)]
        report = measure(runs, Path(folder), rows, repetitions)
    text = bench_store_report.markdown(report)
    print(text)
    if markdown:
        markdown.write_text(text + "\n", encoding="utf-8")
    if json_file:
        json_file.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
