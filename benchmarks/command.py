"""Runs one benchmark as a command: `python -m benchmarks.NAME`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.config.cli_options import PlainCommand
from pipeline.reports.log_output import LogLevel, write_log
from store.errors import OmnidraftError, UsageError

MOST_TOKENS = "Most target tokens in one completion."
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write all results to this JSON file.")]


def run(command: Callable[..., Any]) -> None:
    """Parse the arguments and run the command; an error of ours is one line and no traceback."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    app.command(cls=PlainCommand)(command)
    with write_log(LogLevel.INFO, as_json=False):
        try:
            app()
        except OmnidraftError as error:
            typer.secho(f"error: {error}", err=True, fg="red")
            sys.exit(2 if isinstance(error, UsageError) else 1)
