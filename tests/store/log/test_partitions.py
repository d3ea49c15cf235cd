"""Readers see a run of several writers as one run; a worker that was declared dead can no longer commit."""

from pathlib import Path

import pytest
from synthetic_runs import make_update, prompt, small_run_events, write_run

from store.errors import OmnidraftError, RunError
from store.events import Event, PromptRejected
from store.log.compaction import compact
from store.log.manifest import read_manifest
from store.log.partitions import (
    LEARNER,
    close_partition,
    committed_at,
    create_worker_partition,
    named_parts,
    partition_folder,
)
from store.log.parts import completed_prompts
from store.log.run_log import Commit, RunLog
from store.query.log_reader import VIEWS, LogReader, recipes
from store.query.summary import summarize

OF_A_PROMPT = ("TokenDecision", "BlockDone", "PromptCompleted")


def write_partitions(folder: Path, events: list[Event], workers: int = 2) -> Path:
    """Write the events as a run of the learner and so many workers."""
    write_run(folder, [event for event in events if isinstance(event, PromptRejected)])
    learner = [event for event in events if type(event).__name__ not in (*OF_A_PROMPT, "PromptRejected")]
    write_run(partition_folder(folder, LEARNER), learner)
    for number in range(workers):
        mine = [event for event in events if type(event).__name__ in OF_A_PROMPT and event.offset % workers == number]
        write_run(create_worker_partition(folder), mine)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("whole") / "run", small_run_events())


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_partitions(tmp_path_factory.mktemp("parted") / "run", small_run_events())


def rows_of(run: Path, query: str) -> list[dict]:
    with LogReader([run]) as log:
        return log.select(query).to_pylist()


@pytest.mark.parametrize("view", VIEWS)
def test_the_views_have_the_same_rows(whole: Path, parted: Path, view: str):
    unordered = {"seq"} if view != "tokens" else set()

    def rows(run: Path) -> list[str]:
        found = rows_of(run, f"FROM {view}")
        return sorted(repr({name: value for name, value in row.items() if name not in unordered}) for row in found)

    if view.startswith("counts"):
        assert total(rows_of(whole, f"FROM {view}")) == total(rows_of(parted, f"FROM {view}"))
    else:
        assert rows(whole) == rows(parted)
        assert rows(whole) or view == "recalls"


def total(counts: list[dict]) -> int:
    return sum(row["decisions"] for row in counts)


@pytest.mark.parametrize("recipe", sorted(recipes()))
def test_the_recipes_give_the_same_rows(whole: Path, parted: Path, recipe: str):
    with LogReader([whole]) as one, LogReader([parted]) as other:
        assert one.recipe(recipe).to_pylist() == other.recipe(recipe).to_pylist()


def test_the_summary_and_the_check_are_those_of_one_run(whole: Path, parted: Path):
    assert summarize(parted) == summarize(whole)
    parts = named_parts(parted, "decisions")
    assert {folder.name for folder, _ in parts} == {"worker-000", "worker-001"}
    rows = sum(part.rows for _, part in parts)
    with LogReader([parted]) as log:
        found = log.check()
    assert (found.decisions, found.mismatches.num_rows, found.miscounts.num_rows) == (rows, 0, 0)


def test_partitions_are_compacted_separately_and_counts_stay_correct(tmp_path: Path):
    run = tmp_path / "run"
    write_run(run, [])
    for _ in range(2):
        with RunLog(create_worker_partition(run), part_rows=2) as log:
            for event in small_run_events():
                if type(event).__name__ in OF_A_PROMPT:
                    log.append(event)
    before = rows_of(run, "FROM decisions ORDER BY ALL")
    done = compact(run, counted=1)
    assert done.parts_before > done.parts_after
    assert len(named_parts(run, "decisions")) == len(named_parts(run, "counts_by_token")) == 2
    assert rows_of(run, "FROM decisions ORDER BY ALL") == before
    with LogReader([run]) as log:
        assert log.check().miscounts.num_rows == 0


def test_a_commit_of_a_partition_advances_the_commit_time_of_the_run(tmp_path: Path):
    run = write_partitions(tmp_path / "run", small_run_events())
    before = committed_at(run)
    with RunLog(create_worker_partition(run)) as log:
        log.append(make_update())
    assert committed_at(run) > before
    assert committed_at(run / "nothing") == 0.0


def test_a_worker_that_was_declared_dead_can_no_longer_commit(tmp_path: Path):
    folder = create_worker_partition(tmp_path)
    log = RunLog(folder)
    log.append(prompt(offset=0))
    log.commit(Commit(dict), wait=True)
    log.append(prompt(offset=1))
    closed = close_partition(folder)
    assert [part.rows for part in closed.tables["prompts"]] == [1]
    with pytest.raises(OmnidraftError, match="it is finished"):
        log.commit(Commit(dict), wait=True)
    log.close()
    assert read_manifest(folder) == close_partition(folder) == closed
    assert [event.offset for event in completed_prompts(folder)] == [0]
    with pytest.raises(RunError):
        RunLog(folder)
