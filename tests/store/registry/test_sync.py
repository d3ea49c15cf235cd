"""What a run's folder has is in a real MLflow store once, and is fetched unchanged."""

import math
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from event_making import make_completed, make_updated
from registry_making import BEGAN, MODEL, LittleRun, check_files, new_store, play, publish_run, read_store
from version_making import CREATED_AT

from store.errors import CorruptError
from store.log.manifest import RunKind
from store.log.partitions import LEARNER, close_partition, create_worker_partition, open_partition
from store.log.run_log import Commit, RunLog
from store.registry.mlflow_client import connect, is_transient
from store.registry.mlflow_sync import RunSync, Sent
from store.registry.mlflow_versions import dataset
from store.registry.registered_version import metric_key, metric_name
from store.registry.registry import default_uri, fetch_version, list_versions, prune, show_version

SOURCES = [("docs", "builtin:docs"), ("code", "builtin:code")]


class Published(NamedTuple):
    """A store with a run of three versions."""

    root: Path
    uri: str


def find_run(uri: str, name: str) -> Any:
    (found,) = [run for run in connect(uri).search_runs(["1"], max_results=1000) if run.info.run_name == name]
    return connect(uri).get_run(found.info.run_id)  # it has the inputs, which a search omits


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """A store that the tests of this file share; they only add to it."""
    root = tmp_path_factory.mktemp("runs")
    run = LittleRun(root / "run-a", datasets=SOURCES)
    for version in range(3):
        run.publish({"mean_accepted_length": 1.0 + version, "acceptance": 0.25, "window_judged": 9.0, "lost": math.nan})
    run.finish({"totals": {"acceptance": 0.4, "ratio": None}})
    run.sync(new_store(root))
    return Published(root, default_uri(root))


def test_versions_are_listed_newest_first_with_parents_and_metrics(published: Published):
    found = list_versions(published.uri)[-3:]
    assert [version.number for version in found] == [3, 2, 1]
    assert [version.version for version in found] == [2, 1, 0]
    assert [version.parent for version in found] == [2, 1, None]
    assert [version.prompts for version in found] == [(101, 200), (0, 100), None]
    assert [version.acceptance for version in found] == [0.5, 0.25, None]
    assert [version.reason for version in found] == ["interval", "interval", "baseline"]
    assert {version.run for version in found} == {"run-a"}
    assert {version.created_at for version in found} == {datetime.fromisoformat(CREATED_AT)}, "not when they were sent"
    changes = [version.changes for version in found[1:]]
    assert changes == ["drafter +1 update; n-grams +7", "the drafter as it was loaded"]


def test_each_version_shows_its_own_metrics_and_what_changed(published: Published):
    for number in (1, 2, 3):
        details = show_version(published.uri, MODEL, number)
        assert details.metrics == {"acceptance": 0.25, "window_judged": 9.0, "mean_accepted_length": float(number)}
        shown = {key for key in connect(published.uri).get_model_version(MODEL, str(number)).tags if "." not in key}
        assert shown == {"run", "reason", "changes", "probe"}, "few, since the table of versions has a line for each"
        assert details.manifest["version"] == number - 1
        assert details.manifest["digest"] == details.tags["digest"] == details.summary.digest
        assert details.params["changes"] == details.summary.changes
        assert details.params["mode"] == "trie"


def test_the_run_is_finished_with_params_sources_summary_and_its_own_times(published: Published):
    run = find_run(published.uri, "run-a")
    assert run.info.status == "FINISHED"
    assert run.info.start_time == BEGAN
    assert run.info.end_time == datetime.fromisoformat(CREATED_AT).timestamp() * 1000
    assert run.data.params == {"mode": "trie", "target": "big", "drafter": "builtin:drafter"}
    assert run.data.metrics["whole/acceptance"] == 0.4
    assert "whole/ratio" not in run.data.metrics
    assert sorted(given.dataset.name for given in run.inputs.dataset_inputs) == ["code", "docs"]
    assert len(run.outputs.model_outputs) == 3
    assert "builtin:docs" in run.data.tags["mlflow.note.content"]
    assert (run.data.tags["target"], run.data.tags["drafter"]) == ("big", "builtin:drafter")
    artifacts = connect(published.uri).list_artifacts(run.info.run_id)
    assert [artifact.path for artifact in artifacts] == ["summary.json"]


