"""What the commands over registered versions share: their options, and tables that no server can disturb."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from store.errors import UsageError

MODEL = "omnidraft-drafter"
PIPE_COLUMNS = 200  # wide enough that a table in a pipe is not folded


class Format(StrEnum):
    """How something is printed."""

    TABLE = "table"
    JSON = "json"


Number = Annotated[int, typer.Argument(metavar="N", help="A version's number in the list.", show_default=False)]
UriOption = Annotated[
    str | None, typer.Option("--mlflow-uri", help="Another MLflow store or server.", show_default=False)
]
RunsOption = Annotated[Path, typer.Option("--runs", help="A folder of runs; its mlflow.db is the store.")]
NameOption = Annotated[str, typer.Option("--name", help="The registered model.")]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print.")]


def store_of(mlflow_uri: str | None, runs: Path) -> str:
    """The URI of the store that the options name."""
    from store.registry import default_uri

    return mlflow_uri or default_uri(runs)


@contextmanager
def new_folder(named: Path) -> Iterator[Path]:
    """A folder, links followed, in the place of which another one can be put while the block runs.

    Raises:
        UsageError: it holds files or is where the command runs, or the block cannot write it.
    """
    try:
        folder = named.resolve()
        if folder == Path.cwd().resolve():
            raise UsageError(f"a new folder must be named, but {named} is the one that you are in; name one below it")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"a new or empty folder must be named, but {named} holds files; name another")
        yield folder
    except OSError as error:
        raise UsageError(
            f"{named} must be a folder that can be made and written: {error.strerror or error}; name another"
        ) from error


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows below their heads, and an empty line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*heads, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)
    console.print(table, "")


def printable(value: object) -> str:
    """One printable line; what a server sends must not steer the terminal."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "" if value is None else str(value)
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
