"""Rows of a query in every form in which they are printed: a table, one value a line, CSV, JSON."""

import csv
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pipeline.reports.terminal import make_console, to_printable, width_of_output
from store.errors import QueryError
from store.query.exports import list_rows, list_values, to_json_value

if TYPE_CHECKING:
    import pyarrow as pa

LOG = logging.getLogger("omnidraft.cli")

SHOWN_ROWS = 200  # more are for a file, not for eyes
CELL_CHARACTERS = 60
PIPE_COLUMNS = 1000  # wide enough that a table in a pipe is not folded
MORE = "…"  # in place of columns that are left out
VERTICAL_ROWS = 8  # up to so many rows, what is too wide for a table is printed one value a line
NARROW = 16  # characters to which a column of text is folded where a table is too wide


class RowFormat(StrEnum):
    """How rows are printed."""

    TABLE = "table"
    VERTICAL = "vertical"
    CSV = "csv"
    JSON = "json"

    @property
    def row_limit(self) -> int | None:
        """Number of rows that are printed; None for all."""
        return SHOWN_ROWS if self in (RowFormat.TABLE, RowFormat.VERTICAL) else None


def print_rows(rows: "pa.Table", output: RowFormat) -> None:
    """Print rows. More rows than the format's limit are left out with a warning."""
    match output:
        case RowFormat.TABLE:
            _print_table(rows)
        case RowFormat.VERTICAL:
            _print_vertically(rows)
        case RowFormat.CSV:
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow(rows.schema.names)
            for values in list_rows(rows):
                writer.writerow([_json(value) if isinstance(value, list | dict) else value for value in values])
        case RowFormat.JSON:
            print("[" + ",\n ".join(map(_json, to_objects(rows))) + "]")
    if output.row_limit and rows.num_rows > output.row_limit:
        LOG.warning("there are more rows than these %d; --format csv or json prints all", output.row_limit)


def choose_columns(widths: Sequence[int], most: int) -> tuple[int, int]:
    """Return how many columns from the left and how many from the right fit into a table with the others left out.

    >>> choose_columns([5, 5, 5], 25), choose_columns([5, 5, 5], 24), choose_columns([90, 5, 5], 24)
    ((3, 0), (1, 1), (1, 0))
    """
    if 1 + sum(width + 3 for width in widths) <= most:
        return len(widths), 0
    free = most - 1 - (len(MORE) + 3) - (widths[0] + 3)
    left, right = 1, 0
    while left + right < len(widths) - 1:
        number = left if left <= right else len(widths) - 1 - right
        free -= widths[number] + 3
        if free < 0:
            break
        left, right = (left + 1, right) if left <= right else (left, right + 1)
    return left, right


def _print_table(rows: "pa.Table") -> None:
    """Print a table that fits the terminal: folded, few rows one value a line, many without some columns."""
    shown = rows.slice(0, SHOWN_ROWS).columns
    columns = [_Column.from_result(field, column) for field, column in zip(rows.schema, shown, strict=True)]
    count, most = min(rows.num_rows, SHOWN_ROWS), width_of_output()
    narrow = [one.narrow() for one in columns]
    if not columns or not most or _fit(columns, most):
        _print_columns(columns, count)
    elif _fit(narrow, most):
        _print_columns(narrow, count)
    elif count <= VERTICAL_ROWS:
        _print_vertically(rows)
    else:  # columns with one value in all rows are left out, and then those in the middle
        kept = [one for one in narrow if len(set(one.cells)) > 1] or narrow
        left, right = choose_columns([one.width for one in kept], most)
        cut = [_Column(MORE, [MORE] * count, is_number=False)] if left + right < len(kept) else []
        _print_columns([*kept[:left], *cut, *kept[len(kept) - right :]], count)
        LOG.info("%d of %d columns fit; --format vertical shows all", left + right, len(columns))


def _print_columns(columns: "Sequence[_Column]", count: int) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for one in columns:
        width = one.width if one.is_narrow else None
        table.add_column(Text(one.head), justify="right" if one.is_number else "left", overflow="fold", width=width)
    for number in range(count):
        table.add_row(*(Text(one.cells[number]) for one in columns))
    make_console(PIPE_COLUMNS).print(table)


@dataclass(frozen=True)
class _Column:
    """A column of a printed table: its heading, its cells, and whether it is folded to fewer characters."""

    head: str
    cells: Sequence[str]
    is_number: bool
    is_narrow: bool = False

    @classmethod
    def from_result(cls, field: "pa.Field", values: "pa.ChunkedArray") -> "_Column":
        """Make a column of a query's result."""
        is_number = str(field.type).startswith(("int", "uint", "float", "double", "halffloat", "decimal"))
        return cls(field.name, [*map(_cell, list_values(values))], is_number)

    @property
    def width(self) -> int:
        """Characters that the column takes, without the frame."""
        from rich.cells import cell_len

        cells, head = max(map(cell_len, self.cells), default=0), max(map(cell_len, self.head.split("\n")))
        return max(head, min(cells, NARROW) if self.is_narrow and not self.is_number else cells)

    def narrow(self) -> "_Column":
        """Fold the heading at its underscores, and a text to `NARROW` characters."""
        return replace(self, head=self.head.replace("_", "_\n"), is_narrow=True)


def _fit(columns: Sequence[_Column], most: int) -> bool:
    return choose_columns([one.width for one in columns], most)[0] == len(columns)


def _print_vertically(rows: "pa.Table") -> None:
    """Print one value a line, below the number of its row."""
    names = rows.schema.names
    width = max(map(len, names), default=0)
    columns = map(list_values, rows.slice(0, SHOWN_ROWS).columns)
    for number, values in enumerate(zip(*columns, strict=True), 1):
        print(f"row {number}")
        for name, value in zip(names, values, strict=True):
            print(f"  {name:<{width}}  {_to_line(value)}".rstrip())


def _cell(value: Any) -> str:
    """One line of at most `CELL_CHARACTERS`."""
    line = _to_line(value)
    return line if len(line) <= CELL_CHARACTERS else line[: CELL_CHARACTERS - 1] + "…"


def _to_line(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if value and abs(value) < 1e-4 else f"{value:.4f}"
    if isinstance(value, list):
        return f"[{', '.join(map(_to_line, value))}]"
    text = to_printable(value if isinstance(value, str) else str(to_json_value(value)))
    return text if text == text.strip() else f"“{text}”"  # a token may be a space


def to_objects(rows: "pa.Table") -> list[dict[str, Any]]:
    """Convert rows to JSON objects."""
    names = rows.schema.names
    if len(set(names)) != len(names):
        raise QueryError(f"columns must have different names for json, got {', '.join(names)}; give them aliases")
    return [dict(zip(names, values, strict=True)) for values in list_rows(rows)]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
