import json
import shutil
import threading
import time

import pyarrow.parquet as pq
import pytest
from synthetic_runs import change_manifest, decision, write_run

from store.errors import CorruptError, OmnidraftError, RunError
from store.events import PromptRejected
from store.files import write_whole
from store.log import parts as parts_module
from store.log import run_log as run_log_module
from store.log.manifest import MANIFEST, part_path, read_manifest
from store.log.partitions import create_worker_partition, open_partition
from store.log.run_log import Commit, RunLog
from store.log.schema import TABLES


def visible_rows(run, table="decisions"):
    return sum(part.rows for part in read_manifest(run).tables[table])


def test_rows_become_visible_with_a_forced_commit_only(tmp_path):
    with RunLog(tmp_path / "run", part_rows=2) as log:
        for offset in range(5):
            log.append(decision(offset=offset))
        assert visible_rows(tmp_path / "run") == 0
        log.commit(Commit(dict), wait=True)
        assert visible_rows(tmp_path / "run") == 5
        log.append(decision(offset=5))
        assert visible_rows(tmp_path / "run") == 5
    assert visible_rows(tmp_path / "run") == 6


def test_parts_hold_part_rows_and_keep_order_and_offsets(tmp_path):
    with RunLog(tmp_path, part_rows=2) as log:
        for offset in (4, 3, 5, 6, 9):
            log.append(decision(offset=offset))
    parts = read_manifest(tmp_path).tables["decisions"]
    assert [(part.rows, part.first_offset, part.last_offset) for part in parts] == [(2, 3, 4), (2, 5, 6), (1, 9, 9)]
    assert [part.file for part in parts] == [f"decisions/part-00000{number}.parquet" for number in (1, 2, 3)]
    rows = [row for part in parts for row in pq.read_table(part_path(tmp_path, part)).to_pylist()]
    assert [(row["seq"], row["offset"]) for row in rows] == list(enumerate([4, 3, 5, 6, 9]))


def test_waiting_for_the_disk_is_no_cost_of_a_commit(tmp_path, monkeypatch):
    written = run_log_module.write_checkpoint
    monkeypatch.setattr(run_log_module, "write_checkpoint", lambda *given: (time.sleep(1), written(*given))[1])
    with RunLog(tmp_path) as log:
        log.append(decision())
        began = time.monotonic()
        log.commit(Commit(dict), wait=True)
        assert 0 < log.commit_seconds <= time.monotonic() - began - 1


def test_a_rejected_row_is_written_as_a_line_of_json_immediately(tmp_path):
    with RunLog(tmp_path) as log:
        log.append(PromptRejected("docs", 3, "broken “JSON”\n"))
        (line,) = (tmp_path / "rejected.jsonl").read_text("utf-8").splitlines()
        assert json.loads(line) == {"dataset": "docs", "line": 3, "reason": "broken “JSON”\n"}
        log.append(PromptRejected("docs", 9, "empty"))
    assert len((tmp_path / "rejected.jsonl").read_text("utf-8").splitlines()) == 2


