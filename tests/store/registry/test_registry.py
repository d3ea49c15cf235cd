"""Versions are stored in a real MLflow store and fetched unchanged; an unreachable store does not slow the run."""

import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from registry_making import new_store
from version_making import CREATED_AT, contents, publication

from store.errors import CorruptError, ModelError, UsageError
from store.outbox import RetryPolicy, read_undelivered
from store.registry.mlflow_client import connect
from store.registry.mlflow_sender import Sender
from store.registry.mlflow_versions import Publication
from store.registry.registry import MODEL, MlflowRegistry, default_uri, fetch_version, list_versions, show_version

CLOSED = "http://127.0.0.1:9"  # nothing listens on the discard port
QUICK = RetryPolicy(attempts=1, backoff=0.01, max_backoff=0.01, linger=0.01)
PARAMS = {"mode": "trie", "temperature": 0.0, "target": "big", "drafter": "small"}
SOURCES = [("docs", "builtin:docs"), ("code", "builtin:code")]
POINTS = [("acceptance", 0.1 * step, step, 1_700_000_000_000 + step) for step in range(6)]


@dataclass(frozen=True)
class Published:
    """A store with a run of three versions, and the folders from which they were published."""

    root: Path
    uri: str
    folders: list[Path]

    def run(self, name: str):
        client = connect(self.uri)
        found = client.search_runs(["1"], f"attributes.run_name = '{name}'")
        return client.get_run(found[0].info.run_id)  # it has the inputs, which a search omits


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """A store that the tests of this file share; they only add to it."""
    root = tmp_path_factory.mktemp("runs")
    registry = MlflowRegistry(new_store(root), root / "run-a/registry-queue.jsonl", retry_policy=QUICK)
    registry.start_run("run-a", PARAMS, {"host": "here"}, SOURCES)
    registry.log_points([*POINTS, ("acceptance", float("nan"), 6, 1), ("acceptance", float("inf"), 7, 1)])
    folders = []
    for version in range(3):
        folder, event = publication(root, version)
        registry.publish(folder, event, {"mean_accepted_length": 1.0 + version, "tokens_per_second": float("nan")})
        folders.append(folder)
    registry.log_points(POINTS[:2])  # repeated, as after a restart
    (root / "summary.json").write_text("{}")
    registry.finish({"acceptance": 0.4, "ratio": float("nan")}, [root / "summary.json"])
    assert registry.close(120) == 0, registry.last_error
    return Published(root, default_uri(root), folders)


def test_versions_are_listed_newest_first_with_parents_and_metrics(published: Published):
    found = list_versions(published.uri)[-3:]
    assert [version.number for version in found] == [3, 2, 1]
    assert [version.version for version in found] == [2, 1, 0]
    assert [version.parent for version in found] == [2, 1, None]
    assert [version.acceptance for version in found] == [0.5, 0.25, None]
    assert [version.cache_entries for version in found] == [14, 7, 0]
    assert [version.reason for version in found] == ["interval", "interval", "floor"]
    assert {version.run for version in found} == {"run-a"}
    assert abs(datetime.now(UTC) - found[0].created_at).total_seconds() < 600


def test_each_version_shows_its_own_metrics(published: Published):
    for number in (1, 2, 3):
        details = show_version(published.uri, MODEL, number)
        expected = {"version/cache_entries": 7.0 * (number - 1), "mean_accepted_length": float(number)}
        assert details.metrics == (expected if number == 1 else {**expected, "acceptance": 0.25 * (number - 1)})
        assert details.manifest["version"] == number - 1
        assert details.manifest["digest"] == details.tags["digest"] == details.summary.digest
        assert details.params["version"] == str(number - 1)
        assert details.params["mode"] == "trie"


def test_the_runs_curve_is_on_the_stream_offset_and_a_repeated_point_is_one(published: Published):
    client = connect(published.uri)
    history = client.get_metric_history(published.run("run-a").info.run_id, "acceptance")
    assert [(point.step, point.value, point.timestamp) for point in history] == [
        (step, value, when) for _, value, step, when in POINTS
    ]


