"""Convert values of the log to types of JSON, and texts to SQL strings."""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any


def to_json_value(value: Any, exact: int | None = None) -> Any:
    """Convert `value` to types of JSON: bytes to hexadecimal, NaN and infinity to null, other types to text.

    Args:
        value: a value from DuckDB or Arrow.
        exact: the largest integer that the reader represents exactly; larger ones become text.
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


def quote_text(text: str) -> str:
    """Return `text` as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"
