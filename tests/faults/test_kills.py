"""A run that is killed at any point and resumed ends with the same rows as an uninterrupted one.

Kills at random instants are in `test_many_kills.py`.
"""

import signal
from pathlib import Path

import pytest
from faulty_runs import (
    Life,
    Stream,
    World,
    checkpoints,
    differences,
    rejected_of,
    resume_run,
    rows_of,
    strays,
)

from store.fault_points import VARIABLE
from store.log.compaction import compact
from store.log.manifest import read_manifest

PLACES = ("commit: inside the checkpoint", "commit: before the manifest", "commit: after the manifest")
# Kills the process just before one of the calls that change files.
BEFORE_A_CALL = """
import itertools, os, signal
calls = itertools.count(1)
def dying(real):
    def call(*arguments, **named):
        if next(calls) == {number}:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)
    return call
for name in ("fsync", "mkdir", "replace", "rmdir", "truncate", "unlink"):
    setattr(os, name, dying(getattr(os, name)))
"""


def next_life(stream: Stream, run: Path, world: World) -> Life:
    """Start the run, or resume it if it was started before."""
    begun = (run / "config.json").exists()
    return Life(world, ["replay", "--resume", run] if begun else stream.begin(run))


def assert_same(run: Path, whole: Path) -> None:
    assert differences(run, whole) == []
    assert strays(run) == set()


def test_the_stream_contains_everything_that_a_run_could_lose_and_leaves_no_stray_file(whole: Path):
    assert [row for row in rows_of(whole, "drifts") if row["action"] == "recall"]
    assert rows_of(whole, "recalls")
    served = [row for row in rows_of(whole, "updates") if row["part"] == "drafter" and row["served"]]
    assert len(served) >= 3
    assert len(rows_of(whole, "versions")) >= 3
    last = rows_of(whole, "versions")[-1]
    assert last["cache_version"] > last["cache_entries"], "n-grams were evicted: each changes the version once more"
    assert {row["rows"] for row in rows_of(whole, "blocks")} > {3}, "at the end one or two rows are in flight"
    assert {row["drafter"] for row in rows_of(whole, "blocks")} == {"model", "lookup", "memory"}
    assert {row["drafted"] > 0 for row in rows_of(whole, "blocks") if row["drafter"] == "model"} == {True, False}
    assert len(rejected_of(whole)) == 4
    assert strays(whole) == set()


@pytest.mark.representatives(1)
@pytest.mark.parametrize("place", PLACES)
def test_a_kill_inside_a_commit_changes_nothing(stream: Stream, whole: Path, tmp_path: Path, place: str):
    """The kills are at the first commit, then at the fourth and the second of the resumed processes."""
    run = tmp_path / "run"
    for count in (1, 4, 2):
        world = World(tmp_path / "world", environment={VARIABLE: f"{place}={count}"})
        assert next_life(stream, run, world).end().status == -signal.SIGKILL
        if count == 1 and place != PLACES[2]:
            assert read_manifest(run).checkpoint is None, "it starts from the beginning"
    assert_same(resume_run(run, tmp_path / "world"), whole)


def die_before_calls(stream: Stream, folder: Path, numbers: list[int]) -> Path:
    """Finish a run whose processes are killed in turn just before the calls of these numbers."""
    for number in numbers:
        world = World(folder / "world", before=BEFORE_A_CALL.format(number=number))
        ended = next_life(stream, folder / "run", world).end()
        assert ended.status == -signal.SIGKILL, ended.err
    return resume_run(folder / "run", folder / "world")


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("numbers", [[30, 9], [205, 40]])
def test_a_kill_between_two_changes_of_files_changes_nothing(
    stream: Stream, whole: Path, tmp_path: Path, numbers: list[int]
):
    assert_same(die_before_calls(stream, tmp_path, numbers), whole)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1, 16))
def test_kills_between_all_changes_of_files_change_nothing(stream: Stream, whole: Path, tmp_path: Path, first: int):
    """Calls 1 to 60 in turn each kill one process; a process that is killed at once makes no progress."""
    assert_same(die_before_calls(stream, tmp_path, [150, first, first + 15, first + 30, first + 45]), whole)


@pytest.mark.slow
def test_rejected_rows_after_the_last_commit_are_kept_once(stream: Stream, whole: Path, tmp_path: Path):
    """The run commits at its start and at its end only, so the first rejected row lies between two commits."""
    run, rare = tmp_path / "run", ["--set", "commit.seconds=10000"]
    life = Life(World(tmp_path / "world"), stream.begin(run, *rare))

    def committed_once_and_rejected_a_row() -> bool:
        return bool(checkpoints(run)) and (run / "rejected.jsonl").exists() and bool(rejected_of(run))

    # The log's writer thread commits: the row may be rejected before the first commit is on disk.
    assert life.wait_until(committed_once_and_rejected_a_row), life.errors()
    life.send(signal.SIGKILL)
    assert life.end().status == -signal.SIGKILL
    assert (checkpoints(run), read_manifest(run).rejected_bytes) == (1, 0)
    assert_same(resume_run(run, tmp_path / "world"), whole)


def joined_parts(run: Path) -> list[str]:
    """Parts that a compaction joined from others, such as `part-000001-000004`."""
    parts = (part for table in read_manifest(run).tables.values() for part in table)
    return [part.file for part in parts if Path(part.file).stem.count("-") == 2]


@pytest.mark.slow
def test_a_run_that_is_compacted_while_it_writes_and_killed_has_the_same_rows(
    stream: Stream, whole: Path, tmp_path: Path
):
    """The log is compacted repeatedly while the run writes, is killed in its middle, and resumes."""
    run, world = tmp_path / "run", World(tmp_path / "world")
    for die in (True, False):
        life = next_life(stream, run, world)
        while not life.ended:
            if checkpoints(run):
                compact(run)
            if die and checkpoints(run) > 6:
                life.send(signal.SIGKILL)
        assert life.end().status == (-signal.SIGKILL if die else 0)
    assert joined_parts(run)
    assert differences(run, whole) == []
