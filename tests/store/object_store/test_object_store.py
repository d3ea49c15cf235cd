"""A log on an object store: the objects and order of a commit, the one writer, and what a reader fetches."""

import json
import shutil
from pathlib import Path

import pytest
from object_serving import Door, ObjectServer
from synthetic_runs import decision
from version_making import publication

from store.errors import CorruptError, OmnidraftError, RunError
from store.events import PromptRejected
from store.log.checkpoint import read_checkpoint
from store.log.manifest import MANIFEST, read_manifest
from store.log.partitions import partition_folder
from store.log.run_log import REJECTED, Commit, RunLog
from store.object_store.mirror import Index, ObjectMirror, fetch_logs, local_copy
from store.object_store.uri import uri_of
from store.query.log_reader import LogReader
from store.registry.version_folder import open_version

CHECKPOINT = {"state.json": b"{}", "tensors.safetensors": bytes(100)}


class Run:
    """A process that writes a run: its folder, its log and the mirror that copies its commits."""

    def __init__(self, folder: Path, uri: str, partition: str | None = None) -> None:
        whole = ObjectMirror(folder, uri)
        self.folder = partition_folder(folder, partition) if partition else folder
        self.mirror = whole.partition(partition) if partition else whole
        self.mirror.pull()
        self.log = RunLog(self.folder, part_rows=3, mirror=self.mirror)

    def commit(self, *offsets: int, done=lambda: None) -> None:
        for offset in offsets:
            self.log.append(decision(offset=offset))
        state = json.dumps(offsets).encode()
        self.log.commit(Commit(lambda: {**CHECKPOINT, "state.json": state}, done=done), wait=True)

    def publish(self, version: int) -> str:
        """Publish a version, which the next commit names. Returns its digest."""
        _, event = publication(self.folder, version)
        self.log.append(event)
        return event.digest

    def kill(self) -> None:
        """Stop the process without a further commit."""
        self.log.close()


@pytest.fixture
def run(tmp_path: Path, place: str):
    """A running process, which is killed at the end of the test."""
    process = Run(tmp_path / "one", place)
    yield process
    process.kill()


def offsets_in(folder: Path) -> list[int]:
    with LogReader([folder]) as log:
        return log.select('SELECT "offset" AS o FROM decisions ORDER BY seq').column("o").to_pylist()


def read_index(objects: ObjectServer, place: str) -> Index:
    return Index.parse(place, objects.read(place, MANIFEST.as_posix()))


def object_of(objects: ObjectServer, place: str, path: str) -> str:
    return f"objects/{read_index(objects, place).all_files()[path]}"


def test_a_uri_is_recovered_from_a_path_and_a_folder_is_not_a_uri():
    assert uri_of(Path("s3://bucket/a b/run")) == "s3://bucket/a b/run"
    assert [uri_of(Path(name)) for name in ("runs/a", "/runs/s3:/a", "s3", "C:/runs")] == [None] * 4


@pytest.mark.parametrize(
    "uri", ["s3://bucket", "s3://key:secret@bucket/run", "s3://bucket/run?retries=3", "s3://b/../c"]
)
def test_an_invalid_uri_is_refused_and_the_error_hides_its_keys(uri: str):
    with pytest.raises(RunError, match="BUCKET/PATH") as refused:
        ObjectMirror(Path("run"), uri)
    assert "secret" not in str(refused.value)


def test_a_run_resumes_elsewhere_from_its_last_commit(run: Run, tmp_path: Path, place: str):
    run.commit(0, 1, 2, 3)
    run.log.append(decision(offset=99))
    run.kill()
    other = Run(tmp_path / "other", place)
    checkpoint = read_manifest(other.folder).checkpoint
    assert read_checkpoint(other.folder, checkpoint)["state.json"] == b"[0, 1, 2, 3]"
    other.commit(4)
    other.log.finish()
    assert offsets_in(other.folder) == offsets_in(fetch_logs(place)) == [0, 1, 2, 3, 4]
    assert read_manifest(fetch_logs(place)).finished


def test_local_files_that_the_store_does_not_name_are_dropped(run: Run, place: str, objects: ObjectServer, monkeypatch):
    """The process was killed after it wrote its own disk and before it wrote the store."""
    run.commit(0)
    monkeypatch.setattr(ObjectMirror, "push", lambda self, manifest: None)
    run.commit(1)
    run.kill()
    (run.folder / REJECTED).write_text("stale\n")
    assert offsets_in(run.folder) == [0, 1]
    monkeypatch.undo()
    Run(run.folder, place).kill()
    assert offsets_in(run.folder) == [0]
    assert not (run.folder / REJECTED).exists()


