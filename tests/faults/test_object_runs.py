"""A run on an object store that is killed on one machine and resumed on another, from nothing but the store, ends with
the same rows as an uninterrupted run in a folder."""

import shutil
import signal
from pathlib import Path

import pytest
from compiled_code import copy_cache
from faulty_runs import Ended, Life, Stream, World, differences, rows_of, strays
from object_serving import ObjectServer
from serving import mlflow_server

from store.fault_points import VARIABLE
from store.log.manifest import MANIFEST
from store.object_store.mirror import Index, ObjectMirror
from store.registry.registry import list_versions

PLACES = ("mirror: between two objects", "mirror: before the manifest", "mirror: after the manifest")


class Machines:
    """Machines that share nothing but the store; each starts one process."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._environment, self._number = folder, environment, 0

    def life(self, words: list[object], **environment: str) -> Life:
        self._number += 1
        folder = self._folder / f"machine-{self._number}"
        own = {"OMNIDRAFT_CACHE": str(folder / "cache")}
        copy_cache(folder / "cache")
        return Life(World(folder, environment={**self._environment, **own, **environment}), words)

    def resume_elsewhere(self, place: str, *more: object) -> Ended:
        return self.life(["replay", "--resume", place, *more]).end()


@pytest.fixture
def machines(tmp_path: Path, objects: ObjectServer) -> Machines:
    return Machines(tmp_path, objects.environment)


def pull_run(place: str, folder: Path) -> Path:
    """Pull the whole run into a folder."""
    ObjectMirror(folder / "run", place).pull()
    return folder / "run"


def prompts(objects: ObjectServer, place: str) -> int:
    """Number of prompts that are committed on the store."""
    if MANIFEST.as_posix() not in objects.names(place):
        return 0
    manifest = Index.parse(place, objects.read(place, MANIFEST.as_posix())).manifest
    return sum(part.rows for part in manifest.tables["prompts"])


def assert_same(place: str, whole: Path, folder: Path) -> None:
    run = pull_run(place, folder)
    assert differences(run, whole) == []
    assert strays(run) == set()


@pytest.mark.slow
def test_a_run_on_an_object_store_is_the_same_as_one_in_a_folder(
    stream: Stream,
    whole: Path,
    machines: Machines,
    place: str,
    tmp_path: Path,
):
    ended = machines.life(stream.begin(place)).end()
    ended.assert_clear(0, f"run: {place}")
    assert_same(place, whole, tmp_path)
    for words in (["sql", "--recipe", "acceptance-over-time", "--run", place], ["check", "--run", place]):
        ended = machines.life(words).end()
        ended.assert_clear(0)
    assert "0 mismatches" in ended.out
    machines.life(stream.begin(place)).end().assert_clear(2, f"{place} holds a finished run")


@pytest.mark.representatives(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_a_kill_inside_a_commit_loses_only_what_followed_the_previous_commit(
    name: str,
    stream: Stream,
    whole: Path,
    machines: Machines,
    place: str,
    tmp_path: Path,
):
    """The run is killed twice, on two machines."""
    for words, count in ((stream.begin(place), 40 if "between" in name else 5), (["replay", "--resume", place], 3)):
        life = machines.life(words, **{VARIABLE: f"{name}={count}"})
        assert life.end().status == -signal.SIGKILL, life.errors()
    machines.resume_elsewhere(place).assert_clear(0)
    assert_same(place, whole, tmp_path)


@pytest.mark.sweep
def test_a_run_resumed_elsewhere_is_in_mlflow_once(
    stream: Stream,
    whole: Path,
    machines: Machines,
    objects: ObjectServer,
    place: str,
    tmp_path: Path,
):
    """Its versions were published from folders that no longer exist."""
    (tmp_path / "server").mkdir()
    with mlflow_server(tmp_path / "server") as uri:
        life = machines.life([*stream.begin(place), "--mlflow-uri", uri])
        assert life.wait_until(lambda: prompts(objects, place) >= 10), life.errors()
        life.send(signal.SIGKILL)
        assert life.end().status == -signal.SIGKILL
        shutil.rmtree(tmp_path / "machine-1")
        machines.resume_elsewhere(place).assert_clear(0)
        machines.resume_elsewhere(place).assert_clear(2, "there is nothing to resume")
        machines.life(["versions", "sync", place]).end().assert_clear(0)
        assert_same(place, whole, tmp_path)
        numbers = sorted(version.version for version in list_versions(uri))
        assert numbers == [row["version"] for row in rows_of(whole, "versions")]
