"""Several workers on Ray: the same texts as one process, every prompt once, whoever dies."""

import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray")

from replaying import config_of
from scaling import (
    Notes,
    assert_whole,
    committed_prompts,
    embedded_texts,
    kill_owner,
    led_elsewhere,
    many_prompts,
    meanwhile,
    owner_of,
    rows_of,
    scaled,
    texts_of,
    until,
)
from tiny_pair import TinyPair, tiny_pair  # noqa: F401

from pipeline.cli_replay import _prepared
from pipeline.config import Config
from pipeline.scale_run import WORKERS
from store.errors import ModelError, RunError, SourceError, UsageError
from store.manifest import edit_manifest, read_manifest
from store.object_store_mirror import NoMirror
from store.partitions import LEARNER, partition_folder, worker_folders
from store.summary import SUMMARY

pytestmark = pytest.mark.timeout(900)  # every process loads its libraries and models anew

PROMPTS = 40
SERVED = "FROM updates WHERE part = 'drafter' AND served ORDER BY seq"


@pytest.fixture(scope="module")
def address():
    """A cluster of one machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 6, "include_dashboard": False})
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="module")
def stream(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, list[tuple[int, str]]]:  # noqa: F811
    """Settings, and what one process says."""
    folder = tmp_path_factory.mktemp("stream")
    prompts = many_prompts(folder, PROMPTS)
    config = config_of(
        tiny_pair,
        sources=(str(prompts),),
        sampling__max_new_tokens=48,
        batch=2,
        learn__spacing="fixed",
        commit__seconds=0.2,
        commit__share=1.0,
    )
    return config, embedded_texts(config, folder / "embedded")


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_say_what_one_process_says(address, stream, tmp_path: Path, workers: int):
    config, texts = stream
    run = tmp_path / "run"
    summary, notes = scaled(config, run, address, workers)
    assert_whole(run, texts)
    assert summary["totals"]["prompts"] == PROMPTS
    assert summary["rejected_rows"] == 3
    assert len(worker_folders(run)) == workers
    assert all(rows_of(run, "SELECT max(drafter_version) AS v FROM decisions"))
    assert notes.told == []
    assert sorted(notes.completed) == [offset for offset, _ in texts]


def test_a_dead_worker_s_prompts_are_decoded_by_others_and_logged_once(address, stream, tmp_path: Path):
    config, texts = stream
    run, killed = tmp_path / "run", []

    def kill() -> None:
        folder = next(folder for folder in worker_folders(run) if kill_owner(folder))
        killed.append(f"{folder.name} is gone")

    _, notes = scaled(config, run, address, 2, notes=Notes(kill, after=8))
    assert_whole(run, texts)
    assert [note.partition(" (")[0] for note in notes.told] == killed
    assert len(worker_folders(run)) == 3


def test_a_dead_learner_begins_again_from_its_last_commit(address, stream, tmp_path: Path):
    config, texts = stream
    run, killed, before = tmp_path / "run", [], []

    def kill() -> None:
        assert until(threading.Event(), lambda: bool(rows_of(run, SERVED)))
        killed.append(kill_owner(partition_folder(run, LEARNER)))
        before.extend(rows_of(run, SERVED))

    _, notes = scaled(config, run, address, 2, notes=Notes(kill, after=8))
    assert_whole(run, texts)
    assert killed == [True]
    assert any("the learner is gone" in note for note in notes.told)
    after = rows_of(run, SERVED)
    assert after[: len(before)] == before
    assert len(after) > len(before)
    versions = [row["drafter_version"] for row in after]
    assert versions == sorted(set(versions))


def test_a_run_whose_leader_was_killed_goes_on(address, stream, tmp_path: Path):
    config, texts = stream
    run = tmp_path / "run"
    leader = led_elsewhere(config, run, address, tmp_path)
    assert until(threading.Event(), lambda: committed_prompts(run) >= 8)
    leader.kill()
    leader.wait()
    before = committed_prompts(run)
    _, notes = scaled(config, run, address, 2, resume=True)
    assert_whole(run, texts)
    assert before >= 8
    assert sorted(notes.completed) == [offset for offset, _ in texts]


def test_a_run_that_was_stopped_goes_on_and_only_so(address, stream, tmp_path: Path):
    config, texts = stream
    run = tmp_path / "run"
    leader = led_elsewhere(config, run, address, tmp_path)
    assert until(threading.Event(), lambda: committed_prompts(run) >= 4)
    leader.terminate()
    _, told = leader.communicate(timeout=120)
    assert leader.returncode == 130, told
    assert f"--resume {run} --ray {address}" in told
    with pytest.raises(RunError, match="begun with --ray"):
        _prepared(config, run, NoMirror(run), None, print, resume=True)
    assert len(texts_of(run)) < len(texts)
    scaled(config, run, address, 1, resume=True)
    assert_whole(run, texts)


def test_a_worker_joins_while_it_runs(address, stream, tmp_path: Path):
    config, texts = stream
    run = tmp_path / "run"

    def join() -> None:
        (run / WORKERS).write_text("three\n")  # which nobody understands: nothing changes
        (run / WORKERS).write_text("2\n")

    _, notes = scaled(config, run, address, 1, notes=Notes(join, after=4))
    assert_whole(run, texts)
    assert len(worker_folders(run)) == 2
    assert notes.told == []


def test_a_worker_leaves_while_it_runs(address, stream, tmp_path: Path):
    config, texts = stream
    run, left = tmp_path / "run", []

    def look(over: threading.Event) -> None:
        if until(over, lambda: read_manifest(worker_folders(run)[1]).finished):
            left.append(committed_prompts(run))

    with meanwhile(look):
        _, notes = scaled(config, run, address, 2, notes=Notes(lambda: (run / WORKERS).write_text("1\n"), after=8))
    assert_whole(run, texts)
    assert len(worker_folders(run)) == 2
    assert notes.told == []
    assert left
    assert left[0] < PROMPTS


def test_a_run_that_was_killed_behind_the_end_of_its_stream_is_ended(address, stream, tmp_path: Path):
    config, texts = stream
    run = tmp_path / "run"
    before, _ = scaled(config, run, address, 1)
    edit_manifest(run, lambda manifest: replace(manifest, finished=False))
    (run / SUMMARY).unlink()
    after, _ = scaled(config, run, address, 1, resume=True)
    assert_whole(run, texts)
    assert len(worker_folders(run)) == 1
    assert after["totals"] == before["totals"]
    assert (run / SUMMARY).exists()


def test_a_stream_without_prompts_ends(address, stream, tmp_path: Path):
    config, _ = stream
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"prompt": 7}\n', encoding="utf-8")
    summary, _ = scaled(config.with_overrides({"sources": (str(empty),)}), tmp_path / "run", address, 1)
    assert (summary["totals"]["prompts"], summary["rejected_rows"]) == (0, 1)


def test_what_a_worker_raises_is_told(address, stream, tmp_path: Path):
    config, _ = stream
    nowhere = config.with_overrides({"targets": (str(tmp_path / "nowhere"),)})
    with pytest.raises(ModelError, match="nowhere"):
        scaled(nowhere, tmp_path / "run", address, 1)


def test_another_stream_is_not_gone_on_with(address, stream, tmp_path: Path):
    config, _ = stream
    run = tmp_path / "run"
    own = tmp_path / "own.jsonl"
    own.write_bytes(Path(config.sources[0]).read_bytes())
    config = config.with_overrides({"sources": (str(own),)})
    leader = led_elsewhere(config, run, address, tmp_path)
    assert until(threading.Event(), lambda: committed_prompts(run) >= 4)
    leader.terminate()
    leader.communicate(timeout=120)
    own.write_text("\n".join(reversed(own.read_text(encoding="utf-8").splitlines())) + "\n", encoding="utf-8")
    with pytest.raises(SourceError, match="must begin with"):
        scaled(config, run, address, 1, resume=True)


def test_several_targets_and_a_cluster_that_is_not_there_are_refused(stream, tmp_path: Path):
    config, _ = stream
    with pytest.raises(UsageError, match="one target"):
        scaled(config.with_overrides({"targets": ("a", "b")}), tmp_path / "run", "local")
    with pytest.raises(RunError, match="Ray cluster"):
        scaled(config, tmp_path / "run", "127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.parametrize("instant", range(20))
def test_a_worker_dies_at_any_instant(address, stream, tmp_path: Path, instant: int):
    config, texts = stream
    run, chosen, killed = tmp_path / "run", random.Random(instant), []

    def kill(over: threading.Event) -> None:
        if until(over, lambda: any(map(owner_of, worker_folders(run)))):
            over.wait(chosen.uniform(0.0, 2.5))
            folders = worker_folders(run)
            killed.append(any(map(kill_owner, chosen.sample(folders, len(folders)))))

    with meanwhile(kill):
        scaled(config, run, address, 2)
    assert_whole(run, texts)
    assert killed == [True]
