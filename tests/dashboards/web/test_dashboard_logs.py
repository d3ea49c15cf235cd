"""Snapshots of logs that change while they are read."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from stream_making import append, prompt, write

from dashboards.web.logs import MOST_WAITING, BusyError, Logs
from store.errors import QueryError, RunError, UsageError
from store.log.manifest import MANIFEST, PREVIOUS
from store.log.partitions import create_worker_partition
from store.log.run_log import RunLog
from store.query.log_reader import LogReader


def prompts(log: LogReader) -> int:
    return int(log.select("SELECT count(*) AS n FROM prompts").to_pylist()[0]["n"])


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_a_snapshot_is_reused_until_the_next_commit(runs: Path):
    logs, seen = Logs(None, runs), []

    def query(log: LogReader) -> int:
        seen.append(log)
        return prompts(log)

    with RunLog(runs / "a") as log:
        append(log, [prompt(0)], commit=True)
        assert [logs.read([], query), logs.read(["a"], query)] == [1, 1]
        append(log, [prompt(1)], commit=True)
        assert logs.read([], query) == 2
    assert seen[0] is seen[1] is not seen[2]
    logs.close()


def test_a_commit_of_a_partition_is_visible(runs: Path):
    logs = Logs(None, runs)
    with RunLog(runs / "a") as log:
        append(log, [prompt(0)], commit=True)
        assert logs.read([], prompts) == 1
        with RunLog(create_worker_partition(runs / "a")) as worker:
            append(worker, [prompt(1)], commit=True)
            assert logs.read([], prompts) == 2
        assert [(state.name, state.prompts, state.activity) for state in logs.states()] == [("a", 2, "running")]
    logs.close()


def test_a_query_that_fails_because_parts_were_replaced_is_repeated(runs: Path):
    logs, tries = Logs(None, runs), []
    with RunLog(runs / "a") as log:
        append(log, [prompt(0)], commit=True)

        def query(reader: LogReader) -> int:
            tries.append(reader)
            if len(tries) == 1:
                append(log, [prompt(1)], commit=True)
                raise QueryError("a part is gone")
            return prompts(reader)

        assert logs.read(["a"], query) == 2
    assert len(tries) == 2
    logs.close()


def test_a_removed_run_is_reported(runs: Path):
    folder = write(runs / "a", [prompt(0)])
    logs = Logs(folder, runs)
    assert logs.read([], prompts) == 1
    (folder / MANIFEST).unlink()
    assert logs.read([], prompts) == 1, "the previous manifest stands in"
    (folder / PREVIOUS).unlink()
    with pytest.raises(RunError, match=r"manifest.json must be the manifest of a run"):
        logs.read([], prompts)
    logs.close()


def test_the_run_with_the_last_commit_is_shown_first(runs: Path):
    for name in ("b", "a", "c"):
        write(runs / name, [])
    assert list(Logs(None, runs).choose_runs([])) == ["c"]
    assert [state.name for state in Logs(None, runs).states(["a", "b"])] == ["a", "b"]
    with pytest.raises(UsageError, match="got d"):
        Logs(None, runs).choose_runs(["a", "d"])


def test_a_query_waits_for_a_limited_time(runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dashboards.web.logs.TURN_TIMEOUT", 0.01)
    write(runs / "a", [prompt(0)])
    logs = Logs(None, runs)
    with ThreadPoolExecutor() as threads:

        def another(_: LogReader) -> None:
            with pytest.raises(UsageError, match="another query is still running"):
                threads.submit(logs.read, [], prompts).result(timeout=30)

        logs.read([], another)
        assert logs.read([], prompts) == 1
    logs.close()


def test_few_queries_wait_so_that_threads_remain_for_pages(runs: Path):
    write(runs / "a", [prompt(0)])
    logs, begun, go = Logs(None, runs), threading.Event(), threading.Event()

    def hold(_: LogReader) -> None:
        begun.set()
        go.wait(30)

    with ThreadPoolExecutor(MOST_WAITING + 1) as threads:
        held = threads.submit(logs.read, [], hold)
        begun.wait(30)
        waiting = [threads.submit(logs.read, [], prompts) for _ in range(MOST_WAITING)]
        while logs._places._value:  # until all of them wait
            time.sleep(0.001)
        with pytest.raises(BusyError, match=f"{MOST_WAITING} queries wait already"):
            logs.read([], prompts)
        go.set()
        assert [held.result(), *(one.result() for one in waiting)] == [None, *[1] * MOST_WAITING]
    assert logs.read([], prompts) == 1, "another query is accepted again"
    logs.close()
