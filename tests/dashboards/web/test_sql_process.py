"""Queries of visitors end at their time limit, whatever DuckDB does, and pages are served in the meantime."""

import asyncio
import itertools
import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from serving_runs import Serve, serve_dashboards
from sql_bombs import BOMBS
from stream_making import append, prompt, stream, write

from dashboards.web import app
from dashboards.web.logs import BusyError
from dashboards.web.sql_process import MOST_WAITING, QUERY_BYTES, SqlProcess
from store.errors import QueryError, UsageError
from store.log.run_log import RunLog

COUNT = "SELECT count(*) FROM prompts"
# DuckDB checks for no interrupt while it computes the first.
FUNCTION, ROWS = BOMBS["texts: levenshtein"], BOMBS["rows: product"]
LIMIT, GRACE = 1.0, 30.0  # seconds: the limit of a bomb, and what a busy machine takes to end it


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write(tmp_path / "runs" / "a", stream(20))
    return tmp_path / "runs"


@pytest.fixture
def queries(runs: Path) -> Iterator[SqlProcess]:
    """A process with a time limit that no query of these tests reaches on a busy machine."""
    found = SqlProcess(None, runs, seconds=60.0)
    yield found
    found.close()


def end_at_limit(queries: SqlProcess, query: str, words: str) -> None:
    """Run a query that takes longer than a limit of 0.3 s."""
    before, queries._seconds = queries._seconds, 0.3
    with pytest.raises(QueryError, match=words):
        queries.run([], query)
    queries._seconds = before


def rows(queries: SqlProcess, query: str, *names: str) -> list[list[Any]]:
    return json.loads(queries.run(names, query))["rows"]


def test_queries_are_answered_by_one_other_process(queries: SqlProcess):
    assert queries.pid is None, "the first query starts the process"
    assert rows(queries, COUNT) == [[20]]
    first = queries.pid
    assert first not in (None, os.getpid())
    assert rows(queries, COUNT, "a") == [[20]]
    assert queries.pid == first


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("SELECT nothing", "must be one that DuckDB can run"),
        ("DROP VIEW prompts", "must be one SELECT statement"),
        ("SELECT '\ud800'", "must be valid Unicode"),
        (COUNT + " " * QUERY_BYTES, f"must have at most {QUERY_BYTES} bytes"),
    ],
)
def test_a_refused_query_is_explained_and_the_process_stays(queries: SqlProcess, query: str, words: str):
    assert rows(queries, COUNT) == [[20]]
    before = queries.pid
    with pytest.raises(QueryError, match=words):
        queries.run([], query)
    assert queries.pid == before


def test_an_unknown_run_is_refused(queries: SqlProcess):
    with pytest.raises(UsageError, match="a run must be one of a; got b"):
        queries.run(["b"], COUNT)


@pytest.mark.slow
@pytest.mark.parametrize("query", [FUNCTION, ROWS], ids=["a function", "rows"])
def test_a_query_ends_at_its_limit_and_the_next_one_is_answered(queries: SqlProcess, query: str):
    assert rows(queries, "SELECT 1") == [[1]], "its process has started"
    end_at_limit(queries, query, r"must be done within 0\.3 s")
    assert rows(queries, "SELECT 1") == [[1]]


def test_there_are_sixty_bombs():
    assert len(BOMBS) == len(set(BOMBS.values())) == 60
    assert max(map(len, BOMBS.values())) <= QUERY_BYTES, "no bomb is refused for its length"


@pytest.mark.slow
@pytest.mark.representatives(4)
@pytest.mark.parametrize("name", BOMBS)
def test_every_bomb_ends_at_its_limit(queries: SqlProcess, name: str, record_property):
    assert rows(queries, "SELECT 1") == [[1]], "its process has started"
    queries._seconds = LIMIT
    began, ended = time.monotonic(), "answered"
    try:
        queries.run([], BOMBS[name])
    except QueryError as error:
        ended = str(error).partition("\n")[0][:100]
    seconds = time.monotonic() - began
    record_property("ended", f"{seconds:.2f} s: {ended}")
    assert seconds <= LIMIT + GRACE, ended
    queries._seconds = 60.0
    assert rows(queries, "SELECT 1") == [[1]], "the next query is answered"


