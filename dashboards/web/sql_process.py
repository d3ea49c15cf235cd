"""SQL of visitors, in a process of its own that is ended when a query passes its time limit.

    this process                                    the process of queries
    run() -> one thread, few may wait   ==pipe==>   Logs.read(...), one query at a time, at a lower priority

DuckDB can be interrupted between two steps of a query, but not while it plans one or computes one huge value. A process
can be ended at any time. It is started by the first query, keeps its snapshots of logs, and is started again after it
was ended.
"""

import asyncio
import json
import os
import signal
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from dashboards.web.logs import BusyError, Logs
from dashboards.web.queries.tables import export_query, run_query
from store.errors import OmnidraftError, QueryError

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

SECONDS = 20.0  # after which DuckDB is interrupted
SPARE_SECONDS = 0.5  # in which an interrupted query must end before its process is ended
START_SECONDS = 60.0
QUERY_BYTES = 64 << 10  # planning a longer one takes more time than its rows are worth
MOST_WAITING = 3  # queries that wait for the one that runs
PAGE = "page"  # kind of an answer that is shown; others are files
NICENESS = 10  # pages come first
_CLOSED = "a query must come before the dashboards end; start them again"
_ROWS, _REFUSED, _FAILED = b"r", b"x", b"f"  # first byte of an answer; the rest is JSON, or a message


class SqlProcess:
    """Answers queries in a process of its own.

    Args:
        run: folder of one run; None for all runs in `runs`.
        runs: folder of runs.
        seconds: time limit of a query; None for `SECONDS`.
    """

    def __init__(self, run: Path | None, runs: Path, seconds: float | None = None) -> None:
        self._run, self._runs = run, runs
        self._seconds = SECONDS if seconds is None else seconds
        self._context = get_context("spawn")
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._thread = ThreadPoolExecutor(1, "dashboard-sql")
        self._pending = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Number of the process; None while there is none."""
        return self._process.pid if self._process else None

    async def answer(self, names: Sequence[str], query: str, kind: str = PAGE) -> bytes:
        """Run a query when its turn comes. Called on the event loop; raises as `run`.

        Raises:
            BusyError: more than `MOST_WAITING` queries wait.
        """
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
        """Run a query over the named runs. Called by one thread at a time.

        Returns:
            For `PAGE` what `run_query` returns, as JSON; for another kind the file of `export_rows`.

        Raises:
            QueryError: the query is too long, not allowed or not valid, or its process was ended: at the time limit, or
                by the system for its memory.
            UsageError: as `Logs.choose_runs`.
        """
        size = len(query.encode(errors="surrogatepass"))
        if size > QUERY_BYTES:
            raise QueryError(f"a query must have at most {QUERY_BYTES} bytes, got {size}; use `omnidraft sql`")
        connection = self._connect()
        try:
            connection.send_bytes(json.dumps([list(names), query, kind]).encode())
            if not connection.poll(self._seconds + SPARE_SECONDS):
                self._end()
                raise QueryError(
                    f"the query must be done within {self._seconds:g} s, but it was not and was ended; "
                    "select less, or use `omnidraft sql`"
                )
            answer = connection.recv_bytes()
        except (EOFError, OSError) as error:
            self._end()
            raise QueryError("the query must fit into memory, but its process was ended; select less") from error
        return _open_answer(answer)

    def close(self) -> None:
        """End the process; queries that run or wait fail."""
        self._closed = True
        self._end()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _connect(self) -> Connection:
        """Return the connection to the process, which is started if there is none."""
        if self._connection and self._process and self._process.is_alive():
            return self._connection
        self._end()
        if self._closed:
            raise QueryError(_CLOSED)
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._run, self._runs, self._seconds)
        self._process = self._context.Process(target=_answer_queries, args=arguments, name="sql", daemon=True)
        self._process.start()
        theirs.close()
        self._connection = ours
        try:
            if ours.poll(START_SECONDS):
                ours.recv_bytes()
                return ours
        except (EOFError, OSError):
            pass
        self._end()
        raise QueryError(f"the process of queries must start within {START_SECONDS:g} s, but did not; try again")

    def _end(self) -> None:
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if process:
            process.kill()
            process.join()
        if connection:
            connection.close()


def _open_answer(answer: bytes) -> bytes:
    kind, content = answer[:1], answer[1:]
    if kind == _REFUSED:
        raise QueryError(content.decode())
    if kind == _FAILED:
        raise RuntimeError(content.decode())
    return content


def _answer_queries(connection: Connection, run: Path | None, runs: Path, seconds: float) -> None:
    """Answer queries until the server is gone; the main function of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is meant for the server, which then ends this process
    threading.Thread(target=_exit_with_server, name="server-monitor", daemon=True).start()
    with suppress(OSError):
        os.nice(NICENESS)
    with suppress(OSError):  # where the system ends a process for its memory, it is this one
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    logs = Logs(run, runs)
    connection.send_bytes(b"")
    with suppress(EOFError, OSError):
        while True:
            names, query, kind = json.loads(connection.recv_bytes())
            connection.send_bytes(_answer_query(logs, names, query, kind, seconds))


def _answer_query(logs: Logs, names: Sequence[str], query: str, kind: str, seconds: float) -> bytes:
    try:
        if kind != PAGE:
            return _ROWS + logs.read(names, lambda log: export_query(log, query, kind, seconds))
        found = logs.read(names, lambda log: run_query(log, query, seconds))
        return _ROWS + json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except OmnidraftError as error:
        return _REFUSED + str(error).encode(errors="backslashreplace")
    except Exception as error:
        traceback.print_exc()
        return _FAILED + type(error).__name__.encode()


def _exit_with_server() -> None:
    """Exit as soon as the server ends, also during a query."""
    if server := parent_process():
        server.join()
        os._exit(1)
