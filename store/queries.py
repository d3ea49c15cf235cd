"""Read-only SQL over the logs of one or many runs; the only file that imports duckdb.

A `LogReader` is a snapshot: it sees what the runs had committed when it was opened, and stays valid while they go on
and while their parts are joined. A run that several processes write is one run (store/partitions.py). Its views are
`decisions`, `blocks`, `prompts`, `updates`, `drifts`, `recalls` and `versions` with the columns of the events;
`tokens`, every emitted token in order; and `counts_by_version`, `counts_by_place` and `counts_by_token`
(store/rollups.py). The first column of each is `run`, the run folder's name.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Self

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from store.errors import CorruptError, QueryError, RunError
from store.manifest import MANIFEST, require_unicode
from store.reading_only import explained_query, foreign_parts
from store.recipes import Recipe, recipes, statement
from store.views import VIEWS, CommittedFiles, definitions, miscounts, quoted_list, readable

__all__ = ["VIEWS", "LogReader", "Recipe", "Rederivation", "recipes", "run_folders", "statement"]

MEMORY = "3GB"  # for sorting and grouping
_BATCH_ROWS = 2_048  # DuckDB's own: what is fetched beyond the rows that are asked for is one batch at most
_FETCHED_BYTES = 256 << 20  # of a limited number of rows, which are for eyes
_CHECKED_ROWS = 2_000_000  # at once
# The last two: for names in a damaged part that are not UTF-8.
_REFUSALS = (duckdb.Error, RuntimeError, UnicodeDecodeError)
# Ranges of offsets with about so many decisions each.
_RANGES = """
    WITH counted AS (SELECT "offset", count(*) AS decisions FROM decisions GROUP BY "offset"),
    numbered AS (SELECT "offset", sum(decisions) OVER (ORDER BY "offset") // {rows} AS number FROM counted)
    SELECT min("offset") AS first, max("offset") AS last FROM numbered GROUP BY number ORDER BY first
"""


@dataclass(frozen=True, slots=True)
class Rederivation:
    """What `LogReader.check` found."""

    decisions: int  # rows looked at
    judged: int  # of these accepted or rejected, each decided again from its row
    mismatches: pa.Table  # one row per contradiction, with its place and the problem in words
    miscounts: pa.Table  # one row per count that is not what the decisions say


def run_folders(folder: Path) -> list[Path]:
    """The runs directly below `folder`, by name, each once and without symbolic links in its path.

    Raises `RunError` when there are none, and for one whose name is not UTF-8.
    """
    found = sorted({path.parents[1].resolve() for path in folder.glob(f"*/{MANIFEST.as_posix()}")})
    for run in found:
        require_unicode(run)
    if not found:
        raise RunError(
            f"{folder} must hold at least one run, but none was found; make one with `omnidraft replay`, "
            "or name a run's folder with --run"
        )
    return found


class LogReader:
    """Views over the committed logs of `run_folders`, locked against everything but reading them.

    A query sees no file but the committed parts, loads no extension and changes no setting. Sorting and grouping may
    take 3 GB, and a limited number of rows 256 MB; all rows of a result, and a single value that a query makes, are
    not bounded. No runs at all give empty views. Not to be shared by threads. A context manager; closing it frees the
    connection.

    `skip_damaged`: compare every part with its digest, and leave out those that are not what was written.

    Raises `RunError` for a folder that is no run, and `CorruptError` for a part that is missing or cut or whose
    footer was changed, unless damaged ones are skipped.

    Attributes:
        damaged: parts that were left out.
    """

    def __init__(self, run_folders: Sequence[Path], *, skip_damaged: bool = False) -> None:
        folders = {folder.resolve().name: folder.resolve() for folder in run_folders}
        if len(folders) != len(run_folders):
            raise RunError(f"runs must have different folder names, got {[str(folder) for folder in run_folders]}")
        runs = [CommittedFiles.of(folder, skip_damaged) for folder in folders.values()]
        self.damaged = [path for run in runs for path in run.damaged]
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
                raise CorruptError(_damage(list(folders.values()), error)) from error
            raise

    def select(self, query: str, most: int | None = None, seconds: float | None = None) -> pa.Table:
        """The rows of one SELECT (or WITH, FROM, VALUES, EXPLAIN, DESCRIBE, SHOW, SUMMARIZE) statement.

        Args:
            query: the statement.
            most: rows that are fetched; what comes behind them is not computed where that can be helped.
            seconds: after which it is given up.

        Raises `QueryError` for any other statement, for several at once, for what DuckDB refuses, for what does
        not end in time or needs too much memory, and for `most` rows of more than 256 MB.
        """
        self._require_reading(query)
        try:
            with self._interrupted_after(seconds):
                return _first_rows(self._connection.sql(query).to_arrow_reader(_BATCH_ROWS), most)
        except (*_REFUSALS, pa.ArrowException, OSError) as error:
            raise QueryError(_explained(query, error, seconds)) from error

    def recipe(self, name: str, most: int | None = None) -> pa.Table:
        """The rows of a recipe, at most so many. Raises `QueryError` for an unknown name."""
        known = recipes()
        if name not in known:
            raise QueryError(f"a recipe must be one of {', '.join(known)}; got {name!r}")
        return self.select(known[name].sql, most)

    def columns(self, view: str) -> list[tuple[str, str]]:
        """Name and SQL type of each column of a view."""
        rows = self.select(f'DESCRIBE "{view}"').to_pylist()
        return [(row["column_name"], row["column_type"]) for row in rows]

    def check(self, at_once: int = _CHECKED_ROWS) -> Rederivation:
        """Decide every judged token again from its own row, see `store/sql/check.sql`; count all decisions again.

        Where damaged parts were left out, gaps in the positions of tokens are no mismatch. About `at_once` decisions
        are looked at together: the check sorts, and a large log would not fit into memory.
        """
        judged = "count(*) FILTER (outcome IN ('accepted', 'rejected'))"
        (counts,) = self.select(f"SELECT count(*) AS decisions, {judged} AS judged FROM decisions").to_pylist()
        mismatches = self._mismatches(at_once)
        if self.damaged:
            gaps = pc.starts_with(mismatches["problem"], "positions")
            mismatches = mismatches.filter(pc.invert(gaps))
        return Rederivation(counts["decisions"], counts["judged"], mismatches, self.select(miscounts()))

    def _mismatches(self, at_once: int) -> pa.Table:
        """The rows of the recipe `check`, some prompts after the other."""
        ranges = self.select(_RANGES.format(rows=at_once)).to_pylist()
        found = [self.recipe("check").slice(0, 0)] if not ranges else []
        try:
            for row in ranges:
                # A temporary view hides the one of the same name.
                self._connection.execute(
                    "CREATE OR REPLACE TEMP VIEW decisions AS FROM memory.main.decisions "
                    f'WHERE "offset" BETWEEN {row["first"]} AND {row["last"]}'
                )
                found.append(self.recipe("check"))
        finally:
            self._connection.execute("DROP VIEW IF EXISTS temp.decisions")
        return pa.concat_tables(found)

    def close(self) -> None:
        """Free the connection; the reader cannot be used afterwards."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, runs: Sequence[CommittedFiles]) -> None:
        """Create the views, then leave nothing to a query but the files they read; the last setting is final."""
        for definition in definitions(runs):
            self._connection.execute(definition)
        for setting in (
            "enable_progress_bar = false",
            "temp_directory = ''",
            "python_enable_replacements = false",
            f"allowed_paths = {quoted_list(readable(runs))}",
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
        explained = explained_query(query)
        if kinds == ["EXPLAIN"] and explained:
            # EXPLAIN ANALYZE runs what it explains, so that must be a SELECT too.
            query = explained
            kinds = self._statement_kinds(query)
        foreign = [kind for kind in kinds if kind != "SELECT"] or foreign_parts(self._parse_tree(query))
        if len(kinds) != 1 or foreign:
            raise QueryError(
                "a query must be one SELECT statement (or EXPLAIN, DESCRIBE, SHOW, SUMMARIZE) that only reads the log, "
                f"got {', '.join(foreign) or f'{len(kinds)} statements'}; see the views that `omnidraft sql` lists"
            )

    def _parse_tree(self, query: str) -> str:
        return str(self._connection.sql("SELECT json_serialize_sql(?)", params=[query]).fetchall()[0][0])

    def _statement_kinds(self, query: str) -> list[str]:
        try:
            return [parsed.type.name for parsed in self._connection.extract_statements(query)]
        except duckdb.Error as error:
            raise QueryError(_explained(query, error)) from error


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
                    f"the first {most:,} rows must take at most {_FETCHED_BYTES >> 20} MB, but {rows:,} take more; ask "
                    "for fewer columns or shorter values"
                )
            if rows >= most:
                break
        return pa.Table.from_batches(kept, batches.schema).slice(0, most)


def _damage(folders: Sequence[Path], error: Exception) -> str:
    """Why the views could not be made: a part's footer was changed, which its size does not show."""
    return (
        f"the parts below {', '.join(map(str, folders))} must be Parquet as they were written, but: "
        f"{str(error).splitlines()[0]}; `omnidraft check` names what is damaged, --skip-damaged reads the rest"
    )


def _explained(query: str, error: Exception, seconds: float | None = None) -> str:
    """DuckDB's message, with a hint at the one column name that SQL reserves."""
    words = str(error)
    if seconds is not None and words.startswith("INTERRUPT"):
        return f"the query must be done within {seconds:g} s, but it was not; ask for less, or use `omnidraft sql`"
    if isinstance(error, duckdb.OutOfMemoryException):
        return f"the query must be possible within {MEMORY} of memory, but it is not; ask for less"
    reserved = isinstance(error, duckdb.ParserException) and re.search(r'(?<!["\w.])offset\b', query, re.IGNORECASE)
    hint = '\n"offset" is a word of SQL: write it in double quotes, or as decisions.offset'
    return f"the query must be one that DuckDB can run, got: {words}{hint if reserved else ''}"
