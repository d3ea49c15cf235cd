"""SQL of visitors, in a process of its own that is ended when a query passes its time limit.

    this process                                    the process of queries
    run() -> one thread, few may wait   ==pipe==>   Logs.read(...), one query at a time, at a lower priority

DuckDB can be interrupted between two steps of a query, but not while it plans one or computes one huge value. A process
can be ended at any time. It keeps its snapshots of logs between queries.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from dashboards.web.logs import BusyError, Logs
from dashboards.web.queries.tables import MOST, run_query
from store.child import CallError, ChildCalls, ChildError
from store.errors import OmnidraftError, QueryError
from store.query.exports import export_rows

SECONDS = 20.0  # after which DuckDB is interrupted
SPARE_SECONDS = 0.5  # in which an interrupted query must end before its process is ended
QUERY_BYTES = 64 << 10  # planning a longer one takes more time than its rows are worth
MOST_WAITING = 3  # queries that wait for the one that runs
Request = tuple[list[str], str, str]  # names of runs, query, kind of the answer
PAGE = "page"  # kind of an answer that is shown; others are files
NICENESS = 10  # pages come first
_CLOSED = "a query must come before the dashboards end; start them again"


class SqlProcess:
    """Answers queries over one `run`, or over all in `runs`, in a process of its own, each within `seconds`."""

    def __init__(self, run: Path | None, runs: Path, seconds: float | None = None) -> None:
        self._seconds = SECONDS if seconds is None else seconds
        self._calls = ChildCalls(_make_answer, run, runs, self._seconds, name="sql", niceness=NICENESS)
        self._thread = ThreadPoolExecutor(1, "dashboard-sql")
        self._pending = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        return self._calls.pid

    async def answer(self, names: Sequence[str], query: str, kind: str = PAGE) -> bytes:
        """Run a query when its turn comes; called on the event loop. Raises BusyError if too many wait."""
        if self._pending > MOST_WAITING:
            raise BusyError(f"{self._pending} queries run or wait already; try again when one is done")
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self.run, names, query, kind)
        except asyncio.CancelledError as error:
            if not self._closed:  # the request itself was cancelled
                raise
            raise QueryError(_CLOSED) from error
        finally:
            self._pending -= 1

    def run(self, names: Sequence[str], query: str, kind: str = PAGE) -> bytes:
        """Run a query over the named runs; called by one thread at a time.

        Returns what `run_query` returns, as JSON, or a file of `export_rows`. Raises QueryError if it is too long, not
        allowed or not valid, or if its process was ended: at the time limit, or by the system for its memory.
        """
        size = len(query.encode(errors="surrogatepass"))
        if size > QUERY_BYTES:
            raise QueryError(f"a query must have at most {QUERY_BYTES} bytes, got {size}; use `omnidraft sql`")
        try:
            refusal, content = self._calls.call((list(names), query, kind), self._seconds + SPARE_SECONDS)
        except TimeoutError as error:
            raise QueryError(
                f"the query must be done within {self._seconds:g} s, but it was not and was ended; "
                "select less, or use `omnidraft sql`"
            ) from error
        except CallError as error:
            raise RuntimeError(f"a query failed: {error}") from error
        except ChildError as error:
            if self._closed:
                raise QueryError(_CLOSED) from error
            raise QueryError(
                f"the query must fit into memory, but its process was ended ({error}); select less"
            ) from error
        if refusal:
            raise QueryError(refusal)
        return bytes(content)

    def close(self) -> None:
        """End the process; queries that run or wait fail."""
        self._closed = True
        self._calls.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _make_answer(run: Path | None, runs: Path, seconds: float) -> Callable[[Request], tuple[str, bytes]]:
    """Return what answers queries, with why it refuses one or its rows; runs in the process of queries."""
    with suppress(OSError):  # where the system ends a process for its memory, it is this one
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    logs = Logs(run, runs)

    def answer(request: Request) -> tuple[str, bytes]:
        names, query, kind = request
        try:
            if kind != PAGE:
                return "", logs.read(names, lambda log: export_rows(log.select(query, MOST, seconds), kind))
            found = logs.read(names, lambda log: run_query(log, query, seconds))
        except OmnidraftError as error:
            return str(error), b""
        return "", json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()

    return answer
