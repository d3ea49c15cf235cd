"""Tables of the log as JSON values: rows of a query, and lists of prompts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from store.errors import UsageError
from store.query.exports import list_rows, to_json_value
from store.query.log_reader import VIEWS, LogReader, recipes
from store.query.rates import Acceptance
from store.query.views import quote_text

if TYPE_CHECKING:
    import pyarrow as pa

Content = TypeVar("Content")

EXACT = 2**53  # largest integer up to which JavaScript represents all integers exactly
SHOWN = 1000  # rows of a query that are sent
MOST = 10_000  # rows of a query that are fetched
PAGE = 20  # prompts per page of a list
START = 90  # characters of a prompt in a list
ORDERS = {
    "stream": '"offset"',
    "last": '"offset" DESC',
    "slowest": 'speed NULLS LAST, "offset"',
    "worst": 'acceptance NULLS LAST, "offset"',
    "best": 'acceptance DESC NULLS LAST, "offset"',
    "longest": 'emitted DESC, "offset"',
}


def read_statement(name: str) -> str:
    """Return the text of `dashboards/web/queries/sql/NAME.sql`."""
    return (Path(__file__).parent / "sql" / f"{name}.sql").read_text(encoding="utf-8")


_LIST = read_statement("tables/list")
_REJECTION = """
    SELECT min("offset") AS "offset" FROM decisions WHERE outcome = 'rejected' AND "offset" > {offset}
"""
_DATASETS = 'SELECT run, dataset, min("offset") AS first, max("offset") AS last FROM prompts GROUP BY ALL ORDER BY 1, 3'
_VERSIONS = "SELECT run, target, version, folder FROM versions ORDER BY run, target, version DESC"
_TOTALS = read_statement("tables/totals")


def rows(table: "pa.Table") -> list[dict[str, Any]]:
    """One dictionary per row. Of columns with the same name only the last is kept."""
    return [{name: plain(value) for name, value in row.items()} for row in table.to_pylist()]


def columns(table: "pa.Table") -> dict[str, list[Any]]:
    """One list per column, which is smaller than rows, for charts."""
    return {name: [plain(value) for value in values] for name, values in table.to_pydict().items()}


def plain(value: Any) -> Any:
    """Convert a value to JSON types, with large integers as text."""
    return to_json_value(value, EXACT)


def acceptance_of(row: Mapping[str, Any]) -> dict[str, float | None]:
    """The rate and the interval of a row's `accepted` and `judged` tokens, as `acceptance`, `low` and `high`."""
    found = Acceptance(int(row["accepted"] or 0), int(row["judged"] or 0))
    low, high = found.interval or (None, None)
    return {"acceptance": found.rate, "low": low, "high": high}


def tell_runs(
    log: LogReader, found: Sequence[Mapping[str, Any]], describe: Callable[[Sequence[Mapping[str, Any]]], Iterable[str]]
) -> list[dict[str, Any]]:
    """Return each run with the sentences that describe its rows."""
    runs = log.select("SELECT run FROM prompts GROUP BY run ORDER BY run").to_pydict()["run"]
    return [{"run": run, "sentences": list(describe([row for row in found if row["run"] == run]))} for run in runs]


def read_totals(log: LogReader) -> list[dict[str, Any]]:
    """Read the counts and rates of each run with a completed prompt."""
    return [row | acceptance_of(row) for row in rows(log.select(_TOTALS))]


def read_datasets(log: LogReader) -> list[dict[str, Any]]:
    """Read the first and last offset of each run's datasets, in stream order."""
    return rows(log.select(_DATASETS))


def read_version_files(
    log: LogReader, folders: Mapping[str, Path], name: str, read: Callable[[Path], Content | None]
) -> Iterator[tuple[Mapping[str, Any], Content]]:
    """Yield of each run and target the newest version whose file of this name can be read, and what `read` returns.

    A version whose folder was pruned is passed over, and one for whose file `read` returns None.
    """
    done = set()
    for row in rows(log.select(_VERSIONS)):
        line, path = (row["run"], row["target"]), folders[row["run"]] / row["folder"] / name
        if line not in done and path.is_file() and (content := read(path)) is not None:
            done.add(line)
            yield row, content


def read_catalog() -> dict[str, Any]:
    """Views with their columns, and recipes; equal for all runs."""
    with LogReader([]) as log:
        views = {view: log.columns(view) for view in VIEWS}
    return {"views": views, "recipes": list(recipes().values())}


def run_query(log: LogReader, query: str, seconds: float) -> dict[str, Any]:
    """Run a query and return its first rows with their total number.

    A query that DuckDB cannot interrupt, such as one that computes a single huge value, may exceed `seconds`. Raises
    QueryError if it is not allowed or not valid, was stopped, or returns dates that Python cannot represent.
    """
    began = perf_counter()
    table = log.select(query, most=MOST, seconds=seconds)
    return {
        "columns": table.schema.names,
        "types": [str(field.type) for field in table.schema],
        "rows": list(list_rows(table.slice(0, SHOWN), EXACT)),
        "total": table.num_rows,
        "more": table.num_rows == MOST,
        "seconds": perf_counter() - began,
    }


def read_prompts(
    log: LogReader, order: str = "stream", dataset: str = "", page: int = 0, search: str = ""
) -> dict[str, Any]:
    """Read one page of prompts in an order, of all datasets or one, and the names of the datasets.

    `search` selects the prompts whose text or completion contains it, in upper or lower case. Orders by
    acceptance list only prompts with at least 5 judged tokens; `slowest` only those with emitted tokens.
    """
    if order not in ORDERS:
        raise UsageError(f"prompts can be ordered by {', '.join(ORDERS)}; got {order!r}")
    conditions = [f"dataset = {quote_text(dataset)}"] if dataset else []
    if search:
        conditions.append(f"contains(lower(prompt_text || ' ' || completion_text), lower({quote_text(search)}))")
    conditions += {"worst": ["judged >= 5"], "best": ["judged >= 5"], "slowest": ["emitted > 0"]}.get(order, [])
    condition, skip = " AND ".join(conditions) or "true", PAGE * max(0, page)
    query = _LIST.format(start=START, condition=condition, order=ORDERS[order], page=PAGE, skip=skip)
    return {"prompts": rows(log.select(query)), "datasets": read_datasets(log), "page_size": PAGE}


def find_rejection(log: LogReader, offset: int) -> dict[str, int | None]:
    """Find the first prompt after `offset` with a rejected token; its `offset` is None if there is none."""
    (row,) = rows(log.select(_REJECTION.format(offset=offset)))
    return row