def test_the_manifest_is_put_after_all_objects_that_it_names(
    tmp_path: Path, place: str, objects: ObjectServer, monkeypatch
):
    replace, missing, commits = ObjectMirror._replace_manifest, [], []

    def check_first(mirror: ObjectMirror, index: Index) -> None:
        missing.extend({f"objects/{one}" for one in index.digests()} - set(objects.names(place)))
        commits.append(index)
        replace(mirror, index)

    monkeypatch.setattr(ObjectMirror, "_replace_manifest", check_first)
    run = Run(tmp_path / "run", place)
    (run.folder / "config.json").write_text("{}")
    run.publish(0)
    run.commit(0, 1, 2, 3)
    run.commit(4)
    run.log.finish()
    assert (missing, len(commits)) == ([], 4)


def test_a_commit_is_done_only_when_the_store_has_it(run: Run, place: str, objects: ObjectServer):
    seen = []
    run.commit(0, done=lambda: seen.append(read_index(objects, place).manifest.tables["decisions"][0].rows))
    assert seen == [1]


def test_objects_that_no_manifest_names_are_removed(tmp_path: Path, place: str, objects: ObjectServer):
    objects.write(place, "objects/" + "0" * 64, b"left by a killed process")
    objects.write(place, "notes.txt", b"written by somebody else")
    run = Run(tmp_path / "run", place)
    for offset in range(4):
        run.commit(offset)
    named = {f"objects/{digest}" for digest in read_index(objects, place).digests()}
    assert set(objects.names(place)) == named | {MANIFEST.as_posix(), "notes.txt"}
    run.kill()


def test_the_earlier_of_two_writers_stops_with_an_error_that_names_the_later(run: Run, tmp_path: Path, place: str):
    run.commit(0)
    completed = []
    other = Run(tmp_path / "other", place)
    with pytest.raises(RunError, match=r"two processes, but process \d+ on \S+ \(since"):
        run.commit(1, done=lambda: completed.append(1))
    other.commit(2)
    other.kill()
    assert (offsets_in(fetch_logs(place)), completed) == ([0, 2], [])


def test_a_new_run_does_not_replace_one_that_started_in_the_meantime(tmp_path: Path, place: str):
    late = ObjectMirror(tmp_path / "late", place)
    late.pull()
    Run(tmp_path / "one", place).kill()
    with pytest.raises(RunError, match="two processes"):
        RunLog(tmp_path / "late", mirror=late)


def test_a_commit_whose_answer_was_lost_and_that_was_sent_again_counts(run: Run, place: str, monkeypatch):
    run.commit(0)
    store = run.mirror._store

    class TwiceSent:
        def put(self, name, content, **options):
            store.put(name, content, **options)
            return store.put(name, content, **options)

        def __getattr__(self, name):
            return getattr(store, name)

    monkeypatch.setattr(run.mirror, "_store", TwiceSent())
    run.commit(1)
    run.commit(2)
    assert offsets_in(fetch_logs(place)) == [0, 1, 2]


@pytest.mark.parametrize("path", ["log/decisions/part-000001.parquet", "checkpoint/000001/state.json"])
@pytest.mark.parametrize("content", [b"x", None])
def test_a_damaged_object_is_named_by_its_file(
    run: Run, place: str, objects: ObjectServer, tmp_path: Path, path: str, content
):
    run.commit(0)
    objects.write(place, object_of(objects, place, path), content)
    with pytest.raises(CorruptError, match=f"{path} of {place} must be in objects/"):
        Run(tmp_path / "other", place)
    assert not (tmp_path / "other" / path).exists()


@pytest.mark.parametrize("path", ["../out", "/out", "log/x", "a/../../out", "partitions/a/x", ".lock", "a\\b"])
def test_a_manifest_cannot_name_files_elsewhere(run: Run, place: str, objects: ObjectServer, tmp_path: Path, path: str):
    run.commit(0)
    content = json.loads(objects.read(place, MANIFEST.as_posix()))
    content["mirror"]["files"] = {path: "0" * 64}
    objects.write(place, MANIFEST.as_posix(), json.dumps(content).encode())
    with pytest.raises(CorruptError, match="must"):
        ObjectMirror(tmp_path / "other", place).pull()


