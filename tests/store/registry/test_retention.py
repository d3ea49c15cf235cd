"""Champion, rollback, prune and comparisons, in a real store."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from registry_making import new_store, publish_run
from version_making import contents

from store.errors import CorruptError, ModelError, UsageError
from store.registry.mlflow_client import connect, model_id_of
from store.registry.mlflow_comparisons import list_comparisons, record_comparison
from store.registry.registry import fetch_version, list_versions, promote, prune, rollback, show_version


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return new_store(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def shared(uri: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A registered model with versions 1 to 5 of one run, 1 being the baseline; no test deletes any."""
    publish(uri, tmp_path_factory.mktemp("shared"), "shared", "run-s", 5)
    return "shared"


@pytest.fixture
def model(uri: str, tmp_path: Path) -> str:
    """A registered model with versions 1 to 5 for one test alone."""
    publish(uri, tmp_path, tmp_path.name, "run-a", 5)
    return tmp_path.name


def publish(uri: str, folder: Path, model: str, run: str, count: int, drafter: str = "builtin:drafter") -> None:
    publish_run(uri, folder / run, count, model, drafter)


def numbers(uri: str, model: str) -> list[int]:
    return sorted(version.number for version in list_versions(uri, model))


def champion(uri: str, model: str) -> list[int]:
    return [version.number for version in list_versions(uri, model) if "champion" in version.aliases]


def files_of(uri: str, model: str, number: int) -> Path:
    client = connect(uri)
    return Path(client.get_model_version_download_uri(model, str(number)).removeprefix("file://"))


@pytest.mark.slow
def test_rollback_returns_to_former_champions_in_turn(uri: str, shared: str):
    assert promote(uri, shared, 2) is None
    assert promote(uri, shared, 4) == 2
    assert promote(uri, shared, 4) == 4
    assert promote(uri, shared, 3) == 4
    assert champion(uri, shared) == [3]
    assert rollback(uri, shared) == (3, 4)
    assert rollback(uri, shared) == (4, 2)
    assert champion(uri, shared) == [2]
    with pytest.raises(ModelError, match="run-s/1 has had none"):
        rollback(uri, shared)


def test_a_champion_must_exist(uri: str, shared: str):
    connect(uri).delete_registered_model_alias(shared, "champion")
    with pytest.raises(ModelError, match="must have a version 9"):
        promote(uri, shared, 9)
    connect(uri).delete_registered_model_tag(shared, "former_champions")
    with pytest.raises(
        ModelError,
        match=f"it has no champion.* `omnidraft versions promote VERSION --name {shared} --mlflow-uri {uri}`",
    ):
        rollback(uri, shared)
    with pytest.raises(ModelError, match="has none"):
        promote(uri, "nothing", 1)


def test_a_process_that_is_killed_between_two_writes_leaves_no_trace(uri, model, monkeypatch: pytest.MonkeyPatch):
    from mlflow import MlflowClient

    promote(uri, model, 2)
    promote(uri, model, 3)
    alias, tag, calls = MlflowClient.set_registered_model_alias, MlflowClient.set_registered_model_tag, list[int]()

    def die_at(last: int, write):
        def call(*arguments):
            calls.append(last)
            if len(calls) == last:
                raise ConnectionError
            write(*arguments)

        return call

    for change, last, left in ((lambda: promote(uri, model, 5), 2, 3), (lambda: rollback(uri, model), 3, 2)):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(MlflowClient, "set_registered_model_alias", die_at(last, alias))
            patch.setattr(MlflowClient, "set_registered_model_tag", die_at(last, tag))
            with pytest.raises(ConnectionError):
                change()
        assert champion(uri, model) == [left]
    promote(uri, model, 4)
    assert rollback(uri, model) == (4, 2)
    with pytest.raises(ModelError, match="run-a/1 has had none"):
        rollback(uri, model)


def test_after_the_champion_was_deleted_rollback_returns_to_the_former_one(uri: str, model: str):
    promote(uri, model, 2)
    promote(uri, model, 3)
    connect(uri).delete_model_version(model, "3")
    assert rollback(uri, model) == (None, 2)


def test_rollback_skips_pruned_versions_and_an_edited_tag(uri: str, shared: str):
    connect(uri).set_registered_model_tag(shared, "former_champions", "2, 77")
    promote(uri, shared, 5)
    assert rollback(uri, shared) == (5, 2)
    connect(uri).set_registered_model_tag(shared, "former_champions", "edited")
    with pytest.raises(ModelError, match="has had none"):
        rollback(uri, shared)


@pytest.mark.slow
def test_prune_keeps_champion_candidate_their_ancestors_and_the_newest(uri: str, model: str, tmp_path: Path):
    publish(uri, tmp_path, model, "run-b", 4)  # 6 to 9; the candidate is 9
    promote(uri, model, 3)
    assert prune(uri, model, 1, dry_run=True) == [4, 5]
    assert numbers(uri, model) == list(range(1, 10))
    folders = {number: files_of(uri, model, number) for number in numbers(uri, model)}
    assert prune(uri, model, 1, dry_run=False) == [4, 5]
    assert numbers(uri, model) == [1, 2, 3, 6, 7, 8, 9]
    assert [number for number, folder in folders.items() if not folder.exists()] == [4, 5]
    assert prune(uri, model, 1, dry_run=False) == []
    fetched = fetch_version(f"models:/{model}/3", uri, tmp_path / "fetched")
    assert contents(fetched) == contents(tmp_path / "run-a/versions/000002")
    with pytest.raises(ModelError, match="must have a version 4"):
        show_version(uri, model, 4)


