"""Compaction makes fewer parts with the same rows, and disturbs no reader, writer or other compaction."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from filelock import FileLock
from synthetic_runs import block, decision, small_run_events

from store.errors import CorruptError, OmnidraftError, RunError
from store.log.compaction import compact
from store.log.manifest import edit_manifest, part_path, read_manifest
from store.log.run_log import Commit, RunLog
from store.log.schema import COUNTS
from store.query.log_reader import VIEWS, LogReader


def run_of(folder: Path, commits: int, events=lambda offset: [decision(offset=offset)], close: bool = True) -> RunLog:
    """A log with one part per commit and table; `events` makes the events of one commit."""
    log = RunLog(folder)
    for offset in range(commits):
        for event in events(offset):
            log.append(event)
        log.commit(Commit(dict), wait=True)
    if close:
        log.finish()
    return log


def names(run: Path, table: str = "decisions") -> list[str]:
    return [Path(part.file).name for part in read_manifest(run).tables[table]]


def everything(run: Path) -> dict[str, list]:
    with LogReader([run]) as log:
        views = [view for view in VIEWS if view not in COUNTS]
        return {view: log.select(f"FROM {view} ORDER BY ALL").to_pylist() for view in views}


def age(run: Path, seconds: float) -> None:
    for path in run.rglob("*.parquet"):
        os.utime(path, (time.time() - seconds,) * 2)


def test_small_parts_become_one_with_the_same_rows_in_the_same_order(tmp_path):
    run_of(tmp_path, 3, lambda number: small_run_events()[number * 20 : number * 20 + 20])
    before = everything(tmp_path)
    done = compact(tmp_path)
    assert everything(tmp_path) == before
    assert names(tmp_path) == ["part-000001-000003.parquet"]
    (part,) = read_manifest(tmp_path).tables["decisions"]
    assert (part.first_offset, part.last_offset) == (0, max(row["offset"] for row in before["decisions"]))
    with LogReader([tmp_path], skip_damaged=True) as log:
        assert log.damaged == []
        seqs = log.select("SELECT seq FROM decisions")["seq"].to_pylist()
    assert seqs == list(range(len(before["decisions"])))
    assert (done.parts_before, done.parts_after) == (10, 4)
    assert done.bytes_after == sum(part.bytes for parts in read_manifest(tmp_path).tables.values() for part in parts)


def test_new_parts_join_what_was_joined_before(tmp_path):
    log = run_of(tmp_path, 2, close=False)
    compact(tmp_path, counted=1)
    log.append(decision(offset=2))
    log.finish()
    assert names(tmp_path) == ["part-000001-000002.parquet", "part-000003.parquet"]
    compact(tmp_path, counted=1)
    assert names(tmp_path) == ["part-000001-000003.parquet"]
    assert {table: names(tmp_path, table) for table in COUNTS} == dict.fromkeys(COUNTS, names(tmp_path))
    assert [row["offset"] for row in everything(tmp_path)["decisions"]] == [0, 1, 2]


def test_parts_are_joined_up_to_a_size_and_large_ones_stay(tmp_path):
    rows = [1, 1, 5, 1, 3, 1, 4]
    run_of(tmp_path, len(rows), lambda number: [decision(offset=number, position=at) for at in range(rows[number])])
    before = everything(tmp_path)
    compact(tmp_path, rows=8)
    assert names(tmp_path) == [
        "part-000001-000002.parquet",
        "part-000003.parquet",
        "part-000004-000006.parquet",
        "part-000007.parquet",
    ]
    assert [part.rows for part in read_manifest(tmp_path).tables["decisions"]] == [2, 5, 5, 4]
    assert everything(tmp_path) == before


def test_an_open_reader_can_continue_until_the_grace_time_ends(tmp_path):
    log = run_of(tmp_path, 3, close=False)
    compact(tmp_path, counted=1)
    log.append(decision(offset=3))
    log.finish()
    age(tmp_path, 10_000)
    with LogReader([tmp_path]) as early:
        assert compact(tmp_path, grace=5000, counted=1).removed == 3, "the parts that were replaced long ago"
        assert compact(tmp_path, grace=5000).removed == 0, "they were written long ago, but replaced just now"
        assert early.select("FROM decisions").num_rows == 4
        for table in COUNTS:
            assert early.select(f"SELECT sum(decisions) AS n FROM {table}").to_pylist() == [{"n": 4}], table
        age(tmp_path, 10_000)
        assert compact(tmp_path, grace=5000).removed == 2 + len(COUNTS)
    for table in ("decisions", *COUNTS):
        assert sorted(path.name for path in (tmp_path / "log" / table).iterdir()) == names(tmp_path, table)
    assert len(everything(tmp_path)["decisions"]) == 4


def test_parts_that_a_run_has_not_committed_yet_are_never_removed(tmp_path):
    log = RunLog(tmp_path, part_rows=1)
    log.append(decision())
    log.append(decision(offset=1))
    log.commit(Commit(dict), wait=True)
    log.append(decision(offset=2))  # a separate part, not committed
    log._jobs.join()
    age(tmp_path, 10_000)
    compact(tmp_path, grace=0)
    age(tmp_path, 10_000)
    assert compact(tmp_path, grace=0).removed == 2
    log.finish()
    assert [row["offset"] for row in everything(tmp_path)["decisions"]] == [0, 1, 2]


def test_leftovers_of_a_killed_compaction_are_removed(tmp_path):
    run_of(tmp_path, 2)
    left = tmp_path / "log" / "decisions" / ".joining-part-000001-000002.parquet"
    left.write_bytes(b"half")
    assert compact(tmp_path).removed == 1
    assert not left.exists()


@pytest.mark.parametrize(
    "place", ["store.log.compaction.os.fsync", "store.log.compaction.os.replace", "store.log.manifest.write_whole"]
)
def test_a_full_disk_leaves_the_log_unchanged(tmp_path, monkeypatch, place):
    run_of(tmp_path, 3)
    before = everything(tmp_path)

    monkeypatch.setattr(place, Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OmnidraftError, match=r"No space left.*compact again"):
        compact(tmp_path)
    monkeypatch.undo()
    assert (names(tmp_path)[0], everything(tmp_path)) == ("part-000001.parquet", before)
    assert compact(tmp_path).parts_after == 1
    assert (names(tmp_path), everything(tmp_path)) == (["part-000001-000003.parquet"], before)


def test_a_damaged_part_is_named_and_keeps_its_place_and_digest(tmp_path):
    run_of(tmp_path, 5)
    part = read_manifest(tmp_path).tables["decisions"][2]
    path = part_path(tmp_path, part)
    content = bytearray(path.read_bytes())
    content[40] ^= 4
    path.write_bytes(content)
    assert compact(tmp_path).damaged == (path,)
    assert names(tmp_path) == ["part-000001-000002.parquet", "part-000003.parquet", "part-000004-000005.parquet"]
    assert read_manifest(tmp_path).tables["decisions"][1] == part
    with LogReader([tmp_path], skip_damaged=True) as log:
        assert log.damaged == [path]
        assert log.select('SELECT "offset" FROM decisions')["offset"].to_pylist() == [0, 1, 3, 4]
        assert log.select("SELECT sum(decisions) AS n FROM counts_by_version").to_pylist() == [{"n": 4}]
        assert log.check().mismatches.num_rows == 0


def test_damaged_counts_are_counted_again_from_the_decisions(tmp_path):
    run_of(tmp_path, 2)
    compact(tmp_path, counted=1)
    (part,) = read_manifest(tmp_path).tables["counts_by_token"]
    part_path(tmp_path, part).unlink()
    with pytest.raises(CorruptError, match=r"counts_by_token.*--skip-damaged"):
        LogReader([tmp_path])
    with LogReader([tmp_path], skip_damaged=True) as log:
        for table in COUNTS:
            assert log.select(f"SELECT sum(decisions) AS n FROM {table}").to_pylist() == [{"n": 2}], table


def test_a_second_concurrent_compaction_is_refused(tmp_path):
    run_of(tmp_path, 2)
    with FileLock(tmp_path / "log" / ".compaction.lock"), pytest.raises(RunError, match="one compaction"):
        compact(tmp_path)


def test_parts_that_were_replaced_meanwhile_are_not_replaced_again(tmp_path, monkeypatch):
    import store.log.compaction as module

    run_of(tmp_path, 2)
    emptied = read_manifest(tmp_path)

    def edit_disturbed(run_folder, edit):
        monkeypatch.undo()
        tables = dict(emptied.tables) | {"decisions": emptied.tables["decisions"][1:]}
        edit_manifest(run_folder, lambda manifest: replace(manifest, tables=tables))
        return edit_manifest(run_folder, edit)

    monkeypatch.setattr(module, "edit_manifest", edit_disturbed)
    with pytest.raises(RunError, match="compact again"):
        compact(tmp_path)
    assert names(tmp_path) == ["part-000002.parquet"]


@pytest.mark.slow
def test_readers_always_see_whole_commits_while_a_run_writes_and_is_compacted(tmp_path):
    """Each commit adds three decisions, so every reader finds a multiple of three and no gap."""
    RunLog(tmp_path).close()
    over = threading.Event()
    failures: list[BaseException] = []
    seen: list[int] = []

    def until_over(work):
        while not over.is_set():
            try:
                work()
            except BaseException as error:
                failures.append(error)
                over.set()

    def read():
        with LogReader([tmp_path]) as log:
            for _ in range(2):
                (row,) = log.select(
                    'SELECT count(*) AS n, count(DISTINCT "offset") * 3 AS whole, coalesce(max("offset") + 1, 0) * 3 '
                    "AS up_to, (SELECT count(*) FROM blocks) * 3 AS blocks, "
                    "(SELECT coalesce(sum(decisions), 0) FROM counts_by_place) AS counted FROM decisions"
                ).to_pylist()
                assert len(set(row.values())) == 1, row
                seen.append(row["n"])

    threads = [threading.Thread(target=until_over, args=[read]) for _ in range(2)]
    threads.append(threading.Thread(target=until_over, args=[lambda: compact(tmp_path, rows=40, counted=20)]))
    with RunLog(tmp_path) as log:
        for thread in threads:
            thread.start()
        for offset in range(60):
            for position in range(3):
                log.append(decision(offset=offset, position=position, index=position))
            log.append(block(offset=offset))
            log.commit(Commit(dict), wait=True)
        over.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert len(set(seen)) > 3
    assert len(names(tmp_path)) < 60
    assert len(everything(tmp_path)["decisions"]) == 180