def test_a_file_that_grows_is_fetched_as_it_was_committed(run: Run, tmp_path: Path, place: str):
    for number in range(3):
        run.log.append(PromptRejected("docs", number + 1, "no prompt"))
        run.commit()
    committed = (run.folder / REJECTED).read_bytes()
    run.log.append(PromptRejected("docs", 4, "no prompt"))
    run.kill()
    other = Run(tmp_path / "other", place)
    other.kill()
    assert (other.folder / REJECTED).read_bytes() == committed


def test_committed_versions_are_fetched_sealed_and_later_ones_are_not(run: Run, tmp_path: Path, place: str):
    digest = run.publish(0)
    run.commit(0)
    publication(run.folder, 1)
    run.commit(1)
    run.kill()
    other = Run(tmp_path / "other", place)
    other.commit(2)
    other.kill()
    assert open_version(other.folder / "versions" / "000000")["digest"] == digest
    assert [path.name for path in (other.folder / "versions").iterdir()] == ["000000"]
    assert not (fetch_logs(place) / "versions").exists()


@pytest.mark.representatives("mute")
@pytest.mark.slow
@pytest.mark.parametrize("failure", ["shut", "mute"])
def test_an_unreachable_store_stops_the_run_at_its_last_commit(
    failure: str, tmp_path: Path, objects: ObjectServer, place: str, monkeypatch
):
    door = Door(objects.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", door.endpoint)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("store.object_store.mirror.READ_SECONDS", 5)
    run = Run(tmp_path / "run", place)
    run.commit(0)
    getattr(door, failure)()
    with pytest.raises(OmnidraftError, match=f"omnidraft replay --resume '?{place}"):
        run.commit(1)
    run.kill()
    door.shut()
    door.open()
    other = Run(tmp_path / "other", place)
    other.commit(2)
    other.kill()
    assert offsets_in(fetch_logs(place)) == [0, 2]


def test_a_reader_fetches_only_new_objects(run: Run, place: str, monkeypatch):
    run.commit(0)
    fetch_logs(place)
    requested = []
    read = ObjectMirror._read_checked
    monkeypatch.setattr(
        ObjectMirror, "_read_checked", lambda self, path, digest: requested.append(digest) or read(self, path, digest)
    )
    run.commit(1)
    requested.clear()
    assert offsets_in(local_copy(Path(place))) == [0, 1]
    digest = read_manifest(run.folder).tables["decisions"][1].sha256
    assert requested == [digest]


def test_a_reader_tolerates_a_manifest_that_is_replaced_while_it_reads(
    run: Run, place: str, tmp_path: Path, monkeypatch
):
    """The checkpoint that the first manifest names no longer exists when the reader requests it."""
    run.commit(0)
    forget = ObjectMirror._remove_others
    once = iter([lambda: run.commit(1)])

    def meanwhile(self, files) -> None:
        forget(self, files)
        next(once, lambda: None)()

    monkeypatch.setattr(ObjectMirror, "_remove_others", meanwhile)
    ObjectMirror(tmp_path / "other", place).pull()
    assert offsets_in(tmp_path / "other") == [0, 1]


def test_partitions_are_fetched_with_their_run(run: Run, place: str, tmp_path: Path):
    run.commit(0)
    worker = Run(tmp_path / "w", place, "worker-000")
    worker.commit(1, 2)
    worker.kill()
    assert sorted(offsets_in(fetch_logs(place))) == [0, 1, 2]
    run.commit(3)  # it removes no objects of the partition
    assert sorted(offsets_in(fetch_logs(place))) == [0, 1, 2, 3]
    assert run.mirror.partitions() == ["worker-000"]
    stale = shutil.copytree(
        partition_folder(fetch_logs(place), "worker-000"), fetch_logs(place) / "partitions" / "other"
    )
    fetch_logs(place)
    assert not stale.exists()


def test_versions_of_a_partition_are_in_the_folder_of_the_run(tmp_path: Path, place: str):
    first = Run(tmp_path / "one", place, "learner")
    _, event = publication(tmp_path / "one", 0)
    first.log.append(event)
    first.commit(0)
    first.kill()
    ObjectMirror(tmp_path / "two", place).pull()
    Run(tmp_path / "two", place, "learner").kill()
    assert open_version(tmp_path / "two" / "versions" / "000000")["digest"] == event.digest
    ObjectMirror(tmp_path / "two", place).pull()
    assert offsets_in(partition_folder(tmp_path / "two", "learner")) == [0]


def test_a_place_without_a_run_is_refused(place: str):
    with pytest.raises(RunError, match="must be a run"):
        fetch_logs(place)
