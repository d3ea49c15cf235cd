"""Read-only SQL over the logs of one or many runs; the only file that imports duckdb.

A `LogReader` is a snapshot: it sees what the runs had committed when it was opened, and stays valid while they continue
and while their parts are joined. A run that several processes write is one run (store/log/partitions.py). The views are
`decisions`, `blocks`, `prompts`, `updates`, `drifts`, `recalls` and `versions` with the columns of the events;
`tokens`, every emitted token in order; and `counts_by_version`, `counts_by_place` and `counts_by_token`
(store/log/schema.py). The first column of each is `run`, the run folder's name.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any, Self

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from store.errors import CorruptError, QueryError, RunError
from store.log.manifest import folders_with_manifest, require_unicode
from store.log.parts import find_damage
from store.noise import UNIFORM_BITS, number_of
from store.query.views import (
    VIEWS,
    CommittedFiles,
    Recipe,
    describe_damage,
    miscounts_query,
    quote_list,
    readable_paths,
    recipes,
    statement,
    view_definitions,
)

__all__ = ["VIEWS", "LogReader", "Recipe", "Rederivation", "recipes", "run_folders", "statement"]

MEMORY = "3GB"  # for sorting and grouping
_BATCH_ROWS = 2_048  # as DuckDB; at most one batch more than requested is fetched
_FETCHED_BYTES = 256 << 20  # for a limited number of rows, which are displayed
_CHECKED_ROWS = 2_000_000  # checked together
_OF_ALL_ROWS = "^(positions|indices|the rejection)"  # problems that a missing part can cause
# The last two are raised for names in a damaged part that are not UTF-8.
_REFUSALS = (duckdb.Error, RuntimeError, UnicodeDecodeError)
# Errors that no damage can cause.
_ERRORS_OF_QUERIES = (
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.InterruptException,
    duckdb.OutOfMemoryException,
    duckdb.ParserException,
    duckdb.PermissionException,
)
# Ranges of offsets with about {rows} decisions each.
_RANGES = """
    WITH counted AS (SELECT "offset", count(*) AS decisions FROM decisions GROUP BY "offset"),
    numbered AS (SELECT "offset", sum(decisions) OVER (ORDER BY "offset") // {rows} AS number FROM counted)
    SELECT min("offset") AS first, max("offset") AS last FROM numbered GROUP BY number ORDER BY first
"""

_BY_NOISE = """
    SELECT
        run, "offset", prompt_id, block, index, position,
        'the uniform must be the number of this place and token under the prompt''s noise' AS problem,
        outcome, uniform, NULL::DOUBLE AS acceptance_probability, seq, noise, emitted_id
    FROM decisions JOIN (SELECT run, "offset", noise FROM prompts) USING (run, "offset")
    WHERE noise IS NOT NULL AND emitted_id IS NOT NULL
"""

_EXPLAIN = re.compile(r"\s*explain\s+(?:analyze\s+)?(?P<explained>.*)", re.IGNORECASE | re.DOTALL)
_QUERY_NODES = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
# All other table functions read files, settings or SQL in strings.
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


@dataclass(frozen=True, slots=True)
class Rederivation:
    """Numbers and findings of `LogReader.check`."""

    decisions: int  # rows checked
    judged: int  # accepted or rejected ones, each derived again from its row
    mismatches: pa.Table  # one row per contradiction, with its position and a description
    miscounts: pa.Table  # one row per count that differs from the decisions


def run_folders(folder: Path) -> list[Path]:
    """Return the runs directly below `folder`, sorted, each once and without symbolic links in its path.

    Raises `RunError` if there are none, or a name is not UTF-8.
    """
    found = sorted({run.resolve() for run in folders_with_manifest(folder)})
    for run in found:
        require_unicode(run)
    if not found:
        raise RunError(
            f"{folder} must hold at least one run, but none was found; make one with `omnidraft replay`, "
            "or name a run's folder with --run"
        )
    return found


class LogReader:
    """Read-only SQL over the logs of `run_folders`.

    A query can read the committed parts and no other file, load no extension and change no setting. Sorting and
    grouping may take 3 GB, and a limited number of rows 256 MB. All rows of a result, and a single value that a query
    makes, are not bounded. Without runs the views are empty. Not thread-safe.

    Raises RunError if a folder is not a run, or two have the same name; CorruptError if a part is missing or not as it
    was committed, unless `skip_damaged` leaves such parts out.
    """

    def __init__(self, run_folders: Sequence[Path], *, skip_damaged: bool = False) -> None:
        folders = {folder.resolve().name: folder.resolve() for folder in run_folders}
        if len(folders) != len(run_folders):
            raise RunError(f"runs must have different folder names, got {[str(folder) for folder in run_folders]}")
        runs = [CommittedFiles.from_run(folder, skip_damaged) for folder in folders.values()]
        self.damaged = [path for run in runs for path in run.damaged]  # parts that were left out
        self._parts = [named for run in runs for named in run.parts]
        self._connection = duckdb.connect(
            ":memory:",
            config={
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
                "memory_limit": MEMORY,
            },
        )
        try:
            self._open(runs)
        except BaseException as error:
            self._connection.close()
            if isinstance(error, _REFUSALS):
                self._require_undamaged()
            raise

    def select(self, query: str, most: int | None = None, seconds: float | None = None) -> pa.Table:
        """Run one SELECT (or WITH, FROM, VALUES, EXPLAIN, DESCRIBE, SHOW, SUMMARIZE) statement; return its rows, at
        most `most`.

        Raises QueryError for any other statement, several statements, one that DuckDB refuses, that takes more than
        `seconds` or too much memory, or `most` rows of more than 256 MB; CorruptError if a part was damaged since the
        reader was opened.
        """
        self._require_reading(query)
        try:
            with self._interrupted_after(seconds):
                return _first_rows(self._connection.sql(query).to_arrow_reader(_BATCH_ROWS), most)
        except (*_REFUSALS, pa.ArrowException, OSError) as error:
            if not isinstance(error, _ERRORS_OF_QUERIES):
                self._require_undamaged()
            raise QueryError(_explain_error(query, error, seconds)) from error

    def recipe(self, name: str, rows: int | None = None) -> pa.Table:
        """Return the rows of a named query, at most so many. Raises QueryError for an unknown one."""
        known = recipes()
        if name not in known:
            raise QueryError(f"a recipe must be one of {', '.join(known)}; got {name!r}")
        return self.select(known[name].sql, rows)

    def columns(self, view: str) -> list[tuple[str, str]]:
        return [(row["column_name"], row["column_type"]) for row in self.select(f'DESCRIBE "{view}"').to_pylist()]

    def check(self, at_once: int = _CHECKED_ROWS) -> Rederivation:
        """Derive every judged decision again from its own row (`store/query/sql/check.sql`); recount all decisions.

        The outcomes of a tree's candidates, alternatives included, are derived from the rows of their place. If damaged
        parts were left out, gaps in the positions of tokens and in the indices of candidates are not mismatches. About
        `at_once` decisions are checked together, since the check sorts and a large log would not fit into memory.
        """
        judged = "count(*) FILTER (outcome IN ('accepted', 'rejected'))"
        (counts,) = self.select(f"SELECT count(*) AS decisions, {judged} AS judged FROM decisions").to_pylist()
        mismatches = self._mismatches(at_once)
        if self.damaged:
            gaps = pc.match_substring_regex(mismatches["problem"], _OF_ALL_ROWS)
            mismatches = mismatches.filter(pc.invert(gaps))
        return Rederivation(counts["decisions"], counts["judged"], mismatches, self.select(miscounts_query()))

    def _mismatches(self, at_once: int) -> pa.Table:
        """Run the recipe `check` over ranges of prompts; return all its rows."""
        ranges = self.select(_RANGES.format(rows=at_once)).to_pylist()
        found = [self.recipe("check").slice(0, 0)] if not ranges else []
        try:
            for row in ranges:
                # A temporary view hides the one of the same name.
                self._connection.execute(
                    "CREATE OR REPLACE TEMP VIEW decisions AS FROM memory.main.decisions "
                    f'WHERE "offset" BETWEEN {row["first"]} AND {row["last"]}'
                )
                found += [self.recipe("check"), self._find_foreign_numbers()]
        finally:
            self._connection.execute("DROP VIEW IF EXISTS temp.decisions")
        return pa.concat_tables(found)

    def _find_foreign_numbers(self) -> pa.Table:
        """Return the emitted tokens of `decisions` whose uniform is not the number of their completion's noise."""
        rows = self.select(_BY_NOISE)
        keys, places, tokens = (rows[name].to_numpy().astype(np.uint64) for name in ("noise", "position", "emitted_id"))
        wanted = np.floor(number_of(keys, places, tokens) * (1 << UNIFORM_BITS)) / (1 << UNIFORM_BITS)
        wrong = rows["uniform"].to_numpy(zero_copy_only=False) != wanted
        return rows.drop_columns(["noise", "emitted_id"]).filter(pa.array(wrong))

    def close(self) -> None:
        """Free the connection. Calling it again does nothing."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_undamaged(self) -> None:
        """Raise `CorruptError` if a part was damaged after it was verified: not the query is to blame."""
        if damage := find_damage(self._parts, again=True):
            raise CorruptError(describe_damage(damage.values()))

    def _open(self, runs: Sequence[CommittedFiles]) -> None:
        """Create the views, then restrict queries to the files of the views; the last setting is final."""
        for definition in view_definitions(runs):
            self._connection.execute(definition)
        # In Jupyter without ipywidgets the bar is off, and DuckDB refuses even to set that.
        (bar,) = self._connection.sql("SELECT current_setting('enable_progress_bar')").fetchall()[0]
        for setting in (
            *(["enable_progress_bar = false"] if bar else []),
            "temp_directory = ''",
            "python_enable_replacements = false",
            f"allowed_paths = {quote_list(readable_paths(runs))}",
            "enable_external_access = false",
            "lock_configuration = true",
        ):
            self._connection.execute(f"SET {setting}")

    @contextmanager
    def _interrupted_after(self, seconds: float | None) -> Iterator[None]:
        if seconds is None:
            yield
            return
        timer = Timer(seconds, self._connection.interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _require_reading(self, query: str) -> None:
        try:
            query.encode()
        except UnicodeEncodeError as error:
            raise QueryError(f"a query must be valid Unicode, but it is not: {error}; write it in UTF-8") from None
        kinds = self._statement_kinds(query)
        explained = _EXPLAIN.match(query)
        if kinds == ["EXPLAIN"] and explained:
            # EXPLAIN ANALYZE runs its statement, so this must be a SELECT, too.
            query = explained["explained"]
            kinds = self._statement_kinds(query)
        foreign = [kind for kind in kinds if kind != "SELECT"] or self._foreign_parts(query)
        if len(kinds) != 1 or foreign:
            raise QueryError(
                "a query must be one SELECT statement (or EXPLAIN, DESCRIBE, SHOW, SUMMARIZE) that only reads the log, "
                f"got {', '.join(foreign) or f'{len(kinds)} statements'}; see the views that `omnidraft sql` lists"
            )

    def _foreign_parts(self, query: str) -> list[str]:
        """List the parts of a SELECT other than queries and harmless table functions.

        Neither the kind of statement nor the allowed paths are sufficient: DuckDB 2 treats
        `WITH x AS (COPY ... TO ...)` as a SELECT, and could overwrite a committed part, which is an allowed path.
        """
        tree = self._connection.sql("SELECT json_serialize_sql(?)", params=[query]).fetchall()[0][0]
        try:
            nodes = list(_json_objects(json.loads(tree)))
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
            raise QueryError(_explain_error(query, error)) from error


def _first_rows(batches: pa.RecordBatchReader, most: int | None) -> pa.Table:
    with batches:
        if most is None:
            return batches.read_all()
        kept: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in batches:
            kept.append(batch)
            rows, size = rows + len(batch), size + batch.nbytes
            if size > _FETCHED_BYTES:
                raise QueryError(
                    f"the first {most:,} rows must take at most {_FETCHED_BYTES >> 20} MB, but {rows:,} take more; "
                    "select fewer columns or shorter values"
                )
            if rows >= most:
                break
        return pa.Table.from_batches(kept, batches.schema).slice(0, most)


def _explain_error(query: str, error: Exception, seconds: float | None = None) -> str:
    """Return DuckDB's message, with a hint about `offset`, the one column name that SQL reserves."""
    words = str(error)
    if seconds is not None and words.startswith("INTERRUPT"):
        return f"the query must be done within {seconds:g} s, but it was not; select less, or use `omnidraft sql`"
    if isinstance(error, duckdb.OutOfMemoryException):
        return f"the query must be possible within {MEMORY} of memory, but it is not; select less"
    reserved = isinstance(error, duckdb.ParserException) and re.search(r'(?<!["\w.])offset\b', query, re.IGNORECASE)
    hint = '\n"offset" is a word of SQL: write it in double quotes, or as decisions.offset'
    return f"the query must be one that DuckDB can run, got: {words}{hint if reserved else ''}"


def _json_objects(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield every JSON object in `tree`, in no particular order."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
