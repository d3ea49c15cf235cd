"""Names that MLflow refuses, files and versions that no longer exist, and stores that cannot be read."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
from registry_making import new_store
from version_making import contents, publication

from store.errors import CorruptError, ModelError, UsageError
from store.outbox import RetryPolicy
from store.registry.mlflow_client import connect, fetch_pages, is_transient
from store.registry.mlflow_versions import dataset
from store.registry.registered_version import metric_key, metric_name
from store.registry.registry import MlflowRegistry, fetch_version, list_versions, show_version
from store.registry.retention import prune

QUICK = RetryPolicy(attempts=2, backoff=0.01, max_backoff=0.01, linger=0.01)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return new_store(tmp_path_factory.mktemp("runs"))


def start_run_of(uri: str, folder: Path, sources=(("docs", "builtin:docs"),), drafter: str = "") -> MlflowRegistry:
    """Start a run that is named like its folder, as is its registered model."""
    registry = MlflowRegistry(uri, folder / "q.jsonl", model=folder.name, retry_policy=QUICK)
    registry.start_run(folder.name, {"drafter": drafter}, {}, sources)
    return registry


def run_of(uri: str, folder: Path):
    return connect(uri).search_runs(["1"], f"attributes.run_name = '{folder.name}'")[0]


def test_a_missing_file_does_not_prevent_the_end_of_the_run(uri: str, tmp_path: Path):
    (tmp_path / "summary.json").write_text("{}")
    registry = start_run_of(uri, tmp_path)
    registry.finish({"acceptance": 0.5}, [tmp_path / "acceptance.png", tmp_path / "summary.json"])
    assert registry.close(60) == 0, registry.last_error
    run = run_of(uri, tmp_path)
    assert run.info.status == "FINISHED"
    assert [one.path for one in connect(uri).list_artifacts(run.info.run_id)] == ["summary.json"]


def test_a_missing_file_is_not_an_outage():
    assert not is_transient(FileNotFoundError())
    assert not is_transient(NotADirectoryError())
    assert is_transient(ConnectionResetError())


def test_names_that_mlflow_refuses_are_cleaned(uri: str, tmp_path: Path):
    registry = start_run_of(uri, tmp_path, [("gsm8k (1)", "x")])
    registry.log_points([("curve/gsm8k (1)", 0.25, 0, 1)])
    registry.publish(*publication(tmp_path, 0, "run-n"), {"a+b": 1.0})
    registry.finish({"gsm8k (1)/acceptance_rate": 0.5, "../x": 1.0, f"{'x' * 300}/rate": 2.0}, [])
    assert registry.close(60) == 0, registry.last_error
    run = run_of(uri, tmp_path)
    assert run.info.status == "FINISHED"
    assert run.data.metrics == {
        "curve/gsm8k_1_": 0.25,
        "final/gsm8k_1_/acceptance_rate": 0.5,
        "final/_/x": 1.0,
        f"final/{'x' * 100}/rate": 2.0,
    }
    assert show_version(uri, tmp_path.name, 1).metrics["a_b"] == 1.0


@pytest.mark.parametrize(
    ("text", "name"), [("a b/c", "a_b_c"), ("gsm8k (1)", "gsm8k_1_"), ("..", "_"), ("", "_"), ("v1.0-x_y", "v1.0-x_y")]
)
def test_a_part_of_a_metric_name_is_cleaned(text: str, name: str):
    assert metric_name(text) == name
    assert metric_key(f"final/{name}") == f"final/{name}"


def test_many_sources_with_long_names_make_one_dataset(uri: str, tmp_path: Path):
    sources = [(f"source-with-a-long-name-{number:03}", f"/data/{'x' * 400}/{number}") for number in range(25)]
    registry = start_run_of(uri, tmp_path, [*sources, ("y" * 600, "z" * 70_000)])
    registry.publish(*publication(tmp_path, 0, "run-l"), {"x": 1.0})
    registry.finish({}, [])
    assert registry.close(60) == 0, registry.last_error
    assert show_version(uri, tmp_path.name, 1).metrics["x"] == 1.0
    assert dataset("n" * 201, "").digest != dataset("n" * 202, "").digest


def test_a_run_starts_if_its_parent_version_was_deleted(uri: str, tmp_path: Path):
    earlier = start_run_of(uri, tmp_path)
    for version in range(2):
        earlier.publish(*publication(tmp_path, version, "run-e"), {})
    assert earlier.close(60) == 0, earlier.last_error
    connect(uri).delete_registered_model_alias(tmp_path.name, "candidate")
    assert prune(uri, tmp_path.name, 1, dry_run=False) == [1]
    for number, drafter in enumerate((f"models:/{tmp_path.name}/1", f"models:/{tmp_path.name}@candidate")):
        (tmp_path / f"{number}").mkdir()
        later = MlflowRegistry(uri, tmp_path / f"{number}/q.jsonl", model=tmp_path.name, retry_policy=QUICK)
        later.start_run("later", {"drafter": drafter}, {}, [])
        assert later.close(60) == 0, later.last_error


def test_the_successor_of_a_refused_version_has_the_previous_one_as_parent(uri: str, tmp_path: Path):
    registry = start_run_of(uri, tmp_path)
    for version in range(4):
        folder, event = publication(tmp_path, version, "run-r")
        if version == 2:
            (folder / "config.json").write_text("changed")
        registry.publish(folder, event, {})
    assert registry.close(60) == 1
    found = {version.version: version for version in list_versions(uri, tmp_path.name)}
    assert {version: one.parent for version, one in found.items()} == {0: None, 1: found[0].number, 3: found[1].number}
    assert found[3].learned == (101, 300)


def test_an_edited_field_of_a_stored_manifest_is_refused(uri: str, tmp_path: Path):
    registry = start_run_of(uri, tmp_path)
    registry.publish(*publication(tmp_path, 0, "run-m"), {})
    assert registry.close(60) == 0, registry.last_error
    assert show_version(uri, tmp_path.name, 1).manifest["target"] == "builtin:target"
    where = connect(uri).get_model_version_download_uri(tmp_path.name, "1").removeprefix("file://")
    stored = Path(where) / "manifest.json"
    assert show_version(uri, tmp_path.name, 1).tags["manifest"] == hashlib.sha256(stored.read_bytes()).hexdigest()
    manifest = json.loads(stored.read_bytes()) | {"target": "another"}
    stored.write_text(json.dumps(manifest))
    with pytest.raises(CorruptError, match="registered manifest"):
        show_version(uri, tmp_path.name, 1)
    with pytest.raises(CorruptError, match="registered manifest"):
        fetch_version(f"models:/{tmp_path.name}/1", uri, tmp_path / "into/v")
    assert list((tmp_path / "into").iterdir()) == []


@pytest.mark.parametrize("store", ["sqlite:///{folder}/bad.db", "foo://x", "postgresql+psycopg9://localhost:9/x"])
def test_a_store_that_cannot_be_read_gives_a_clear_error(tmp_path: Path, store: str):
    (tmp_path / "bad.db").write_text("not a database, " * 100)
    with pytest.raises(UsageError, match=r"MLflow at .* must"):
        list_versions(store.format(folder=tmp_path), "m")


def test_a_driver_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(UsageError, match="psycopg2"):
        list_versions("postgresql+psycopg2://localhost:9/x", "m")


def test_a_version_is_not_fetched_into_or_below_a_file(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    registry = start_run_of(uri, tmp_path)
    folder, event = publication(tmp_path, 0, "run-f")
    registry.publish(folder, event, {})
    assert registry.close(60) == 0, registry.last_error
    (tmp_path / "file").write_text("mine")
    for into in (tmp_path / "file", tmp_path / "file/below", tmp_path / "file/below/it"):
        with pytest.raises(UsageError, match="must be fetched into a folder"):
            fetch_version(f"models:/{tmp_path.name}/1", uri, into)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    fetch_version(f"models:/{tmp_path.name}/1", uri, Path())
    assert contents(tmp_path / "empty") == contents(folder)


@pytest.mark.parametrize("name", ["it's", 'a"b', "a`b"])
def test_a_model_name_with_quotes_is_refused(uri: str, name: str, tmp_path: Path):
    for query in (
        lambda: list_versions(uri, name),
        lambda: show_version(uri, name, 1),
        lambda: fetch_version(f"models:/{name}/1", uri, tmp_path / "v"),
    ):
        with pytest.raises(ModelError, match="free of quotes"):
            query()


def test_the_error_for_an_unknown_version_lists_the_existing_numbers(uri: str, tmp_path: Path):
    registry = start_run_of(uri, tmp_path)
    for version in range(5):
        registry.publish(*publication(tmp_path, version, "run-s"), {})
    assert registry.close(60) == 0, registry.last_error
    connect(uri).delete_model_version(tmp_path.name, "4")
    with pytest.raises(ModelError, match="must have a version 4, but has 1 to 3, 5;"):
        show_version(uri, tmp_path.name, 4)


class Page(list):
    token: str | None


def test_a_search_goes_through_all_pages():
    def search(token: str | None) -> Page:
        first = int(token or 0)
        page = Page(range(first, first + 2))
        page.token = str(first + 2) if first < 4 else None
        return page

    assert fetch_pages(search) == [0, 1, 2, 3, 4, 5]