def test_a_process_that_is_killed_is_started_again(queries: SqlProcess):
    assert rows(queries, COUNT) == [[20]]
    assert queries.pid
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(queries.run, [], FUNCTION)
        with pytest.raises(TimeoutError):
            sent.result(timeout=0.2)  # it is running
        os.kill(queries.pid, signal.SIGKILL)  # as the system does when memory runs out
        with pytest.raises(QueryError, match="its process was ended"):
            sent.result(timeout=30)
    assert rows(queries, COUNT) == [[20]]


def test_a_new_commit_is_visible(tmp_path: Path):
    with RunLog(tmp_path / "runs" / "a") as log:
        append(log, [prompt(0)], commit=True)
        queries = SqlProcess(None, tmp_path / "runs")
        assert rows(queries, COUNT) == [[1]]
        append(log, [prompt(1)], commit=True)
        assert rows(queries, COUNT) == [[2]]
    queries.close()
    with pytest.raises(QueryError, match="before the dashboards end"):
        queries.run([], COUNT)


def test_a_limited_number_of_queries_waits(queries: SqlProcess):
    async def send_many() -> list[object]:
        sent = [queries.answer([], COUNT) for _ in range(MOST_WAITING + 3)]
        return await asyncio.gather(*sent, return_exceptions=True)

    found = asyncio.run(send_many())
    assert [type(one) for one in found] == [bytes] * (MOST_WAITING + 1) + [BusyError] * 2
    assert json.loads(asyncio.run(queries.answer([], COUNT)))["rows"] == [[20]], "another query is accepted again"


def post(address: str, query: str) -> tuple[int, Any]:
    content = json.dumps({"runs": [], "query": query}).encode()
    request = urllib.request.Request(f"{address}/api/sql", content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def test_pages_are_answered_while_slow_queries_run(serve: Serve, runs: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[SqlProcess] = []

    def make(run: Path | None, runs: Path) -> SqlProcess:
        made.append(SqlProcess(run, runs, seconds=600.0))
        return made[0]

    monkeypatch.setattr("dashboards.web.app.SqlProcess", make)
    address = serve(runs)
    assert post(address, COUNT)[1]["rows"] == [[20]]
    with ThreadPoolExecutor(60) as threads:
        sent = [threads.submit(post, address, FUNCTION) for _ in range(60)]
        refused = list(itertools.islice(as_completed(sent), 60 - MOST_WAITING - 1))
        assert {one.result()[0] for one in refused} == {429}
        assert "try again" in refused[0].result()[1]["error"]
        for path in ("/stream", "/api/stream", "/api/states", "/api/ngrams", "/api/versions"):
            with urllib.request.urlopen(address + path, timeout=60) as answer:
                assert answer.status == 200
        slow = [one for one in sent if not one.done()]
        assert len(slow) == MOST_WAITING + 1, "the others still run and wait"
        made[0].close()
        assert {one.result()[0] for one in slow} == {400}


def read_all(connection: socket.socket) -> bytes:
    read = b""
    while part := connection.recv(1 << 16):
        read += part
    return read


def send(address: str, head: str, body: bytes = b"") -> bytes:
    """Send a request to `/api/sql` and read until the server closes the connection."""
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        start = f"POST /api/sql HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{head}\r\n\r\n"
        connection.sendall(start.encode() + body)
        return read_all(connection)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "body", "status", "words"),
    [
        ("Content-Length: 60000000", b"{", 413, b"at most 524288 bytes, got 60000000"),
        ("Transfer-Encoding: chunked", b"90000\r\n" + b"x" * 0x90000 + b"\r\n", 413, b"at most 524288 bytes"),
        ("Content-Length: 100", b'{"runs": [', 408, b"within 0.3 seconds"),
        ("Content-Length: 5\r\nTransfer-Encoding: chunked", b"0\r\n\r\n", 400, b"got both"),
    ],
    ids=["long", "without a length", "half", "two lengths"],
)
def test_request_bodies_are_bounded(
    runs: Path, monkeypatch: pytest.MonkeyPatch, head: str, body: bytes, status: int, words: bytes
):
    if status == 408:
        monkeypatch.setattr(app, "BODY_SECONDS", 0.3)
    with serve_dashboards(runs) as address:
        answer = send(address, head, body)
    assert int(answer.split(b" ", 2)[1]) == status, answer
    assert words in answer
    assert b"default-src 'none'" in answer, "it has the headers of every response"
