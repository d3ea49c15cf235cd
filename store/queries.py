"""Read-only SQL over the logs of one or many runs; the only file that imports duckdb.

A `LogReader` is a snapshot: it sees what the runs had committed when it was opened, and stays valid while they go on.
Its views are `decisions`, `blocks`, `prompts`, `updates`, `drifts` and `versions` with the columns of the events, and
`tokens`, every emitted token in order. The first column of each is `run`, the name of the run's folder.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import duckdb
import pyarrow as pa

from store.errors import CorruptError, QueryError, RunError
from store.manifest import MANIFEST, Part, part_path, read_manifest
from store.schema import TABLES, schema_of

VIEWS = ("decisions", "tokens", "blocks", "prompts", "updates", "drifts", "recalls", "versions")

# A statement that starts so explains another; the rest must then stand as a SELECT by itself.
_EXPLAIN = re.compile(r"\s*explain\s+(?:analyze\s+)?(?P<explained>.*)", re.IGNORECASE | re.DOTALL)
_QUERY_NODES = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
# Those that read nothing but their arguments and the catalog; all others read files, settings or statements in strings.
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
_SQL_TYPES = {
    pa.bool_(): "BOOLEAN",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "VARCHAR",
    pa.binary(): "BLOB",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A named query that is shipped with the package."""

    name: str
    description: str  # one line
    sql: str


@dataclass(frozen=True, slots=True)
class Rederivation:
    """What `LogReader.check` found."""

    decisions: int  # rows looked at
    judged: int  # of these accepted or rejected, each decided again from its row
    mismatches: pa.Table  # one row per contradiction, with its place and the problem in words


def recipes() -> dict[str, Recipe]:
    """All recipes by name, in alphabetical order."""
    names = sorted(file.name.removesuffix(".sql") for file in files("store").joinpath("sql").iterdir())
    return {name: _recipe(name) for name in names if not name.startswith("_")}


def statement(name: str) -> str:
    """The text of `store/sql/NAME.sql`; names with a leading underscore are parts of the store, not recipes."""
    return files("store").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")


def run_folders(folder: Path) -> list[Path]:
    """The runs directly below `folder`, by name. Raises `RunError` when there are none."""
    found = sorted(path.parents[1] for path in folder.glob(f"*/{MANIFEST.as_posix()}"))
    if not found:
        raise RunError(
            f"{folder} must hold at least one run, but none was found; make one with `omnidraft replay`, "
            "or name a run's folder with --run"
        )
    return found