@pytest.mark.slow
def test_prune_keeps_the_ancestors_of_a_run_that_started_from_another(uri: str, model: str, tmp_path: Path):
    promote(uri, model, 1)
    publish(uri, tmp_path, model, "run-b", 2, drafter=f"models:/{model}/3")  # 6 and 7
    assert [version.parent for version in list_versions(uri, model)][:2] == [6, 3]
    assert prune(uri, model, 0, dry_run=False) == [4, 5]
    assert numbers(uri, model) == [1, 2, 3, 6, 7]


def test_prune_keeps_the_newest_versions_without_their_ancestors(uri: str, model: str):
    promote(uri, model, 1)
    connect(uri).delete_registered_model_alias(model, "candidate")
    assert prune(uri, model, 2, dry_run=False) == [2, 3]
    assert numbers(uri, model) == [1, 4, 5]


@pytest.mark.slow
def test_prune_keeps_the_target_of_a_rollback_and_its_ancestors(uri: str, model: str, tmp_path: Path):
    publish(uri, tmp_path, model, "run-b", 3)  # 6 to 8
    for number in (1, 4, 3, 8):
        promote(uri, model, number)
    connect(uri).set_registered_model_tag(model, "former_champions", "1, 4, 3, 77")
    assert prune(uri, model, 0, dry_run=False) == [4, 5]
    assert rollback(uri, model) == (8, 3)
    with pytest.raises(ModelError, match="must have a version 4, but has 1 to 3, 6 to 8;"):
        promote(uri, model, 4)


def test_an_interrupted_prune_is_completed_by_the_next(uri: str, model: str, monkeypatch: pytest.MonkeyPatch):
    from mlflow import MlflowClient

    connect(uri).delete_registered_model_alias(model, "candidate")
    folders = [files_of(uri, model, number) for number in (1, 2, 3, 4)]
    logged = [model_id_of(connect(uri).get_model_version(model, number)) for number in "1234"]

    for lost in ("set_tag", "delete_logged_model", "delete_model_version"):
        with monkeypatch.context() as patch:
            patch.setattr(MlflowClient, lost, Mock(side_effect=ConnectionError("lost")))
            with pytest.raises(ConnectionError):
                prune(uri, model, 1, dry_run=False)
    assert prune(uri, model, 1, dry_run=False) == [1, 2, 3, 4]
    assert numbers(uri, model) == [5]
    assert not any(folder.exists() for folder in folders)
    left = connect(uri).search_logged_models(["1"], max_results=1000)
    assert not {one.model_id for one in left} & set(logged)


def test_a_comparison_is_recorded_as_one_run_however_often_it_is_written(uri: str, shared: str, tmp_path: Path):
    report = tmp_path / "comparison.json"
    report.write_text("{}")
    metrics = {"acceptance/difference": 0.1, "acceptance/low": 0.05}
    first = record_comparison(uri, shared, 1, 4, metrics, [report], (100.0, 130.0))
    assert record_comparison(uri, shared, 1, 4, dict(reversed(metrics.items())), [report], (100.0, 130.0)) == first
    run = connect(uri).get_run(first)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "#1 and #4")
    assert (run.info.start_time, run.info.end_time) == (100_000, 130_000), "of the comparison, not of the sending"
    assert run.data.metrics == metrics
    assert run.data.params == {"model": shared, "first": "1", "second": "4"}
    assert run.data.tags["kind"] == "comparison"
    assert len(connect(uri).get_metric_history(first, "acceptance/low")) == 1
    compared = [model_id_of(connect(uri).get_model_version(shared, number)) for number in ("1", "4")]
    assert sorted(given.model_id for given in run.inputs.model_inputs) == sorted(compared)
    assert [artifact.path for artifact in connect(uri).list_artifacts(first)] == ["comparison.json"]
    report.write_text("[]")
    assert record_comparison(uri, shared, 1, 4, metrics, [report], (100.0, 130.0)) != first
    listed = [one for one in list_comparisons(uri) if one.name == shared]
    assert [(one.first, one.second) for one in listed] == [(1, 4)] * 2
    assert listed[0].metrics == run.data.metrics


def move(uri: str, shared: str, to: str) -> None:
    """Set the location of the files of version 2, as a hostile registry could."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(uri)
    known = model_id_of(connect(uri).get_model_version(shared, "2"))
    with engine.begin() as connection:
        statement = sqlalchemy.text("UPDATE logged_models SET artifact_location = :to WHERE model_id = :id")
        connection.execute(statement, {"to": to, "id": known})
    engine.dispose()


@pytest.mark.parametrize(
    "where", ["{root}/../{name}/secret", "file://{root}/secret", "{root}/nothing", "{root}/secret/.."]
)
def test_files_outside_the_store_are_refused_and_leave_nothing(uri: str, shared: str, tmp_path: Path, where: str):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/password.txt").write_text("secret")
    move(uri, shared, where.format(root=tmp_path, name=tmp_path.name))
    before = contents(tmp_path)
    with pytest.raises((CorruptError, UsageError)):
        fetch_version(f"models:/{shared}/2", uri, tmp_path / "into/version")
    assert contents(tmp_path) == before


def test_links_that_lead_out_of_the_store_are_not_followed(uri: str, shared: str, tmp_path: Path):
    (tmp_path / "secret.txt").write_text("secret")
    link = files_of(uri, shared, 3) / "tokenizer.txt"
    link.symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UsageError, match=r"tokenizer.txt(.|\n)*outside the artifact directory"):
        fetch_version(f"models:/{shared}/3", uri, tmp_path / "into/version")
    link.unlink()
    assert not (tmp_path / "into/version").exists()
