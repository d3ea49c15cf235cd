"""Questions in SQL: the views with their columns, the recipes, and the rows of a query."""

from time import perf_counter
from typing import Any

from dashboards.plain import plain
from store.queries import VIEWS, LogReader, recipes

SHOWN = 1000  # rows that are sent; more are for a file
MOST = 10_000  # rows that are fetched
SECONDS = 20.0


def read_catalog() -> dict[str, Any]:
    """What can be asked; the same for every run."""
    with LogReader([]) as log:
        views = {view: log.columns(view) for view in VIEWS}
    return {"views": views, "recipes": list(recipes().values())}


def ask(log: LogReader, query: str) -> dict[str, Any]:
    """The first rows of a query. Raises `QueryError` for one that is not allowed or valid, or not answered in time."""
    began = perf_counter()
    table = log.select(query, most=MOST, seconds=SECONDS)
    shown = table.slice(0, SHOWN)
    return {
        "columns": table.schema.names,
        "types": [str(field.type) for field in table.schema],
        "rows": [[plain(column[row].as_py()) for column in shown.columns] for row in range(shown.num_rows)],
        "total": table.num_rows,
        "more": table.num_rows == MOST,
        "seconds": perf_counter() - began,
    }
