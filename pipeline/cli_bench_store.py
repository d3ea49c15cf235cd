"""`omnidraft bench-store`: what the log costs and how quickly a large one answers."""

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from store.errors import RunError

_RUN_HELP = (
    "A run whose decisions are measured, may be repeated; large logs are made of the last one. By default two runs of "
    "the built-in stream are made, at temperature 0 and 1, that draft always."
)


def bench_store(
    run: Annotated[list[Path] | None, typer.Option("--run", help=_RUN_HELP, show_default=False)] = None,
    rows: Annotated[int, typer.Option(min=1, help="Decisions in the large log; 25 bytes each on disk.")] = 10_000_000,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each measurement, one after the other.")] = 5,
    scratch: Annotated[
        Path | None, typer.Option(help="Folder for logs that are made, and removed again.", show_default=False)
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables there as well.", show_default=False)] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures there.", show_default=False)
    ] = None,
) -> None:
    """Measure the log: decisions written per second, bytes by column, recipes on a large log, and compaction."""
    from pipeline import bench_store_report
    from pipeline.bench_store import make_run, measure

    for place in (markdown, json_file):
        if place and not place.parent.is_dir():
            raise RunError(f"{place} must be in a folder that exists; make {place.parent} first")
    if scratch and not scratch.is_dir():
        raise RunError(f"--scratch must be a folder that exists, got {scratch}; make it first")
    with TemporaryDirectory(prefix="omnidraft-bench-store-", dir=scratch) as folder:
        runs = run or [make_run(Path(folder) / f"temperature-{number}", float(number)) for number in (0, 1)]
        report = measure(runs, Path(folder), rows, repetitions)
    text = bench_store_report.markdown(report)
    print(text)
    if markdown:
        markdown.write_text(text + "\n", encoding="utf-8")
    if json_file:
        json_file.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