def test_a_version_is_a_nested_run_whose_input_is_the_parents_model(published: Published):
    child, parent = find_run(published.uri, "run-a v2"), find_run(published.uri, "run-a v1")
    assert child.data.tags["mlflow.parentRunId"] == find_run(published.uri, "run-a").info.run_id
    assert [given.model_id for given in child.inputs.model_inputs] == [
        made.model_id for made in parent.outputs.model_outputs
    ]
    model = connect(published.uri).get_logged_model(child.outputs.model_outputs[0].model_id)
    assert str(model.status) == "READY"
    metrics = {metric.key: metric for metric in model.metrics}
    assert (metrics["acceptance"].value, metrics["acceptance"].step) == (0.25, 200)
    assert metrics["window_judged"].dataset_name == "docs + code"
    assert metrics["acceptance"].dataset_name == "probe"
    assert metrics["acceptance"].timestamp == datetime.fromisoformat(CREATED_AT).timestamp() * 1000


def test_curves_have_the_times_of_prompts_and_the_points_of_a_later_process_are_the_same(tmp_path: Path):
    uri, at_once = new_store(tmp_path), new_store(tmp_path / "other")
    for run in play(tmp_path / "run-a"):
        run.sync(uri)  # a comparison each time
    *_, whole = play(tmp_path / "other/run-a")
    sent = whole.sync(at_once)
    assert (sent.versions, sent.points > 40) == (2, True)
    assert read_store(uri) == read_store(at_once)
    points = read_store(uri)["runs"]["run-a"]["points"]
    assert [(step, when) for step, _, when in points["window/acceptance_rate"]] == [
        (offset, BEGAN + 1000 * (offset + 1)) for offset in range(6)
    ]
    assert [(step, when) for step, _, when in points["window/loss"]] == [(2, BEGAN + 3000), (5, BEGAN + 6000)]
    assert [(step, when) for step, _, when in points["window/drift_rate_after"]] == [(1, BEGAN + 2000)]


def test_a_complete_run_is_only_compared(published: Published, monkeypatch: pytest.MonkeyPatch):
    before = read_store(published.uri)
    monkeypatch.setattr("store.registry.log_points.LogPoints.read", lambda *_, **__: pytest.fail("nothing is missing"))
    assert RunSync(published.root / "run-a", published.uri).update(stopped=True) == Sent()
    assert read_store(published.uri) == before


def test_the_status_is_that_of_the_process_until_the_run_is_finished(tmp_path: Path):
    uri = new_store(tmp_path)
    run = LittleRun(tmp_path / "run-s")
    run.publish()
    seen = []
    for stopped in (False, True, False):
        run.sync(uri, stopped=stopped)
        seen.append(find_run(uri, "run-s").info.status)
    run.finish()
    run.sync(uri, stopped=True)
    assert [*seen, find_run(uri, "run-s").info.status] == ["RUNNING", "KILLED", "RUNNING", "FINISHED"]


def test_only_versions_of_commits_that_are_copied_are_sent(tmp_path: Path):
    uri, run = new_store(tmp_path), LittleRun(tmp_path / "run-m")
    run.publish()
    run.publish()
    sync = RunSync(run.folder, uri)
    assert sync.update(stopped=False, committed={".": 1}).versions == 1
    assert sync.update(stopped=False, committed={".": 2}).versions == 1


def test_what_somebody_deleted_or_pruned_does_not_come_back(tmp_path: Path):
    uri = new_store(tmp_path)
    kept, gone = publish_run(uri, tmp_path / "kept", 3), publish_run(uri, tmp_path / "gone", 1, model="m")
    connect(uri).delete_registered_model_alias(MODEL, "candidate")
    assert prune(uri, MODEL, 1, dry_run=False) == [1, 2]
    connect(uri).delete_run(find_run(uri, "gone").info.run_id)
    before = read_store(uri)
    for run in (kept, gone):
        assert run.sync(uri) == run.sync(uri)
        assert run.sync(uri).versions == 0
    assert read_store(uri) == before


