"""In a moved or copied folder of runs everything is found, and nothing is written to the old place."""

import shutil
import sqlite3
from pathlib import Path
from unittest.mock import Mock

import pytest
from registry_making import MODEL, new_store, publish_run
from version_making import contents

import pipeline
from dashboards.web.registered import list_numbers
from store.registry.mlflow_client import connect
from store.registry.mlflow_pages import list_pages
from store.registry.registry import default_uri, fetch_version, list_versions, promote, rollback
from store.registry.relocation import ARTIFACTS, adopt_artifacts


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with a run of two versions, each of which was the champion once."""
    folder = tmp_path / "runs"
    publish_run(new_store(folder), folder / "run-a", 2)
    for number in (1, 2):
        promote(default_uri(folder), MODEL, number)
    return folder


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("way", ["moved", "copied"])
def test_everything_is_found_in_the_new_folder(runs: Path, tmp_path: Path, way: str):
    there = tmp_path / "a new place" / "runs"
    there.parent.mkdir()
    if way == "moved":
        runs.rename(there)
    else:
        shutil.copytree(runs, there)
    before = files(runs) if way == "copied" else set()
    uri = default_uri(there)

    assert [version.number for version in list_versions(uri)] == [2, 1]
    fetched = fetch_version(f"models:/{MODEL}/2", uri, tmp_path / "fetched")
    assert contents(fetched) == contents(there / "run-a/versions/000001")
    assert pipeline.load_version(f"{MODEL}@champion", uri).number == 2
    assert rollback(uri, MODEL) == (2, 1)
    known = list_numbers(there, ["run-a"])
    assert {row["number"]: row["aliases"] for row in known} == {1: ("champion",), 2: ("candidate",)}
    publish_run(uri, there / "run-b", 1)
    assert [version.number for version in list_versions(uri)] == [3, 2, 1]
    assert any(name.startswith(ARTIFACTS) for name in files(there) - before)
    assert files(runs) == before if way == "copied" else not runs.exists()


def test_no_address_in_a_moved_store_is_outside_of_it(runs: Path, tmp_path: Path):
    former, there = runs.as_uri(), tmp_path / "there"
    runs.rename(there)
    list_pages(default_uri(there))  # as `omnidraft dashboard --mlflow` calls it before it starts MLflow's server
    with sqlite3.connect(there / "mlflow.db") as store:
        tables = [name for (name,) in store.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = {
            table: [row for row in store.execute(f"SELECT * FROM {table}") if any(former in str(cell) for cell in row)]
            for table in tables
        }
    assert {table: rows for table, rows in found.items() if rows} == {}


def test_a_store_with_files_elsewhere_is_left_unchanged(tmp_path: Path):
    uri, elsewhere = new_store(tmp_path / "store"), tmp_path / "elsewhere" / ARTIFACTS
    elsewhere.mkdir(parents=True)
    connect(uri).create_experiment("omnidraft", elsewhere.as_uri())
    adopt_artifacts(tmp_path / "store" / "mlflow.db")
    assert connect(uri).get_experiment_by_name("omnidraft").artifact_location == elsewhere.as_uri()


def test_a_store_that_cannot_be_changed_is_reported(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    there = tmp_path / "there"
    runs.rename(there)

    refuse = Mock(side_effect=sqlite3.OperationalError("attempt to write a readonly database"))
    monkeypatch.setattr("store.registry.relocation._change_addresses", refuse)
    adopt_artifacts(there / "mlflow.db")
    assert f"its addresses of files still lead to {(runs / ARTIFACTS).as_uri()}" in caplog.text
