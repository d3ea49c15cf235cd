"""Runs without models for the registry, MLflow clients that fail, and what must be in MLflow in the end."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from event_making import make_completed, make_drifted, make_updated
from version_making import contents, publication

from store.events import Event, VersionPublished
from store.log.run_log import Commit, RunLog
from store.registry.mlflow_client import connect
from store.registry.mlflow_sync import RunSync, Sent
from store.registry.registry import default_uri, fetch_version, list_versions
from store.registry.run_description import RunDescription

MODEL = "omnidraft-drafter"  # registered model of the runs
BEGAN = 1_700_000_000_000
CLOSED = "http://127.0.0.1:9"  # nothing listens on the discard port


@cache
def template() -> Path:
    """The folder of an empty store, made once in a test session: MLflow's schema takes seconds."""
    folder = tempfile.TemporaryDirectory(prefix="omnidraft-mlflow-")
    atexit.register(folder.cleanup)
    connect(default_uri(Path(folder.name))).search_experiments()
    return Path(folder.name)


def new_store(folder: Path) -> str:
    """The URI of an empty store in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(template() / "mlflow.db", folder / "mlflow.db")
    return default_uri(folder)


class LittleRun:
    """A run in a folder: its log and its versions, of a registered model."""

    def __init__(
        self,
        folder: Path,
        *,
        model: str = MODEL,
        drafter: str = "builtin:drafter",
        datasets: Sequence[tuple[str, str]] = (("docs", "builtin:docs"),),
        targets: Sequence[str] = ("big",),
    ) -> None:
        self.folder, self._model = folder, model
        folder.mkdir(parents=True, exist_ok=True)
        params = {"mode": "trie", "target": "big", "drafter": drafter}
        made = RunDescription.create(folder.name, params, datasets, targets, None)
        self.description = replace(made, began=BEGAN)
        self.description.write(folder)
        self.log = RunLog(folder)
        self._number = 0

    def commit(self, *events: Event) -> None:
        """Append events and commit them."""
        for event in events:
            self.log.append(event)
        self.log.commit(Commit(lambda: {"state.json": b"{}"}), wait=True)

    def publish(
        self,
        metrics: Mapping[str, float] | None = None,
        *,
        drift: str | None = None,
        files: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> VersionPublished:
        """Write the next version to the folder and commit it. `files`: as of `publication`; `changes`: of the event."""
        number, self._number = self._number, self._number + 1
        _, event = publication(
            self.folder, number, model=self._model, metrics=metrics, drift=drift, **(files or {"seed": number})
        )
        event = replace(event, **changes)
        self.commit(event)
        return event

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        """Write the summary, and finish the log."""
        (self.folder / "summary.json").write_text(json.dumps(summary or {}))
        self.log.finish()

    def sync(self, uri: str, *, stopped: bool = False) -> Sent:
        """Send what is missing, as another process does."""
        return RunSync(self.folder, uri).update(stopped=stopped)


def publish_run(uri: str, folder: Path, count: int, model: str = MODEL, drafter: str = "builtin:drafter") -> LittleRun:
    """A finished run of so many versions, which is sent."""
    run = LittleRun(folder, model=model, drafter=drafter)
    for version in range(count):
        run.publish({"acceptance": 0.1 * version})
    run.finish()
    assert run.sync(uri).refused == ()
    return run


def play(folder: Path) -> Iterator[LittleRun]:
    """A run of two versions with prompts, updates and a drift; a turn for each of its commits, then one at its end."""
    run = LittleRun(folder)
    tokens, greedy = (4, 6, 2, 4, 4), (1, 4, 1, 2, 2)
    probed = {"probe_tokens": tokens, "probe_greedy": greedy, "probe_sampled": greedy, "probe_forwards": (2,) * 5}
    run.publish({"acceptance": 0.5, "prompts": 0.0}, **probed)
    yield run
    run.commit(*map(make_completed, range(3)), make_updated(offset=2), make_drifted(offset=1))
    yield run
    run.publish({"acceptance": 1.5, "prompts": 3.0}, drift="drift at prompt 70", **probed)
    yield run
    run.commit(*map(make_completed, range(3, 6)), make_updated(offset=4, part="head"), make_updated(offset=5))
    yield run
    run.finish({"totals": {"acceptance": 0.4, "ratio": None}})
    yield run


class LostError(Exception):
    """The connection broke; whether the call was carried out, the caller cannot know."""


@dataclass
class Faults:
    """An injected fault: the call of that number fails before or after it was carried out, or is carried out twice."""

    at: int = 0
    how: str = "before"
    fail: Callable[[], None] = lambda: (_ for _ in ()).throw(LostError())
    calls: list[str] = field(default_factory=list)


class FaultyClient:
    """Passes every call on to a real client, but for the faults."""

    def __init__(self, uri: str, faults: Faults) -> None:
        self._client, self._faults = connect(uri), faults

    def __getattr__(self, name: str):
        value = getattr(self._client, name)
        return (lambda *args, **named: self._call(name, lambda: value(*args, **named))) if callable(value) else value

    def _call(self, name: str, call: Callable[[], object]) -> object:
        faults = self._faults
        faults.calls.append(name)
        hit = len(faults.calls) == faults.at
        if hit and faults.how == "before":
            faults.fail()
        answer = call()
        if hit and faults.how == "twice":
            call()
        if hit and faults.how == "after":
            faults.fail()
        return answer


def send(uri: str, folder: Path) -> None:
    """Play a run and send it after every commit; what fails is sent again, as by another process."""
    for run in play(folder):
        sync_until_sent(run.folder, uri)


def sync_until_sent(folder: Path, uri: str) -> None:
    """Update MLflow until nothing fails, as it does once."""
    for _ in range(4):
        with suppress(Exception):
            if not RunSync(folder, uri).update(stopped=False).refused:
                return
    raise AssertionError(RunSync(folder, uri).update(stopped=False))


def read_store(uri: str) -> dict[str, Any]:
    """Everything that MLflow holds, by names instead of random ids; the same of equal runs."""
    client = connect(uri)
    experiment = client.get_experiment_by_name("omnidraft").experiment_id
    found = client.search_runs([experiment], max_results=1000)
    runs = {run.info.run_name: client.get_run(run.info.run_id) for run in found}
    models = {model.model_id: model.name for model in client.search_logged_models([experiment], max_results=1000)}
    assert len(found) == len(runs)
    assert len(set(models.values())) == len(models)
    versions = list_versions(uri)
    # A duplicate that was removed took a number, which MLflow gives to no other.
    places = {(one.name, one.number): place for place, one in enumerate(reversed(versions))}
    return {
        "runs": {name: _read_run(client, run, models) for name, run in runs.items()},
        "models": sorted(models.values()),
        "versions": [
            replace(
                one,
                number=places[one.name, one.number],
                parent=None if one.parent is None else places.get((one.name, one.parent)),
                created_at=None,  # type: ignore[arg-type]
                digest=None,
            )
            for one in versions
        ],
    }


def _read_run(client: Any, run: Any, models: Mapping[str, str]) -> dict[str, Any]:
    hidden = ("mlflow.omnidraft.", "mlflow.user", "mlflow.parentRunId", "mlflow.note")
    histories = {key: client.get_metric_history(run.info.run_id, key) for key in sorted(run.data.metrics)}
    made = run.outputs.model_outputs if run.outputs else ()
    return {
        "status": run.info.status,
        "seconds": (run.info.end_time or 0) - run.info.start_time,
        "params": run.data.params,
        "tags": {key: value for key, value in run.data.tags.items() if not key.startswith(hidden)},
        "points": {key: [(one.step, one.value, one.timestamp) for one in found] for key, found in histories.items()},
        "inputs": sorted(models.get(one.model_id, "deleted") for one in run.inputs.model_inputs),
        "datasets": sorted(one.dataset.name for one in run.inputs.dataset_inputs),
        "outputs": sorted(models.get(one.model_id, "deleted") for one in made),
        "files": sorted(file.path for file in client.list_artifacts(run.info.run_id)),
    }


def check_files(uri: str, run: Path, model: str = MODEL) -> None:
    """Require that every version of a run has its own files in MLflow."""
    for one in list_versions(uri, model):
        with tempfile.TemporaryDirectory() as scratch:
            fetched = fetch_version(f"models:/{model}/{one.number}", uri, Path(scratch) / "version")
            assert contents(fetched) == contents(run / f"versions/{one.version:06d}")
