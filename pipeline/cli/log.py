"""`omnidraft sql`, `check` and `compact`: query, verify and compact the log of a run. None of them needs torch."""

import csv
import json
import logging
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.config.cli_options import RunOption, RunsOption
from pipeline.reports.terminal import make_console
from store.errors import QueryError, RunError
from store.query.json_values import to_json_value

if TYPE_CHECKING:
    import pyarrow as pa

LOG = logging.getLogger("omnidraft.cli")

TABLE_ROWS = 200  # more are for a file, not for eyes
CELL_CHARACTERS = 60
PIPE_COLUMNS = 1000  # wide enough that a table in a pipe is not folded


class RowFormat(StrEnum):
    """How rows are printed."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


SkipOption = Annotated[
    bool, typer.Option("--skip-damaged", help="Read every file's digest and leave out those that were changed.")
]


def sql(
    query: Annotated[str | None, typer.Argument(help="One SELECT statement.", show_default=False)] = None,
    run: RunOption = None,
    runs: RunsOption = Path("runs"),
    output: Annotated[RowFormat, typer.Option("--format", help="How to print the rows.")] = RowFormat.TABLE,
    recipe: Annotated[str | None, typer.Option("--recipe", help="A named query.", show_default=False)] = None,
    skip_damaged: SkipOption = False,
) -> None:
    """Query the log in SQL: one run, or all below a folder. Without a query, list the views and the recipes."""
    from store.query.log_reader import LogReader, run_folders

    if query is not None and recipe is not None:
        raise QueryError("there must be a query or a --recipe, got both; leave one out")
    if query is None and recipe is None:
        _print_catalog()
        return
    most = TABLE_ROWS + 1 if output is RowFormat.TABLE else None
    with LogReader([_local(run)] if run else run_folders(runs), skip_damaged=skip_damaged) as log:
        for path in log.damaged:
            LOG.warning("%s is not as it was written; left out", path)
        rows = log.select(query, most) if query is not None else log.recipe(str(recipe), most)
    _PRINTERS[output](rows)


def check(run: RunOption = None, runs: RunsOption = Path("runs")) -> None:
    """Decide every judged token again from its own row, count all again, and compare files with their digests.

    Exit status 1 if anything disagrees. What is damaged is named, and the rest is looked at all the same.
    """
    from store.query.log_reader import LogReader

    folder = _local(run or _latest_run(runs))
    with LogReader([folder], skip_damaged=True) as log:
        for path in log.damaged:
            LOG.warning("%s is not as it was written", path)
        found, changed = log.check(), len(log.damaged)
    for wrong in (found.mismatches, found.miscounts):
        if wrong.num_rows:
            _print_table(wrong)
    mismatches, miscounts = found.mismatches.num_rows, found.miscounts.num_rows
    print(
        f"{folder}: derived {found.judged:,} judged decisions again (of {found.decisions:,} in the log): "
        f"{_plural(mismatches, 'mismatch', 'es')}, {_plural(miscounts, 'wrong count')}, "
        f"{_plural(changed, 'changed file')}"
    )
    if mismatches or miscounts or changed:
        raise typer.Exit(1)


def compact(
    run: RunOption = None,
    runs: RunsOption = Path("runs"),
    grace: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds for which replaced files stay for readers.")
    ] = 3600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, without doing it.")] = False,
) -> None:
    """Join small parts of one run's log, or of all below a folder; safe while a run writes and others read."""
    from store.log.compaction import compact as join_parts
    from store.object_store.uri import uri_of
    from store.query.log_reader import run_folders

    if run and uri_of(run):
        raise RunError(f"a log that is compacted must be in a folder, got {uri_of(run)}; leave it as it is")
    for folder in [run] if run else run_folders(runs):
        done = join_parts(folder, grace=grace, dry_run=dry_run)
        for path in done.damaged:
            LOG.warning("%s is not as it was written; left as it is", path)
        size = "" if done.bytes_after is None else f", {done.bytes_before:,} to {done.bytes_after:,} bytes"
        became = "parts would become" if dry_run else "parts became"
        removed = _plural(done.removed, "replaced file")
        print(f"{folder}: {done.parts_before:,} {became} {done.parts_after:,}{size}; {removed} removed")


