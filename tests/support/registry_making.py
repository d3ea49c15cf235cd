"""A little run as messages to the registry, MLflow clients that fail, and what must be in MLflow in the end."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from version_making import contents, publication

from store.outbox import Message, read_undelivered
from store.registry.mlflow_client import connect
from store.registry.mlflow_sender import Sender
from store.registry.registry import MlflowRegistry, Point, Registry, default_uri, fetch_version, list_versions

POINTS: list[Point] = [("curve/acceptance_rate", 0.1 * step, step, 1_700_000_000_000 + step) for step in range(5)]


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


def play(registry: Registry, folder: Path) -> Iterator[None]:
    """Start, curves, two versions, a pause, the rest of the curves, the end; a turn each."""
    summary = folder / "summary.json"
    summary.write_text('{"prompts": 5}')
    yield registry.start_run("run-a", {"mode": "trie"}, {}, [("docs", "builtin:docs")], identity=str(folder))
    yield registry.log_points(POINTS[:3])
    for version in range(2):
        sealed, event = publication(folder, version)
        metrics = {"prompts": 3.0, "probe/acceptance": 0.5 + version}
        yield registry.publish(sealed, event, metrics, drift=70 if version else None)
    yield registry.pause()
    yield registry.resume()
    yield registry.log_points(POINTS[3:])
    yield registry.finish({"acceptance": 0.4}, [summary])


def messages(folder: Path) -> list[Message]:
    """The messages that `play` posts."""
    spool = folder / "q.jsonl"
    spool.unlink(missing_ok=True)
    registry = MlflowRegistry("http://127.0.0.1:9", spool, keep=0)  # nothing is released
    assert len(list(play(registry, folder))) == registry.close(10)
    return list(read_undelivered(spool))


class LostError(Exception):
    """The connection broke; whether the call was carried out, the caller cannot know."""


@dataclass
class Faults:
    """An injected fault: the call of that number fails before or after it was carried out, or is carried out twice.

    `late`: the name of a call, before which everything that creates something arrives once more.
    """

    at: int = 0
    how: str = "before"
    fail: Callable[[], None] = lambda: (_ for _ in ()).throw(LostError())
    calls: list[str] = field(default_factory=list)
    late: str = ""
    made: list[Callable[[], object]] = field(default_factory=list)  # the calls that create something


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
        if name.startswith("create_"):
            faults.made.append(call)
        if name == faults.late:
            for again in faults.made:
                with suppress(Exception):  # of what can be there only once
                    again()
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
    """Deliver every message; what fails is delivered again by another process, which knows what was written down."""
    known = folder / "known.json"
    for message in messages(folder):
        while True:
            noted = json.loads(known.read_text()) if known.exists() else {"done": 0, "known": {}}
            if noted["done"] > message.id:
                break
            sender = Sender(uri, "omnidraft", "omnidraft", noted["known"], folder.resolve())
            try:
                result = sender.deliver(message.kind, [message.body])
            except Exception:
                continue
            known.write_text(json.dumps({"done": message.id + 1, "known": {**noted["known"], **result}}))


def check(uri: str, folder: Path, name: str = "omnidraft") -> None:
    """Require that everything is there once, in the experiment and in the registered model of that name."""
    client = connect(uri)
    experiment = client.get_experiment_by_name(name).experiment_id
    runs = {run.info.run_name: client.get_run(run.info.run_id) for run in client.search_runs([experiment])}
    assert len(client.search_runs([experiment])) == len(runs) == 3
    assert runs.keys() == {"run-a", "run-a v0", "run-a v1"}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    models = {model.name: model for model in client.search_logged_models([experiment])}
    assert len(client.search_logged_models([experiment])) == len(models) == 2
    check_run(client, runs["run-a"], models)
    for version in range(2):
        check_version(client, runs[f"run-a v{version}"], runs["run-a"], models, version)
    check_registered(uri, folder, name, {version: runs[f"run-a v{version}"].info.run_id for version in range(2)})


def check_run(client, run, models) -> None:
    for key, expected in {"curve/acceptance_rate": POINTS, "final/acceptance": [("", 0.4, 0, POINTS[-1][3])]}.items():
        history = client.get_metric_history(run.info.run_id, key)
        assert [(point.value, point.step, point.timestamp) for point in history] == [
            (value, step, when) for _, value, step, when in expected
        ]
    assert sorted(made.model_id for made in run.outputs.model_outputs) == sorted(
        model.model_id for model in models.values()
    )
    assert [given.dataset.name for given in run.inputs.dataset_inputs] == ["docs"]
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id)] == ["summary.json"]


def check_version(client, run, parent, models, version: int) -> None:
    assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert run.data.params == {"mode": "trie", "version": str(version), "offset": str(100 * version)} | {
        "reason": "interval" if version else "floor"
    }
    assert len(client.get_metric_history(run.info.run_id, "probe/acceptance")) == 1
    assert run.data.metrics["probe/acceptance"] == 0.5 + version
    assert [made.model_id for made in run.outputs.model_outputs] == [models[f"run-a-v{version}"].model_id]
    assert str(models[f"run-a-v{version}"].status) == "READY"
    inputs = [given.model_id for given in run.inputs.model_inputs]
    assert inputs == ([models["run-a-v0"].model_id] if version else [])


def check_registered(uri: str, folder: Path, name: str, runs: dict[int, str]) -> None:
    found = {version.version: version for version in list_versions(uri, name)}
    assert len(list_versions(uri, name)) == len(found) == 2
    assert (found[1].parent, found[1].learned, found[1].drift) == (found[0].number, (0, 100), 70)
    assert (found[0].parent, found[0].learned, found[0].drift) == (None, None, None)
    assert (found[0].probe, found[1].probe) == (0.5, 1.5)
    assert (found[0].aliases, found[1].aliases) == ((), ("candidate",))
    for version, registered in found.items():
        assert connect(uri).get_model_version(name, str(registered.number)).run_id == runs[version]
        fetched = fetch_version(f"models:/{name}/{registered.number}", uri, folder / "fetched" / str(version))
        assert contents(fetched) == contents(folder / f"run-a/versions/{version:06d}")