class LogReader:
    """Views over the committed logs of `run_folders`, locked against everything but reading them.

    A query sees no file but the committed parts, loads no extension and changes no setting. Raises `RunError` for a
    folder that is no run, and `CorruptError` for a log whose parts are missing. No runs at all give empty views.
    Not to be shared by threads. A context manager; closing it frees the connection.
    """

    def __init__(self, run_folders: Sequence[Path]) -> None:
        self._runs = {folder.resolve().name: folder.resolve() for folder in run_folders}
        if len(self._runs) != len(run_folders):
            raise RunError(f"runs must have different folder names, got {[str(folder) for folder in run_folders]}")
        self._connection = duckdb.connect(
            ":memory:", config={"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
        )
        try:
            self._lock(self._create_views())
        except BaseException:
            self._connection.close()
            raise

    def select(self, query: str) -> pa.Table:
        """The rows of one SELECT (or WITH, FROM, VALUES, EXPLAIN, DESCRIBE, SHOW, SUMMARIZE) statement.

        Raises `QueryError` for any other statement, for several at once, and for what DuckDB refuses.
        """
        self._require_reading(query)
        try:
            return self._connection.sql(query).to_arrow_table()
        except duckdb.Error as error:
            raise QueryError(_explained(query, error)) from error

    def recipe(self, name: str) -> pa.Table:
        """The rows of a recipe. Raises `QueryError` for an unknown name."""
        known = recipes()
        if name not in known:
            raise QueryError(f"a recipe must be one of {', '.join(known)}; got {name!r}")
        return self.select(known[name].sql)

    def columns(self, view: str) -> list[tuple[str, str]]:
        """Name and SQL type of each column of a view."""
        rows = self.select(f'DESCRIBE "{view}"').to_pylist()
        return [(row["column_name"], row["column_type"]) for row in rows]

    def check(self) -> Rederivation:
        """Decide every judged token again from its own row; see `store/sql/check.sql`."""
        judged = "count(*) FILTER (outcome IN ('accepted', 'rejected'))"
        (counts,) = self.select(f"SELECT count(*) AS decisions, {judged} AS judged FROM decisions").to_pylist()
        return Rederivation(counts["decisions"], counts["judged"], self.recipe("check"))

    def close(self) -> None:
        """Free the connection; the reader cannot be used afterwards."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _create_views(self) -> list[str]:
        """Create all views; the files they read."""
        manifests = {run: read_manifest(folder) for run, folder in self._runs.items()}
        readable: list[str] = []
        for table in TABLES:
            selects = [_empty_select(table)]
            for run, manifest in manifests.items():
                if paths := _existing(self._runs[run], manifest.tables[table]):
                    selects.append(f"SELECT {_quoted(run)} AS run, * FROM read_parquet({_quoted_list(paths)})")
                    readable += paths
            self._connection.execute(f"CREATE VIEW {table} AS {' UNION ALL BY NAME '.join(selects)}")
        self._connection.execute(statement("_views"))
        return readable

    def _lock(self, readable: list[str]) -> None:
        """Leave nothing to a query but `readable`; the last setting makes the others final."""
        for setting in (
            "temp_directory = ''",
            "python_enable_replacements = false",
            f"allowed_paths = {_quoted_list(readable)}",
            "enable_external_access = false",
            "lock_configuration = true",
        ):
            self._connection.execute(f"SET {setting}")

    def _require_reading(self, query: str) -> None:
        kinds = self._statement_kinds(query)
        explained = _EXPLAIN.match(query)
        if kinds == ["EXPLAIN"] and explained:
            # EXPLAIN ANALYZE runs what it explains, so that must be a SELECT too.
            query = explained["explained"]
            kinds = self._statement_kinds(query)
        foreign = [kind for kind in kinds if kind != "SELECT"] or self._foreign_parts(query)
        if len(kinds) != 1 or foreign:
            raise QueryError(
                "a query must be one SELECT statement (or EXPLAIN, DESCRIBE, SHOW, SUMMARIZE) that only reads the log, "
                f"got {', '.join(foreign) or f'{len(kinds)} statements'}; see the views that `omnidraft sql` lists"
            )

    def _foreign_parts(self, query: str) -> list[str]:
        """What a SELECT contains beyond queries and harmless table functions, from its parse tree.

        Neither the kind of statement nor the allowed paths are enough: DuckDB 2 takes `WITH x AS (COPY ... TO ...)` for
        a SELECT, and a committed part is a path that it would then overwrite.
        """
        serialized = self._connection.sql("SELECT json_serialize_sql(?)", params=[query]).fetchall()[0][0]
        try:
            nodes = list(_objects(json.loads(serialized)))
        except RecursionError:
            return ["an expression that is nested too deeply"]
        kinds = {node["type"] for node in nodes if str(node.get("type")).endswith("_NODE")}
        functions = {node["function"]["function_name"] for node in nodes if node.get("type") == "TABLE_FUNCTION"}
        if not kinds:
            return ["a statement that cannot be examined"]
        return sorted(kinds - _QUERY_NODES) + [f"{name}(...)" for name in sorted(functions - _TABLE_FUNCTIONS)]

    def _statement_kinds(self, query: str) -> list[str]:
        try:
            return [parsed.type.name for parsed in self._connection.extract_statements(query)]
        except duckdb.Error as error:
            raise QueryError(_explained(query, error)) from error


def _recipe(name: str) -> Recipe:
    sql = statement(name)
    return Recipe(name, sql.splitlines()[0].removeprefix("--").strip(), sql)


def _existing(run_folder: Path, parts: Iterable[Part]) -> list[str]:
    """Paths of the parts; checked by size alone, `omnidraft check` reads the digests."""
    paths = [(part_path(run_folder, part), part.bytes) for part in parts]
    for path, size in paths:
        if not path.is_file() or path.stat().st_size != size:
            raise CorruptError(
                f"{path} must be a file of {size} bytes, as the manifest says, but it is not; restore it"
            )
    return [str(path) for path, _ in paths]


def _empty_select(table: str) -> str:
    """A query without rows that gives a view its columns, also when no run has a part of the table yet."""
    columns = ", ".join(f'NULL::{_sql_type(field.type)} AS "{field.name}"' for field in schema_of(table))
    return f"SELECT NULL::VARCHAR AS run, {columns} WHERE false"


def _sql_type(arrow_type: pa.DataType) -> str:
    if pa.types.is_list(arrow_type):
        return f"{_sql_type(arrow_type.value_type)}[]"
    if pa.types.is_dictionary(arrow_type):
        return _sql_type(arrow_type.value_type)
    return _SQL_TYPES[arrow_type]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _quoted_list(texts: Iterable[str]) -> str:
    return f"[{', '.join(map(_quoted, texts))}]"


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


def _explained(query: str, error: duckdb.Error) -> str:
    """DuckDB's message, with a hint at the one column name that SQL reserves."""
    hint = '\n"offset" is a word of SQL: write it in double quotes, or as decisions.offset'
    reserved = isinstance(error, duckdb.ParserException) and re.search(r'(?<!["\w.])offset\b', query, re.IGNORECASE)
    return f"the query must be one that DuckDB can run, got: {error}{hint if reserved else ''}"
