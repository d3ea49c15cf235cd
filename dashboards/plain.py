"""Rows of the log in the types of JSON, and names and texts as SQL writes them."""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

EXACT = 2**53  # the largest integer up to which a browser counts


def rows(table: "pa.Table") -> list[dict[str, Any]]:
    """One object per row; columns of the same name but for the last are lost."""
    return [{name: plain(value) for name, value in row.items()} for row in table.to_pylist()]


def columns(table: "pa.Table") -> dict[str, list[Any]]:
    """One list per column: smaller than rows, and what a chart takes."""
    return {name: [plain(value) for value in values] for name, values in table.to_pydict().items()}


def plain(value: Any) -> Any:
    """`value` in the types of JSON: bytes in hexadecimal, NaN and infinity as null, what JSON lacks as text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):  # DuckDB's type of a sum of integers and of a literal such as 1.5
        value = int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, int) and abs(value) > EXACT:
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)


def literal(text: str) -> str:
    """`text` as a string of SQL."""
    return "'" + text.replace("'", "''") + "'"
