"""A run's token log in SQL, as Arrow tables."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from store.errors import QueryError
from store.object_store.mirror import local_copy
from store.query.log_reader import VIEWS, LogReader, recipes

if TYPE_CHECKING:
    import pyarrow as pa

Run = str | os.PathLike[str]


def open_log(run: Run | Sequence[Run], *, skip_damaged: bool = False) -> "Log":
    """Open the log of one or several runs for reading.

    Args:
        run: a run's folder or `s3://BUCKET/PATH`, or a list of them with different folder names. The run may still
            be writing.
        skip_damaged: compare every file with its digest and leave out damaged ones, instead of raising `CorruptError`.

    Raises:
        RunError: a folder holds no run.
        CorruptError: a file of the log is missing, cut or changed.
    """
    runs = [run] if isinstance(run, str | os.PathLike) else run
    return Log([local_copy(Path(one)) for one in runs], skip_damaged=skip_damaged)


class Log(LogReader):
    """The committed log of some runs as it was when it was opened; read-only. A context manager; use it on one thread.

    The views are listed by `tables`; `docs/log.md` describes their columns. The first column of each is `run`.
    """

    @property
    def tables(self) -> dict[str, dict[str, str]]:
        """Every view, with the SQL type of each of its columns."""
        return {view: dict(self.columns(view)) for view in VIEWS}

    @property
    def recipes(self) -> Mapping[str, str]:
        """The named queries, with what each shows."""
        return {name: recipe.description for name, recipe in recipes().items()}

    def sql(self, query: str, *, rows: int | None = None, seconds: float | None = None) -> "pa.Table":
        """The rows of one SELECT statement in DuckDB's SQL.

        Args:
            query: a SELECT (or WITH, FROM, VALUES, EXPLAIN, DESCRIBE, SHOW, SUMMARIZE). The column `offset` must be in
                double quotes, because SQL reserves the word.
            rows: fetch at most so many.
            seconds: after which the query is interrupted.

        Raises:
            QueryError: any other statement, one that DuckDB refuses, too much time or memory, or the log is closed.
        """
        return self.select(query, rows, seconds)

    def table(self, name: str) -> "pa.Table":
        """All rows of a view, such as `decisions`. Raises QueryError for an unknown one."""
        if name not in VIEWS:
            raise QueryError(f"a table of the log must be one of {', '.join(VIEWS)}; got {name!r}")
        return self.sql(f'SELECT * FROM "{name}"')