def test_points_of_workers_are_in_the_order_of_time_and_wait_for_the_slowest(tmp_path: Path):
    uri, run = new_store(tmp_path), LittleRun(tmp_path / "run-w")
    first, second = (create_worker_partition(run.folder) for _ in range(2))
    learner = RunLog(open_partition(run.folder, LEARNER), kind=RunKind.LEARNER)
    logs = [RunLog(folder, kind=RunKind.WORKER) for folder in (first, second)]
    run.commit()

    def commit(log: RunLog, *events: Any) -> None:
        for event in events:
            log.append(event)
        log.commit(Commit(dict), wait=True)

    def offsets() -> list[int]:
        run.sync(uri)
        history = connect(uri).get_metric_history(find_run(uri, "run-w").info.run_id, "window/block_efficiency")
        return [point.step for point in history]

    commit(learner, make_updated(offset=3))
    commit(logs[0], make_completed(0), make_completed(3))
    assert offsets() == [], "the other worker has not committed"
    commit(logs[1], make_completed(1), make_completed(2))
    assert offsets() == [0, 1, 2]
    commit(logs[1], make_completed(4))
    assert offsets() == [0, 1, 2, 3]
    for log, folder in zip(logs, (first, second), strict=True):
        log.close()
        close_partition(folder)
    assert offsets() == [0, 1, 2, 3, 4]
    points = read_store(uri)["runs"]["run-w"]["points"]
    assert [(step, when) for step, _, when in points["window/loss"]] == [(3, BEGAN + 4000)]
    learner.finish()
    run.sync(uri)
    assert find_run(uri, "run-w").info.status == "FINISHED", "the learner ends last"


@pytest.mark.parametrize("name", ["temp-0.7", "a:b", "100%", 'it\'s "so"', "with space", "v1%20#?", "größe"])
def test_every_name_of_a_run_is_published(published: Published, name: str):
    publish_run(published.uri, published.root / name, 1, model="names")
    newest = list_versions(published.uri, "names")[0]
    assert newest.run == name
    assert fetch_version(f"models:/names/{newest.number}", published.uri, published.root / f"{name} fetched").is_dir()


@pytest.mark.representatives(3)
@pytest.mark.parametrize("name", ["1%20", "h#h", "q?q=1&x", "a:b@c", 'it\'s "so"', "100%"])
def test_a_folder_of_runs_may_have_any_name(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "cache"))
    runs = tmp_path / name
    uri = new_store(runs)
    publish_run(uri, runs / "run-a", 1)
    assert {path.name for path in runs.iterdir()} == {"mlflow.db", "mlartifacts", "run-a"}
    assert {path.name for path in tmp_path.iterdir()} <= {name, "cache"}
    check_files(default_uri(runs), runs / "run-a")
    moved = runs.rename(tmp_path / f"{name} moved")
    assert [version.run for version in list_versions(default_uri(moved))] == ["run-a"]
    check_files(default_uri(moved), moved / "run-a")


def test_the_alias_is_the_newest_that_learned(tmp_path: Path):
    uri = new_store(tmp_path)
    publish_run(uri, tmp_path / "run-a", 3)
    unlearned = LittleRun(tmp_path / "run-b")
    for _ in range(2):  # like a run with `--no-learn`: only n-grams are new in the second
        unlearned.publish(drafter_version=0)
    unlearned.sync(uri)
    newest, baseline, learned, *_ = list_versions(uri)
    assert (newest.run, newest.aliases) == ("run-b", ()), "neither the drafter nor the head has changed"
    assert (baseline.run, baseline.reason, baseline.aliases) == ("run-b", "baseline", ())
    assert (learned.run, learned.aliases) == ("run-a", ("candidate",))
    publish_run(uri, tmp_path / "run-c", 2)
    newest, *others = list_versions(uri)
    assert (newest.run, newest.number, newest.aliases) == ("run-c", others[0].number + 1, ("candidate",))
    assert {version.aliases for version in others} == {()}


def test_the_alias_follows_a_run_in_which_only_the_memory_changes(tmp_path: Path):
    """By default a first run may change no weights; its newest version is not its baseline, and they are compared."""
    uri, run = new_store(tmp_path), LittleRun(tmp_path / "run-a")
    for _ in range(3):
        run.publish(drafter_version=0)
    run.sync(uri)
    assert [version.aliases for version in list_versions(uri)] == [("candidate",), (), ()]


def test_a_registered_model_holds_one_pair(tmp_path: Path):
    """Numbers and aliases of versions that are not comparable would mix."""
    publish_run(uri := new_store(tmp_path), tmp_path / "run-a", 1)
    other = LittleRun(tmp_path / "run-b", drafter="builtin:other")
    event = other.publish(target="builtin:small")
    (refused,) = other.sync(uri).refused
    assert "must hold one pair, drafter for builtin:target, got drafter for builtin:small" in refused
    assert (event.version, len(list_versions(uri))) == (0, 1)


