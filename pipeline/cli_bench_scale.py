"""`omnidraft bench-scale`: how cost grows with the batch, the context, the n-grams and the vocabularies."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli_options import parsed
from pipeline.pictures import draw
from store.errors import RunError, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pipeline.bench_scale import Report
    from pipeline.bench_scale_curves import Curve, Point

CURVES = ("batch", "context", "cache", "vocabulary")
PIPE_COLUMNS = 120  # a table in a pipe is not folded to a terminal that is not there
PICTURES = (".png", ".svg", ".pdf")

Sources = Annotated[
    list[str] | None, typer.Argument(help="Prompt sources, as for `replay`.", metavar="PROMPTS", show_default=False)
]
Picture = Annotated[Path | None, typer.Option(help="Draw the curves there: .png, .svg or .pdf.", show_default=False)]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting.", show_default=False)
]


def bench_scale(
    sources: Sources = None,
    target: Annotated[str | None, typer.Option(help="Target model.", show_default=False)] = None,
    drafter: Annotated[str | None, typer.Option(help="Drafter.", show_default=False)] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads for tensors.", show_default=False)] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most target tokens in one completion.")] = 32,
    temperature: Annotated[float, typer.Option(help="Temperature of the completions; 0 is greedy.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "float32",
    device: Annotated[str, typer.Option(help="Torch device; auto takes the best.")] = "auto",
    template: Annotated[str | None, typer.Option(help="Text made from a row's columns.", show_default=False)] = None,
    settings: Settings = None,
    only: Annotated[str, typer.Option(help="Which curves, with commas between.")] = ",".join(CURVES),
    quick: Annotated[bool, typer.Option("--quick", help="Two small sizes each, twice: to see that it works.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
    picture: Picture = None,
) -> None:
    """Measure cost as work grows: tokens per second by batch, forward passes by context length, a block's translation
    by active n-grams, and its work outside the forward passes by vocabulary.

    Contexts that are longer than a model was made for are measured all the same where its positions are rotary: the
    cost is the same, the text would not be.
    """
    names = _names(only)
    _require_places(json_file, picture)
    given: dict[str, Any] = {
        "sources": tuple(sources) if sources else None,
        "targets": (target,) if target else None,
        "drafter": drafter,
        "threads": threads,
        "source.template": template,
    }
    fixed = {"dtype": dtype, "device": device, "publish.enabled": False}
    sampling = {"sampling.max_new_tokens": max_new_tokens, "sampling.temperature": temperature}
    known = {key: value for key, value in given.items() if value is not None}
    report = _run(fixed | sampling | known | parsed(settings or []), names, quick)
    _write(report, json_file, picture)


def _names(text: str) -> list[str]:
    """The names of curves in a list with commas, each once."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in CURVES:
            raise UsageError(f"--only must name curves, got '{name}'; there are {', '.join(CURVES)}")
    return names


def _require_places(json_file: Path | None, picture: Path | None) -> None:
    for flag, path in (("--json", json_file), ("--picture", picture)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{flag} must name a file in a folder that exists, got '{path}'")
    if picture is not None and picture.suffix not in PICTURES:
        raise UsageError(f"--picture must end in one of {', '.join(PICTURES)}, got '{picture}'")


def _run(settings: Mapping[str, object], names: list[str], quick: bool) -> "Report":
    from pipeline.bench_scale import FULL, QUICK, run
    from pipeline.config import Config

    config = Config().with_overrides(settings)
    with _status() as progress:
        return run(config, names, QUICK if quick else FULL, progress)


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """A line on standard error while it runs; nothing of it stays."""
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


def _write(report: "Report", json_file: Path | None, picture: Path | None) -> None:
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)
    for curve in report.curves.values():
        _print(console, curve)
    text = json.dumps(report.to_json(), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    if json_file is not None:
        json_file.write_text(text, encoding="utf-8")
    if picture is not None:
        _draw(text, picture)


def _draw(text: str, picture: Path) -> None:
    """Raises:
    RunError: it could not be drawn.
    """
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "scale.json"
        file.write_text(text, encoding="utf-8")
        reason = draw("scale", str(file), str(picture))
    if reason:
        raise RunError(f"the picture {picture} must be writable: {reason}; the figures are in the file of --json")


def _print(console: "Console", curve: "Curve") -> None:
    console.print(_table(curve))
    console.print(f"\n{curve.sentence}\n", markup=False, highlight=False)


def _table(curve: "Curve") -> "Table":
    """A row per size; medians, and what half of the measurements lie between."""
    from rich import box
    from rich.table import Table

    title = f"{curve.title}, {curve.unit}: median (quartiles)"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)
    for name in (curve.size, *(line.name for line in curve.lines), *curve.also):
        table.add_column(name, justify="right", overflow="fold")
    found = {(line.name, point.size): point for line in curve.lines for point in line.points}
    for size in sorted({size for _, size in found}):
        points = [found.get((line.name, size)) for line in curve.lines]
        cells = [_cell(point) if point else "-" for point in points]
        table.add_row(f"{size:,}", *cells, *(f"{sizes[size]:,}" for sizes in curve.also.values()))
    return table


def _cell(point: "Point") -> str:
    from pipeline.bench_scale_curves import figure

    return f"{figure(point.median)} ({figure(point.low)}-{figure(point.high)})"
