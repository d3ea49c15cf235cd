"""Values of the log in the types of JSON, and texts as SQL writes them."""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any


def plain(value: Any, exact: int | None = None) -> Any:
    """`value` in the types of JSON: bytes in hexadecimal, NaN and infinity as null, what JSON lacks as text.

    Args:
        value: as DuckDB and Arrow give it.
        exact: the largest integer that the reader can tell from its neighbours; those beyond become text.
    """
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):  # DuckDB's type of a sum of integers and of a literal such as 1.5
        value = int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, list | tuple):
        return [plain(inner, exact) for inner in value]
    if isinstance(value, Mapping):
        return {str(key): plain(inner, exact) for key, inner in value.items()}
    if isinstance(value, int) and exact is not None and abs(value) > exact:
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)


def quoted(text: str) -> str:
    """`text` as a string of SQL."""
    return "'" + text.replace("'", "''") + "'"