def test_a_version_is_described_by_what_changed(tmp_path: Path):
    uri, run = new_store(tmp_path), LittleRun(tmp_path / "run-c")
    run.publish()
    run.publish(drafter_version=0, drift="drift at prompt 60", changes="drafter unchanged; n-grams +53")
    run.publish(drafter_version=3)
    run.sync(uri)
    notes = [connect(uri).get_model_version(MODEL, str(number)).description for number in range(1, 4)]
    assert notes == [
        "baseline at prompt 0: the drafter as it was loaded",
        "interval at prompt 100: drafter unchanged; n-grams +53 since prompt 0, "
        "the first version after the drift at prompt 60",
        "interval at prompt 200: drafter +1 update; n-grams +7 since prompt 101",
    ], "one whose drafter did not change is not called trained"
    tags = show_version(uri, MODEL, 2).tags
    assert tags["drift"] == "drift at prompt 60"
    assert (tags["prompts"], tags["run"], tags["target"]) == ("0-100", "run-c", "builtin:target")


def test_a_version_that_is_damaged_is_named_and_its_successor_has_the_previous_one_as_parent(tmp_path: Path):
    uri, run = new_store(tmp_path), LittleRun(tmp_path / "run-d")
    for version in range(4):
        folder = run.folder / run.publish().folder
        if version == 2:
            whole = (folder / "config.json").read_bytes()
            (folder / "config.json").write_text("changed")
    (refused,) = run.sync(uri).refused
    assert refused.startswith("version 2:")
    assert "config.json was changed" in refused
    found = {version.version: version for version in list_versions(uri)}
    assert {version: one.parent for version, one in found.items()} == {0: None, 1: found[0].number, 3: found[1].number}
    assert found[3].prompts == (101, 300)
    run.finish()
    assert run.sync(uri).refused == (refused,), "a finished run, too"
    (run.folder / "versions/000002/config.json").write_bytes(whole)
    assert run.sync(uri).versions == 1
    assert [version.aliases for version in list_versions(uri)] == [(), ("candidate",), (), ()]


def test_a_run_starts_if_the_version_that_it_starts_from_was_deleted(tmp_path: Path):
    uri = new_store(tmp_path)
    publish_run(uri, tmp_path / "run-e", 2)
    publish_run(uri, tmp_path / "run-f", 1, drafter=f"models:/{MODEL}/1")
    assert list_versions(uri)[0].parent == 1
    connect(uri).delete_registered_model_alias(MODEL, "candidate")
    assert prune(uri, MODEL, 1, dry_run=False) == [1, 2]
    for number, drafter in enumerate((f"models:/{MODEL}@candidate", f"models:/{MODEL}/2")):
        publish_run(uri, tmp_path / f"later-{number}", 1, drafter=drafter)
    assert [version.parent for version in list_versions(uri)[:2]] == [None, None]


def test_names_that_mlflow_refuses_are_cleaned(tmp_path: Path):
    uri = new_store(tmp_path)
    sources = [("gsm8k (1)", "x"), *((f"long-{number:03}", f"/data/{'x' * 400}/{number}") for number in range(25))]
    run = LittleRun(tmp_path / "run-n", datasets=[*sources, ("y" * 600, "z" * 70_000)])
    run.publish({"a+b": 1.0})
    run.finish({"gsm8k (1)/acceptance_rate": 0.5, "../x": 1.0, f"{'x' * 300}/rate": 2.0})
    run.sync(uri)
    expected = {"whole/gsm8k_1_/acceptance_rate": 0.5, "whole/_/x": 1.0, f"whole/{'x' * 100}/rate": 2.0}
    assert find_run(uri, "run-n").data.metrics == expected
    assert show_version(uri, MODEL, 1).metrics["a_b"] == 1.0
    assert dataset("n" * 201, "").digest != dataset("n" * 202, "").digest


@pytest.mark.parametrize(
    ("text", "name"), [("a b/c", "a_b_c"), ("gsm8k (1)", "gsm8k_1_"), ("..", "_"), ("", "_"), ("v1.0-x_y", "v1.0-x_y")]
)
def test_a_part_of_a_metric_name_is_cleaned(text: str, name: str):
    assert metric_name(text) == name
    assert metric_key(f"whole/{name}") == f"whole/{name}"


def test_a_run_without_a_description_is_refused(published: Published, tmp_path: Path):
    run = LittleRun(tmp_path / "run-x")
    (run.folder / "mlflow.json").write_text("{")
    with pytest.raises(CorruptError, match=r"mlflow.json must describe the run"):
        run.sync(published.uri)
    (run.folder / "mlflow.json").unlink()
    with pytest.raises(CorruptError, match="has no description"):
        run.sync(published.uri)


def test_a_missing_file_is_not_an_outage():
    causes = (FileNotFoundError(), NotADirectoryError(), ConnectionResetError())
    assert [is_transient(cause) for cause in causes] == [False, False, True]
