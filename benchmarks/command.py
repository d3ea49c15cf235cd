"""Runs one benchmark as a command: `python -m benchmarks.NAME`."""

import re
import shlex
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
MarkdownOption = Annotated[Path | None, typer.Option(help="Also write the tables to this Markdown file.")]


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


def typed_command() -> str:
    """Return the typed command, without the options that name output files."""
    name = str(sys.modules["__main__"].__spec__ and sys.modules["__main__"].__spec__.name).removesuffix(".__main__")
    typed = shlex.join(["python", "-m", name, *sys.argv[1:]])
    return re.sub(r" --(out|markdown)[ =]('[^']*'|\S+)", "", typed)


def command_block(command: str, width: int = 100) -> str:
    """Return a command as a block of code in Markdown, whose lines are continued before options.

    >>> print(command_block("python -m benchmarks.speed --batch 8 --seed 1", width=47))
        python -m benchmarks.speed --batch 8 \\
            --seed 1
    """
    begin, *options = re.split(r" (?=--)", command)
    lines = [f"    {begin}"]
    for option in options:
        if len(f"{lines[-1]} {option} \\") <= width:
            lines[-1] += f" {option}"
        else:
            lines.append(f"        {option}")
    return " \\\n".join(lines)