def _local(run: Path) -> Path:
    """A run's folder; of one on an object store what was fetched of it."""
    from store.object_store.remote_run import local_copy

    return local_copy(run)


def _plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def _latest_run(runs: Path) -> Path:
    from store.log.partitions import committed_at
    from store.query.log_reader import run_folders

    return max(run_folders(runs), key=committed_at)


def _print_catalog() -> None:
    """Print the views and the recipes, which are the same for every run."""
    from rich.table import Table
    from rich.text import Text

    from store.query.log_reader import VIEWS, LogReader, recipes

    views = Table("view", "columns", title="Views", title_justify="left")
    with LogReader([]) as log:
        for view in VIEWS:
            views.add_row(view, Text(", ".join(name for name, _ in log.columns(view))))
    named = Table("recipe", "what it shows", title="Recipes", title_justify="left")
    for recipe in recipes().values():
        named.add_row(recipe.name, Text(recipe.description))
    make_console(PIPE_COLUMNS).print(views, named)
    print(
        'omnidraft sql --recipe NAME, or omnidraft sql "SELECT ..."; DESCRIBE view shows the types. '
        'offset is a word of SQL: write "offset" or prompts.offset. text_of(bytes) decodes a token.'
    )


def _print_table(rows: "pa.Table") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for field in rows.schema:
        table.add_column(Text(field.name), justify="right" if _is_number(field.type) else "left")
    columns = map(_values, rows.slice(0, TABLE_ROWS).columns)
    for values in zip(*columns, strict=True):
        table.add_row(*(Text(_cell(value)) for value in values))
    make_console(PIPE_COLUMNS).print(table)
    if rows.num_rows > TABLE_ROWS:
        LOG.warning("there are more rows than these %d; --format csv or json prints all", TABLE_ROWS)


def _is_number(arrow_type: "pa.DataType") -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type) or pa.types.is_decimal(arrow_type))


def _cell(value: Any) -> str:
    """One line of at most `CELL_CHARACTERS`, floats to four digits."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if value and abs(value) < 1e-4 else f"{value:.4f}"
    if isinstance(value, list):
        return _trim(f"[{', '.join(map(_cell, value))}]")
    return _trim(value if isinstance(value, str) else str(to_json_value(value)))


def _trim(text: str) -> str:
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return line if len(line) <= CELL_CHARACTERS else line[: CELL_CHARACTERS - 1] + "…"


def _print_csv(rows: "pa.Table") -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(rows.schema.names)
    for values in _plain_rows(rows):
        writer.writerow([_json(value) if isinstance(value, list | dict) else value for value in values])


def _print_json(rows: "pa.Table") -> None:
    """One array, one object per line."""
    names = rows.schema.names
    if len(set(names)) != len(names):
        raise QueryError(f"columns must have different names for json, got {', '.join(names)}; give them aliases")
    lines = (_json(dict(zip(names, values, strict=True))) for values in _plain_rows(rows))
    print("[" + ",\n ".join(lines) + "]")


def _plain_rows(rows: "pa.Table") -> Iterable[list[Any]]:
    for batch in rows.to_batches():
        for values in zip(*map(_values, batch.columns), strict=True):
            yield list(map(to_json_value, values))


def _values(column: "pa.Array | pa.ChunkedArray") -> list[Any]:
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError) as error:
        raise QueryError(
            "dates must be within years 1 to 9999, and times whole microseconds, to be printed, but a value is not "
            f"({error}); cast it to VARCHAR"
        ) from error


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


_PRINTERS = {RowFormat.TABLE: _print_table, RowFormat.CSV: _print_csv, RowFormat.JSON: _print_json}
