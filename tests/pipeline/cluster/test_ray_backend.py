"""Several workers on Ray: the same texts as one process, every prompt once, also when workers or the learner die."""

import json
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray")

from replaying import config_of
from scaling import (
    RecordingDisplay,
    assert_whole,
    count_committed_prompts,
    find_owner,
    kill_owner,
    many_prompts,
    replay_on_cluster,
    replay_texts,
    run_in_parallel,
    select_rows,
    start_replay_command,
    wait_until,
)
from tiny_pair import TinyPair

from pipeline.cluster.run import WORKERS
from pipeline.config.settings import Config
from store.errors import ModelError, RunError, SourceError, UsageError
from store.log.manifest import edit_manifest
from store.log.partitions import LEARNER, partition_folder, worker_folders
from store.query.summary import SUMMARY

pytestmark = pytest.mark.timeout(900)  # every process loads its libraries and models

PROMPTS = 30
SERVED = "FROM updates WHERE part = 'drafter' AND served ORDER BY seq"


@pytest.fixture(scope="module")
def config(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return config_of(
        tiny_pair,
        sources=(str(many_prompts(tmp_path_factory.mktemp("stream"), PROMPTS)),),
        sampling__max_new_tokens=32,
        batch=2,
        learn__spacing="fixed",
        commit__seconds=0.2,
    )


@pytest.fixture(scope="module")
def texts(config: Config, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """The texts of a replay in one process."""
    return replay_texts(config, tmp_path_factory.mktemp("embedded") / "run")


@pytest.mark.representatives(1)
@pytest.mark.sweep
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_texts_of_one_process(ray_address, config, texts, tmp_path: Path, workers: int):
    run = tmp_path / "run"
    summary, display = replay_on_cluster(config, run, ray_address, workers)
    assert_whole(run, texts)
    assert summary["totals"]["prompts"] == PROMPTS
    assert summary["rejected_rows"] == 3
    assert len(worker_folders(run)) == workers
    assert all(select_rows(run, "SELECT max(drafter_version) AS v FROM decisions"))
    assert display.notes == []
    assert sorted(display.completed) == [offset for offset, _ in texts]
    assert [pair["drafter"] for pair in json.loads((run / "vocabulary.json").read_text())] == [config.drafter]


@pytest.mark.slow
def test_a_dead_worker_s_prompts_are_decoded_by_others_and_logged_once(ray_address, config, texts, tmp_path: Path):
    run, killed = tmp_path / "run", []

    def kill() -> None:
        folder = next(folder for folder in worker_folders(run) if kill_owner(folder))
        killed.append(f"{folder.name} is lost")

    _, display = replay_on_cluster(config, run, ray_address, 2, display=RecordingDisplay(kill, after=8))
    assert_whole(run, texts)
    assert [note.partition(" (")[0] for note in display.notes] == killed
    assert len(worker_folders(run)) == 3


@pytest.mark.sweep
def test_a_dead_learner_restarts_from_its_last_commit(ray_address, config, texts, tmp_path: Path):
    run, killed, before = tmp_path / "run", [], []

    def kill() -> None:
        assert wait_until(threading.Event(), lambda: bool(select_rows(run, SERVED)))
        killed.append(kill_owner(partition_folder(run, LEARNER)))
        before.extend(select_rows(run, SERVED))

    _, display = replay_on_cluster(config, run, ray_address, 2, display=RecordingDisplay(kill, after=8))
    assert_whole(run, texts)
    assert killed == [True]
    assert any("the learner is lost" in note for note in display.notes)
    after = select_rows(run, SERVED)
    assert after[: len(before)] == before
    assert len(after) > len(before)
    versions = [row["drafter_version"] for row in after]
    assert versions == sorted(set(versions))


@pytest.mark.slow
def test_a_run_whose_leader_was_killed_resumes(ray_address, config, texts, tmp_path: Path):
    run = tmp_path / "run"
    leader = start_replay_command(config, run, ray_address, tmp_path)
    assert wait_until(threading.Event(), lambda: count_committed_prompts(run) >= 8)
    leader.kill()
    leader.wait()
    before = count_committed_prompts(run)
    _, display = replay_on_cluster(config, run, ray_address, 2, resume=True)
    assert_whole(run, texts)
    assert before >= 8
    assert sorted(display.completed) == [offset for offset, _ in texts]


@pytest.mark.slow
def test_a_worker_joins_while_it_runs(ray_address, config, texts, tmp_path: Path):
    run = tmp_path / "run"

    def join() -> None:
        (run / WORKERS).write_text("three\n")  # not a number: nothing changes
        (run / WORKERS).write_text("2\n")

    _, display = replay_on_cluster(config, run, ray_address, 1, display=RecordingDisplay(join, after=4))
    assert_whole(run, texts)
    assert len(worker_folders(run)) == 2
    assert display.notes == []


@pytest.mark.sweep
def test_a_run_that_was_killed_after_the_end_of_its_stream_is_finished(ray_address, config, texts, tmp_path: Path):
    run = tmp_path / "run"
    before, _ = replay_on_cluster(config, run, ray_address, 1)
    edit_manifest(run, lambda manifest: replace(manifest, finished=False))
    (run / SUMMARY).unlink()
    after, _ = replay_on_cluster(config, run, ray_address, 1, resume=True)
    assert_whole(run, texts)
    assert len(worker_folders(run)) == 1
    assert after["totals"] == before["totals"]
    assert (run / SUMMARY).exists()


def test_a_stream_without_prompts_is_refused_before_a_worker_starts(config, tmp_path: Path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"prompt": 7}\n', encoding="utf-8")
    with pytest.raises(SourceError, match="must hold at least one prompt"):
        replay_on_cluster(config.with_overrides({"sources": (str(empty),)}), tmp_path / "run", "local", 1)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_error_of_a_worker_is_raised(ray_address, config, tmp_path: Path):
    nowhere = config.with_overrides({"targets": (str(tmp_path / "nowhere"),)})
    with pytest.raises(ModelError, match="nowhere"):
        replay_on_cluster(nowhere, tmp_path / "run", ray_address, 1)


def test_several_targets_and_a_cluster_that_is_not_there_are_refused(config, tmp_path: Path):
    with pytest.raises(UsageError, match="one target"):
        replay_on_cluster(config.with_overrides({"targets": ("a", "b")}), tmp_path / "run", "local")
    with pytest.raises(RunError, match="Ray cluster"):
        replay_on_cluster(config, tmp_path / "run", "127.0.0.1:1")


@pytest.mark.sweep
@pytest.mark.parametrize("instant", range(20))
def test_a_worker_dies_at_any_instant(ray_address, config, texts, tmp_path: Path, instant: int):
    run, chosen, killed = tmp_path / "run", random.Random(instant), []

    def kill(over: threading.Event) -> None:
        if wait_until(over, lambda: any(map(find_owner, worker_folders(run)))):
            over.wait(chosen.uniform(0.0, 2.5))
            folders = worker_folders(run)
            killed.append(any(map(kill_owner, chosen.sample(folders, len(folders)))))

    with run_in_parallel(kill):
        replay_on_cluster(config, run, ray_address, 2)
    assert_whole(run, texts)
    assert killed == [True]
