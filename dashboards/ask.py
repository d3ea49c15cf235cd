"""Questions in SQL: the views with their columns, the recipes, and the rows of a query."""

from time import perf_counter
from typing import TYPE_CHECKING, Any

from dashboards.plain import plain
from store.errors import QueryError
from store.queries import VIEWS, LogReader, recipes

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN = 1000  # rows that are sent; more are for a file
MOST = 10_000  # rows that are fetched
SECONDS = 20.0  # after which DuckDB is told to stop; it looks for that between two steps of a query


def read_catalog() -> dict[str, Any]:
    """What can be asked; the same for every run."""
    with LogReader([]) as log:
        views = {view: log.columns(view) for view in VIEWS}
    return {"views": views, "recipes": list(recipes().values())}


def ask(log: LogReader, query: str) -> dict[str, Any]:
    """The first rows of a query.

    Raises `QueryError` for one that is not allowed or valid, that was stopped after `SECONDS`, or that has dates which
    Python lacks. A query that DuckDB cannot stop, such as one that makes a single huge value, takes longer.
    """
    began = perf_counter()
    table = log.select(query, most=MOST, seconds=SECONDS)
    shown = table.slice(0, SHOWN)
    return {
        "columns": table.schema.names,
        "types": [str(field.type) for field in table.schema],
        "rows": _rows(shown),
        "total": table.num_rows,
        "more": table.num_rows == MOST,
        "seconds": perf_counter() - began,
    }


def _rows(table: "pa.Table") -> list[list[Any]]:
    try:
        return [[plain(column[row].as_py()) for column in table.columns] for row in range(table.num_rows)]
    except (OverflowError, ValueError) as error:
        raise QueryError("dates must be within years 1 to 9999; cast others to VARCHAR") from error
