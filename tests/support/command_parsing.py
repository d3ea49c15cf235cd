"""Parses command lines of `omnidraft` without running them."""

from collections.abc import Sequence

import typer
from typer import Context

from pipeline.cli.app import app


def parse_command(words: Sequence[str]) -> None:
    """Parse the words after `omnidraft`. Raises KeyError for an unknown command, and click's errors for options."""
    command, rest = typer.main.get_command(app), list(words)
    while rest and hasattr(command, "commands"):
        rest = command.make_parser(Context(command)).parse_args(rest)[1]  # without the options of all commands
        command = command.commands[rest.pop(0)]
    command.make_context("omnidraft", rest)
