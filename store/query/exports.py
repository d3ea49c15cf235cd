"""The rows of a query as values of JSON, or as a file: CSV, JSON or Parquet."""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from store.errors import QueryError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

MEDIA_TYPES = {
    "csv": "text/csv; charset=utf-8",
    "json": "application/json",
    "parquet": "application/vnd.apache.parquet",
}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # beginnings of texts that a spreadsheet would compute


def to_json_value(value: Any, exact: int | None = None) -> Any:
    """Convert `value` to types of JSON: bytes to hexadecimal, NaN and infinity to null, other types to text.

    `exact`: the largest integer that the reader represents exactly; larger ones become text.
    """
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):  # DuckDB's type of a sum of integers and of a literal such as 1.5
        value = int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, list | tuple):
        return [to_json_value(inner, exact) for inner in value]
    if isinstance(value, Mapping):
        return {str(key): to_json_value(inner, exact) for key, inner in value.items()}
    if isinstance(value, int) and exact is not None and abs(value) > exact:
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)


def list_values(column: "pa.Array | pa.ChunkedArray") -> list[Any]:
    """Return the values of a column. Raises QueryError for a date or a time that Python cannot represent."""
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError) as error:
        raise QueryError(
            f"dates must be within years 1 to 9999, and times whole microseconds, but a value is not ({error}); "
            "cast it to VARCHAR"
        ) from error


def list_rows(table: "pa.Table", exact: int | None = None) -> Iterator[list[Any]]:
    """Yield the values of each row, converted by `to_json_value`. Raises as `list_values`."""
    for batch in table.to_batches():
        for values in zip(*map(list_values, batch.columns), strict=True):
            yield [to_json_value(value, exact) for value in values]


def export_rows(table: "pa.Table", kind: str) -> bytes:
    """Return the content of a file with the rows of a table; `kind` is a key of `MEDIA_TYPES`.

    CSV follows RFC 4180; a text that a spreadsheet would take for a formula begins with an apostrophe there. JSON is a
    list of objects. Both have bytes as hex; of columns with the same name JSON keeps the last, and Parquet allows none.
    """
    if kind not in MEDIA_TYPES:
        raise UsageError(f"rows can be saved as {', '.join(MEDIA_TYPES)}; got {kind!r}")
    if kind == "parquet":
        return _to_parquet(table)
    if kind == "json":
        rows = [dict(zip(table.schema.names, values, strict=True)) for values in list_rows(table)]
        return json.dumps(rows, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(map(_csv_field, table.schema.names))
    writer.writerows(map(_csv_field, row) for row in list_rows(table))
    return text.getvalue().encode(errors="backslashreplace")


def _to_parquet(table: "pa.Table") -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = table.schema.names
    if len(set(names)) < len(names):
        raise UsageError(f"columns of a Parquet file must have different names, got {', '.join(names)}; use AS")
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue())


def _csv_field(value: Any) -> Any:
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
