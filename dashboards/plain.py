"""Tables of the log as a browser takes them."""

from typing import TYPE_CHECKING, Any

from store.plain import plain as plain_value

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
    """`value` in the types of JSON, large integers as text."""
    return plain_value(value, EXACT)