def test_the_run_is_finished_with_params_sources_summary_and_colour(published: Published):
    run = published.run("run-a")
    assert run.info.status == "FINISHED"
    assert run.data.params == {"mode": "trie", "temperature": "0.0", "target": "big", "drafter": "small"}
    assert run.data.metrics["final/acceptance"] == 0.4
    assert "final/ratio" not in run.data.metrics
    assert sorted(given.dataset.name for given in run.inputs.dataset_inputs) == ["code", "docs"]
    assert len(run.outputs.model_outputs) == 3
    assert run.data.tags["mlflow.runColor"].startswith("#")
    assert "builtin:docs" in run.data.tags["mlflow.note.content"]
    assert run.data.tags["host"] == "here"
    assert (run.data.tags["target"], run.data.tags["drafter"]) == ("big", "small")
    artifacts = connect(published.uri).list_artifacts(run.info.run_id)
    assert [artifact.path for artifact in artifacts] == ["summary.json"]


def test_a_version_is_a_nested_run_whose_input_is_the_parents_model(published: Published):
    child, parent = published.run("run-a v2"), published.run("run-a v1")
    assert child.data.tags["mlflow.parentRunId"] == published.run("run-a").info.run_id
    assert [given.model_id for given in child.inputs.model_inputs] == [
        made.model_id for made in parent.outputs.model_outputs
    ]
    model = connect(published.uri).get_logged_model(child.outputs.model_outputs[0].model_id)
    assert str(model.status) == "READY"
    metric = next(metric for metric in model.metrics if metric.key == "acceptance")
    assert (metric.value, metric.step, metric.dataset_name) == (0.5, 200, "docs + code")
    assert metric.timestamp == datetime.fromisoformat(CREATED_AT).timestamp() * 1000