def test_uncommitted_rows_are_dropped_on_resume(tmp_path):
    def interrupted_run():
        with RunLog(tmp_path, part_rows=1) as log:
            log.append(decision())
            log.append(PromptRejected("docs", 3, "empty"))
            log.commit(Commit(lambda: {"state.json": b"{}"}), wait=True)
            log.append(decision(offset=1))
            log.append(PromptRejected("docs", 4, "empty"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_run()
    assert visible_rows(tmp_path) == 1
    assert len(list(tmp_path.rglob("*.parquet"))) == 2
    with RunLog(tmp_path) as log:
        assert len(list(tmp_path.rglob("*.parquet"))) == 1
        assert len((tmp_path / "rejected.jsonl").read_text().splitlines()) == 1
        log.append(decision(offset=1))
    parts = read_manifest(tmp_path).tables["decisions"]
    rows = [row for part in parts for row in pq.read_table(part_path(tmp_path, part)).to_pylist()]
    assert [(row["seq"], row["offset"]) for row in rows] == [(0, 0), (1, 1)]


def test_parts_that_a_compaction_replaced_stay_for_their_readers_when_a_run_resumes(tmp_path):
    log = RunLog(tmp_path, part_rows=1)
    for offset in range(2):
        log.append(decision(offset=offset))
    log.commit(Commit(dict), wait=True)
    log.append(decision(offset=2))
    log._jobs.join()
    log.close()
    counts = tmp_path / "log" / "counts_by_token" / "part-000001-000002.parquet"  # of a part that was joined again
    counts.write_bytes(b"replaced")
    RunLog(tmp_path).close()
    assert counts.exists()
    names = sorted(path.name for path in (tmp_path / "log" / "decisions").iterdir())
    assert names == ["part-000001.parquet", "part-000002.parquet"], "the third was never committed"


def full_disk(path, content):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["append", "commit", "finish"])
def test_a_failing_disk_surfaces_on_the_next_call_and_leaves_the_committed_rows(tmp_path, monkeypatch, call):
    log = RunLog(tmp_path, part_rows=2)
    log.append(decision())
    log.commit(Commit(dict), wait=True)
    monkeypatch.setattr(parts_module, "write_whole", full_disk)
    log.append(decision(offset=1))
    log.append(decision(offset=2))
    log._jobs.join()
    calls = {"append": lambda: log.append(decision()), "commit": lambda: log.commit(Commit(dict)), "finish": log.finish}
    with pytest.raises(OmnidraftError, match="No space left") as raised:
        calls[call]()
    assert isinstance(raised.value.__cause__, OSError)
    monkeypatch.undo()
    log.close()
    assert visible_rows(tmp_path) == 1
    assert not log._writer.is_alive()


def test_nothing_is_published_after_a_part_was_lost(tmp_path, monkeypatch):
    failures = [OSError("one bad moment")]

    def fail_once(path, content):
        if failures:
            raise failures.pop()
        write_whole(path, content)

    log = RunLog(tmp_path, part_rows=1)
    monkeypatch.setattr(parts_module, "write_whole", fail_once)
    log._jobs.put(lambda: log._files.parts.write("decisions", [decision()]))
    log._jobs.put(lambda: log._files.parts.write("decisions", [decision(offset=1)]))
    with pytest.raises(OmnidraftError, match="one bad moment"):
        log.finish()
    assert not failures
    assert visible_rows(tmp_path) == 0
    assert list(tmp_path.rglob("*.parquet")) == []


def test_append_waits_for_the_disk_so_memory_is_bounded(tmp_path, monkeypatch):
    disk = threading.Event()
    encode = parts_module.parquet_bytes
    monkeypatch.setattr(parts_module, "parquet_bytes", lambda *rows: disk.wait() and encode(*rows))
    log = RunLog(tmp_path, part_rows=1, queue_parts=2)
    appended = []

    def produce():
        for offset in range(6):
            log.append(decision(offset=offset))
            appended.append(offset)

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    deadline = time.monotonic() + 60
    while len(appended) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    producer.join(timeout=0.2)
    assert producer.is_alive()
    assert len(appended) == 3  # one being written, two in the queue
    disk.set()
    producer.join()
    log.finish()
    assert visible_rows(tmp_path) == 6


def test_a_second_log_in_the_same_folder_is_refused(tmp_path):
    write_run(tmp_path, [decision()])
    with pytest.raises(RunError, match="--run"):
        RunLog(tmp_path)
    assert visible_rows(tmp_path) == 1


def everything_in(folder):
    return {path.relative_to(folder).as_posix(): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def lose_manifest(folder, left):
    """Write a log, then remove its manifest and everything but one kind of file."""
    log = RunLog(folder, part_rows=1)
    log.append(decision())
    log.append(PromptRejected("docs", 3, "empty"))
    log.commit(Commit(lambda: {"state.json": b"{}"}), wait=True)
    log.close()
    for path in ("versions/0000/weights", "log/decisions/.part-000002.parquet.tmp"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    RunLog(create_worker_partition(folder)).close()
    (folder / MANIFEST).unlink()
    assert (folder / left).exists()
    for path in folder.rglob("*"):
        if path.is_file() and path != folder / left and folder / left not in path.parents:
            path.unlink()


@pytest.mark.parametrize(
    "left",
    [
        "log/decisions/part-000001.parquet",
        "log/decisions/.part-000002.parquet.tmp",
        "checkpoint/000001",
        "versions/0000",
        "rejected.jsonl",
        "partitions/worker-000/log/manifest.json",
    ],
)
@pytest.mark.parametrize("open_log", [RunLog, lambda folder: open_partition(folder.parents[1], folder.name)])
def test_a_log_whose_manifest_is_lost_is_neither_resumed_nor_replaced(tmp_path, open_log, left):
    folder = tmp_path / "partitions" / "learner"
    folder.mkdir(parents=True)
    lose_manifest(folder, left)
    for root in ("versions", "checkpoint", "partitions"):  # empty folders do not count as data
        if (folder / root).exists() and not left.startswith(root):
            shutil.rmtree(folder / root)
    before = everything_in(tmp_path)
    with pytest.raises(CorruptError, match=r"manifest\.json must be there.*Restore the manifest") as refused:
        open_log(folder)
    assert left in str(refused.value)
    assert everything_in(tmp_path) == before


def test_files_from_before_the_first_manifest_do_not_count_as_a_lost_log(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".lock").touch()
    for table in TABLES:
        (tmp_path / "log" / table).mkdir(parents=True)
    (tmp_path / "log" / ".manifest.json.tmp").write_text("{")
    (tmp_path / "log" / ".manifest.lock").touch()
    with RunLog(tmp_path) as log:
        log.append(decision())
    assert visible_rows(tmp_path) == 1


def test_a_folder_without_a_log_and_a_log_of_another_version_are_refused(tmp_path):
    with pytest.raises(RunError, match="--run"):
        read_manifest(tmp_path)
    run = write_run(tmp_path / "run", [])
    change_manifest(run, lambda content: content.update(schema_version=99))
    with pytest.raises(RunError, match="99"):
        read_manifest(run)


def test_a_closed_log_refuses_events_and_may_be_closed_again(tmp_path):
    log = RunLog(tmp_path)
    log.close()
    log.close()
    with pytest.raises(RunError, match="closed"):
        log.append(decision())
