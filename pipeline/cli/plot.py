"""`omnidraft plot`: plots of runs."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.runs import local_run
from pipeline.config.cli_options import RunsOption
from pipeline.reports.artifacts import Module, draw
from pipeline.reports.terminal import PLOT_SUFFIXES
from store.errors import RunError, UsageError


class PlotKind(StrEnum):
    """The kinds of plots."""

    CURVE = "curve"
    TOKENS = "tokens"


MODULES: Mapping[PlotKind, Module] = {
    PlotKind.CURVE: "curve",
    PlotKind.TOKENS: "token_view",
}
_SOURCE_HELP = "A run's folder, or s3://BUCKET/PATH. [default: the newest run]"
_OUTPUT_HELP = "File to write: .png, .svg or .pdf, of tokens .html. [default: KIND.png, tokens.html]"


def plot(
    kind: Annotated[PlotKind, typer.Argument(help="What to plot.", metavar="KIND", show_default=False)],
    source: Annotated[Path | None, typer.Argument(help=_SOURCE_HELP, show_default=False)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help=_OUTPUT_HELP)] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Completions shown with tokens. [default: 12]", show_default=False)
    ] = None,
    runs: RunsOption = Path("runs"),
) -> None:
    """Plot a run, and print the name of the file.

    **curve**: acceptance along a run, with drifts and versions. **tokens**: some completions token by token, as one
    page.
    """
    file = output or Path("tokens.html" if kind is PlotKind.TOKENS else f"{kind}.png")
    suffixes = (".html",) if kind is PlotKind.TOKENS else PLOT_SUFFIXES
    if file.suffix not in suffixes:
        raise UsageError(f"--output of a plot of kind {kind} must end in {' or '.join(suffixes)}, got '{file}'")
    if prompts and kind is not PlotKind.TOKENS:
        raise UsageError(f"--prompts is for plots of kind {PlotKind.TOKENS}, got kind {kind}; leave it out")
    options = ["--prompts", str(prompts)] if prompts else []
    if reason := draw(MODULES[kind], str(local_run(source, runs)), str(file), *options):
        raise RunError(reason.removeprefix("omnidraft: "))
    print(file)