def test_a_fetched_version_has_the_same_bytes(published: Published, tmp_path: Path):
    for number, folder in enumerate(published.folders, start=1):
        fetched = fetch_version(f"models:/{MODEL}/{number}", published.uri, tmp_path / str(number))
        assert fetched == tmp_path / str(number)
        assert contents(fetched) == contents(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3"]


def test_runs_do_not_share_colours_and_the_alias_is_the_newest_that_learned(published: Published, tmp_path: Path):
    registry = MlflowRegistry(published.uri, published.root / "run-b/registry-queue.jsonl", retry_policy=QUICK)
    registry.start_run("run-b", PARAMS, {}, SOURCES)
    for version in range(2):  # like a run with `--no-learn`: only n-grams are new in the second
        folder, event = publication(published.root, version, run="run-b")
        registry.publish(folder, replace(event, drafter_version=0), {})
    assert registry.close(60) == 0, registry.last_error
    newest, baseline, learned, *_ = list_versions(published.uri)
    assert (newest.run, newest.aliases) == ("run-b", ()), "neither the drafter nor the head has changed"
    assert (baseline.run, baseline.reason, baseline.aliases) == ("run-b", "floor", ())
    assert (learned.run, learned.aliases) == ("run-a", ("candidate",))
    registry = MlflowRegistry(published.uri, published.root / "run-learned/registry-queue.jsonl", retry_policy=QUICK)
    registry.start_run("run-learned", PARAMS, {}, SOURCES)
    for version in range(2):
        folder, event = publication(published.root, version, run="run-learned")
        registry.publish(folder, event, {})
    assert registry.close(60) == 0, registry.last_error
    colors = {published.run(name).data.tags["mlflow.runColor"] for name in ("run-a", "run-b", "run-learned")}
    assert len(colors) == 3
    newest, *others = list_versions(published.uri)
    assert (newest.run, newest.number, newest.aliases) == ("run-learned", others[0].number + 1, ("candidate",))
    assert {version.aliases for version in others} == {()}
    fetched = fetch_version(f"models:/{MODEL}@candidate", published.uri, tmp_path / "fetched")
    assert contents(fetched) == contents(folder)


@pytest.mark.parametrize(
    "reference", ["models:/x", "models:/x/y", "models:/x@", "x/1", "models:/a/b/1", "models:/x/-1"]
)
def test_the_error_for_a_malformed_reference_shows_the_form(published: Published, tmp_path: Path, reference: str):
    with pytest.raises(ModelError, match="models:/NAME/NUMBER"):
        fetch_version(reference, published.uri, tmp_path / "v")


@pytest.mark.parametrize("reference", [f"models:/{MODEL}/99", f"models:/{MODEL}@champion", "models:/unknown/1"])
def test_an_unknown_version_is_named(published: Published, tmp_path: Path, reference: str):
    with pytest.raises(ModelError, match="must have a version"):
        fetch_version(reference, published.uri, tmp_path / "v")
    assert not (tmp_path / "v").exists()


def test_a_folder_with_files_is_not_overwritten(published: Published, tmp_path: Path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="empty folder"):
        fetch_version(f"models:/{MODEL}/1", published.uri, tmp_path)
    assert contents(tmp_path) == {"mine.txt": b"mine"}


def stored_files(published: Published, number: int) -> Path:
    """The folder in which the store keeps the files of a version."""
    client = connect(published.uri)
    model = client.get_logged_model(client.get_model_version(MODEL, str(number)).source.removeprefix("models:/"))
    return Path(model.artifact_location.removeprefix("file://"))


def flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = bytearray(path.read_bytes())
    whole[1234] ^= 1
    path.write_bytes(whole)


def plant_pickle(folder: Path) -> None:
    (folder / "head.pkl").write_bytes(b"\x80\x04N.")


def lose(folder: Path) -> None:
    (folder / "config.json").unlink()


def replace_all(folder: Path) -> None:
    """Replace the files and the manifest by those of another version: consistent, but not the registered ones."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()
    other, _ = publication(folder.parent / "other", 5)
    for name, whole in contents(other).items():
        (folder / name).write_bytes(whole)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (flip, "model.safetensors was changed"),
        (plant_pickle, "head.pkl may hold a pickle"),
        (lose, "config.json is missing"),
        (replace_all, "registered digest"),
    ],
)
def test_an_artifact_that_was_tampered_with_is_refused(published: Published, tmp_path: Path, harm, message: str):
    folder = stored_files(published, 2)
    before = contents(folder)
    try:
        harm(folder)
        with pytest.raises(CorruptError, match=message):
            fetch_version(f"models:/{MODEL}/2", published.uri, tmp_path / "v")
        assert list(tmp_path.iterdir()) == []
    finally:
        for path in folder.rglob("*"):
            if path.is_file():
                path.unlink()
        for name, whole in before.items():
            (folder / name).write_bytes(whole)
    fetch_version(f"models:/{MODEL}/2", published.uri, tmp_path / "v")


def test_a_version_changed_between_sealing_and_sending_is_not_registered(published: Published):
    registry = MlflowRegistry(published.uri, published.root / "run-c/registry-queue.jsonl", retry_policy=QUICK)
    registry.start_run("run-c", PARAMS, {}, SOURCES)
    folder, event = publication(published.root, 0, run="run-c")
    flip(folder)
    known = len(list_versions(published.uri))
    registry.publish(folder, event, {})
    assert registry.close(60) == 1
    assert "was changed" in str(registry.last_error)
    assert len(list_versions(published.uri)) == known


def test_a_publication_that_failed_midway_is_sent_again_without_a_trace(published: Published, monkeypatch):
    register, calls = Publication._register, []

    def fail_once(self, *arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise ConnectionError("lost")
        return register(self, *arguments)

    monkeypatch.setattr(Publication, "_register", fail_once)
    spool = published.root / "run-d/registry-queue.jsonl"
    registry = MlflowRegistry(published.uri, spool, retry_policy=replace(QUICK, attempts=3))
    registry.start_run("run-d", PARAMS, {}, SOURCES)
    registry.publish(*publication(published.root, 0, run="run-d"), {})
    assert registry.close(60) == 0, registry.last_error
    assert len(calls) == 2
    client = connect(published.uri)
    assert len(client.search_runs(["1"], "attributes.run_name = 'run-d v0'")) == 1
    assert len(client.search_logged_models(["1"], "name = 'run-d-v0'")) == 1


def test_a_later_process_sends_undelivered_messages_into_the_same_run(published: Published):
    spool = published.root / "run-e/registry-queue.jsonl"
    first = MlflowRegistry(CLOSED, spool, retry_policy=QUICK)
    first.start_run("run-e", PARAMS, {}, SOURCES)
    first.publish(*publication(published.root, 0, run="run-e"), {})
    first.log_points(POINTS)
    assert first.close(0.1) == 3
    known = len(list_versions(published.uri))
    second = MlflowRegistry(published.uri, spool, retry_policy=QUICK)
    second.finish({}, [])
    assert second.close(60) == 0, second.last_error
    assert len(list_versions(published.uri)) == known + 1
    assert published.run("run-e").info.status == "FINISHED"
    third = MlflowRegistry(published.uri, spool, retry_policy=QUICK)
    assert third.close(60) == 0
    assert len(list_versions(published.uri)) == known + 1


def test_the_queue_of_a_moved_run_folder_is_sent_from_its_new_place(published: Published):
    before, after = published.root / "run-f", published.root / "moved" / "run-f"
    first = MlflowRegistry(CLOSED, before / "registry-queue.jsonl", retry_policy=QUICK)
    first.start_run("run-f", PARAMS, {}, SOURCES)
    first.publish(*publication(published.root, 0, run="run-f"), {})
    (before / "summary.json").write_text("{}")
    first.finish({}, [before / "summary.json"])
    assert first.close(0.1) == 3
    after.parent.mkdir()
    before.rename(after)
    known = len(list_versions(published.uri))
    second = MlflowRegistry(published.uri, after / "registry-queue.jsonl", retry_policy=QUICK)
    assert second.close(60) == 0, second.last_error
    assert len(list_versions(published.uri)) == known + 1
    run_id = published.run("run-f").info.run_id
    assert "summary.json" in {file.path for file in connect(published.uri).list_artifacts(run_id)}


def test_a_server_that_is_down_neither_blocks_the_stream_nor_loses_a_publication(tmp_path: Path):
    spool = tmp_path / "run-a/registry-queue.jsonl"
    registry = MlflowRegistry(CLOSED, spool, retry_policy=QUICK)
    folder, event = publication(tmp_path, 0)
    slowest = 0.0
    for call in [
        lambda: registry.start_run("run-a", PARAMS, {}, SOURCES),
        *[lambda: registry.log_points(POINTS)] * 50,
        lambda: registry.publish(folder, event, {"x": 1.0}),
    ]:
        started = time.monotonic()
        call()
        slowest = max(slowest, time.monotonic() - started)
    assert slowest < 1.0, "a call waited for the server"
    assert registry.close(0.5) == 52
    waiting = list(read_undelivered(spool))
    assert [message.kind for message in waiting] == ["start", *["points"] * 50, "publish"]
    assert spool.parent / waiting[-1].body["folder"] == folder
    assert waiting[-1].body["event"]["digest"] == event.digest


def test_points_are_posted_in_microseconds_while_a_delivery_hangs(tmp_path: Path, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(Sender, "deliver", lambda self, kind, bodies: {"x": release.wait(60)})
    registry = MlflowRegistry(CLOSED, tmp_path / "q.jsonl", retry_policy=QUICK)
    started = time.monotonic()
    for _ in range(1000):
        registry.log_points(POINTS)
    assert (time.monotonic() - started) / 1000 < 0.002
    assert registry.close(0.1) == 1000
    release.set()


def test_reading_creates_no_store_and_reports_what_is_missing(tmp_path: Path):
    with pytest.raises(UsageError, match=r"mlflow.db does not; `omnidraft replay`"):
        list_versions(default_uri(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_an_unpublished_model_has_no_versions(published: Published):
    assert list_versions(published.uri, "nothing") == []


def test_importing_the_registry_imports_neither_mlflow_nor_torch():
    code = "import sys, store.registry.registry; print({'mlflow', 'torch', 'pandas', 'duckdb'} & sys.modules.keys())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "set()"


@pytest.mark.slow
def test_sending_prints_nothing(tmp_path: Path):
    code = f"""
from pathlib import Path
from store.registry.registry import MlflowRegistry, default_uri
registry = MlflowRegistry(default_uri(Path({str(tmp_path)!r})), Path({str(tmp_path / "q.jsonl")!r}))
registry.start_run("quiet", {{}}, {{}}, [])
assert registry.close(120) == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert (done.stdout, done.stderr) == ("", "")


def test_the_probe_is_sent_before_other_metrics(tmp_path: Path):
    """MLflow's comparison starts with the metric that was stored first."""
    registry = MlflowRegistry(CLOSED, tmp_path / "queue.jsonl", retry_policy=QUICK)
    registry.start_run("run", {}, {}, [])
    folder, event = publication(tmp_path, 0)
    registry.publish(folder, event, {"judged": 3.0, "probe/tokens_per_second": 2.0, "probe/acceptance": 0.5})
    registry.close(0)
    *_, message = read_undelivered(tmp_path / "queue.jsonl")
    assert list(message.body["metrics"])[:3] == ["probe/acceptance", "probe/tokens_per_second", "judged"]
