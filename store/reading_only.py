"""What a query may consist of: reading, and functions that read nothing but their arguments and the catalog."""

import json
import re
from collections.abc import Iterator
from typing import Any

_EXPLAIN = re.compile(r"\s*explain\s+(?:analyze\s+)?(?P<explained>.*)", re.IGNORECASE | re.DOTALL)
_QUERY_NODES = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
# All other table functions read files, settings or statements in strings.
_TABLE_FUNCTIONS = frozenset(
    {
        "duckdb_columns",
        "duckdb_functions",
        "duckdb_keywords",
        "duckdb_views",
        "generate_series",
        "json_each",
        "json_tree",
        "pragma_table_info",
        "range",
        "repeat",
        "unnest",
    }
)


def explained_query(query: str) -> str | None:
    """What a statement that starts with EXPLAIN explains; None for any other."""
    found = _EXPLAIN.match(query)
    return found["explained"] if found else None


def foreign_parts(serialized: str) -> list[str]:
    """What a SELECT contains beyond queries and harmless table functions.

    Args:
        serialized: its parse tree, from DuckDB's `json_serialize_sql`.

    Neither the kind of statement nor the allowed paths are enough: DuckDB 2 takes `WITH x AS (COPY ... TO ...)` for
    a SELECT, and a committed part is a path that it would then overwrite.
    """
    try:
        nodes = list(_objects(json.loads(serialized)))
    except RecursionError:
        return ["an expression that is nested too deeply"]
    kinds = {node["type"] for node in nodes if str(node.get("type")).endswith("_NODE")}
    functions = {node["function"]["function_name"] for node in nodes if node.get("type") == "TABLE_FUNCTION"}
    if not kinds:
        return ["a statement that cannot be examined"]
    return sorted(kinds - _QUERY_NODES) + [f"{name}(...)" for name in sorted(functions - _TABLE_FUNCTIONS)]


def _objects(tree: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object in `tree`, in no particular order."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
