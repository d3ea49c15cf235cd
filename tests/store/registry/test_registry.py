"""Versions are fetched unchanged or refused, and what cannot be found or read is named."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
from registry_making import MODEL, new_store, publish_run
from version_making import contents, publication

from store.errors import CorruptError, ModelError, UsageError
from store.registry.mlflow_client import connect, fetch_pages
from store.registry.registry import default_uri, fetch_version, list_versions, resolve_number, show_version


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with versions 1 to 3 of one run."""
    folder = tmp_path_factory.mktemp("runs")
    uri = new_store(folder)
    publish_run(uri, folder / "run-a", 3)
    return uri


@pytest.mark.parametrize(
    "reference", ["models:/x", "models:/x/y", "models:/x@", "x/1", "models:/a/b/1", "models:/x/-1"]
)
def test_the_error_for_a_malformed_reference_shows_the_form(uri: str, tmp_path: Path, reference: str):
    with pytest.raises(ModelError, match="models:/NAME/NUMBER"):
        fetch_version(reference, uri, tmp_path / "v")


@pytest.mark.parametrize("reference", [f"models:/{MODEL}/99", f"models:/{MODEL}@champion", "models:/unknown/1"])
def test_an_unknown_version_is_named(uri: str, tmp_path: Path, reference: str):
    with pytest.raises(ModelError, match="must have a version"):
        fetch_version(reference, uri, tmp_path / "v")
    assert not (tmp_path / "v").exists()


def test_a_folder_with_files_is_not_overwritten(uri: str, tmp_path: Path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="empty folder"):
        fetch_version(f"models:/{MODEL}/1", uri, tmp_path)
    assert contents(tmp_path) == {"mine.txt": b"mine"}


def stored_files(uri: str, number: int) -> Path:
    """The folder in which the store keeps the files of a version."""
    client = connect(uri)
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
def test_an_artifact_that_was_tampered_with_is_refused(uri: str, tmp_path: Path, harm, message: str):
    folder = stored_files(uri, 2)
    before = contents(folder)
    try:
        harm(folder)
        with pytest.raises(CorruptError, match=message):
            fetch_version(f"models:/{MODEL}/2", uri, tmp_path / "v")
        assert list(tmp_path.iterdir()) == []
    finally:
        for path in folder.rglob("*"):
            if path.is_file():
                path.unlink()
        for name, whole in before.items():
            (folder / name).write_bytes(whole)
    fetch_version(f"models:/{MODEL}/2", uri, tmp_path / "v")


def test_reading_creates_no_store_and_reports_what_is_missing(tmp_path: Path):
    with pytest.raises(UsageError, match=r"mlflow.db does not; `omnidraft replay`"):
        list_versions(default_uri(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_an_unpublished_model_has_no_versions(uri: str):
    assert list_versions(uri, "nothing") == []


def test_an_edited_field_of_a_stored_manifest_is_refused(uri: str, tmp_path: Path):
    publish_run(uri, tmp_path / "run-m", 1, model=tmp_path.name)
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
    folder = publish_run(uri, tmp_path / "run-f", 1, model=tmp_path.name).folder / "versions/000000"
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
    publish_run(uri, tmp_path / "run-s", 5, model=tmp_path.name)
    connect(uri).delete_model_version(tmp_path.name, "4")
    with pytest.raises(ModelError, match="must have a version 4, but has 1 to 3, 5;"):
        show_version(uri, tmp_path.name, 4)


def test_a_version_is_named_by_its_number_or_an_alias(uri: str):
    assert [resolve_number(uri, MODEL, text) for text in ("2", "#2", "candidate")] == [2, 2, 3]
    assert [resolve_number(uri, MODEL, one.label) for one in list_versions(uri, MODEL)] == [3, 2, 1]
    for text in ("champion", "two", "-1"):
        with pytest.raises(ModelError, match=rf"its number or an alias \(candidate\), got '{text}'"):
            resolve_number(uri, MODEL, text)


class Page(list):
    token: str | None


def test_a_search_goes_through_all_pages():
    def search(token: str | None) -> Page:
        first = int(token or 0)
        page = Page(range(first, first + 2))
        page.token = str(first + 2) if first < 4 else None
        return page

    assert fetch_pages(search) == [0, 1, 2, 3, 4, 5]
