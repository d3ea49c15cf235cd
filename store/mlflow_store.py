"""What the registry does in MLflow: the only file that imports it, and only inside functions (over a second).

MLflow's pages decide the shape. Its comparison pages show the numbers of *runs*, so every version is a nested run of
its own; its models table shows metrics that name a model and a dataset; all draw on one step axis, the stream offset.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from store.errors import CorruptError, UsageError
from store.events import VersionPublished
from store.outbox import Body
from store.version_folder import open_version
from store.versions import MODEL_NOTE, run_note, tags_of, version_note

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, DatasetInput
    from mlflow.entities.model_registry import ModelVersion

ALIAS = "candidate"  # the newest version that was sent
_SQLITE = "sqlite:///"
_ENVIRONMENT = {  # read by mlflow when it is imported
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # a call then fails after seconds, not minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # the terminal belongs to the run's own display
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
# Okabe and Ito's colours, told apart by colour-blind readers too; MLflow's own choice may give two runs the same.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def connect(uri: str) -> "MlflowClient":
    """A client of the store at `uri`, made ready by the first call that uses it (a new SQLite schema: 6 s)."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextmanager
def reading(uri: str) -> Iterator["MlflowClient"]:
    """A client for reading only: raises UsageError, and makes nothing, where no store is or none answers."""
    path = local_database(uri)
    if path is not None and not path.exists():
        raise UsageError(f"an MLflow store must exist to be read, but {path} does not; `omnidraft replay` makes one")
    client = connect(uri)
    from mlflow.exceptions import MlflowException

    try:
        yield client
    except MlflowException as error:
        raise UsageError(f"MLflow at {uri} must answer, but: {error.message}; check --mlflow-uri") from error


def local_database(uri: str) -> Path | None:
    """The file behind a SQLite URI; None for any other store."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def download(client: "MlflowClient", version: "ModelVersion", into: Path, file: str = "") -> Path:
    """Copy a version's artifacts, or the one named, into a folder; the path of the copy. Nothing is checked yet.

    Raises CorruptError when the registry's version has lost its files.
    """
    from mlflow.artifacts import download_artifacts

    folder = client.get_logged_model(_model_id(version)).artifact_location
    source = f"{folder}/{file}" if file else folder
    try:
        return Path(download_artifacts(artifact_uri=source, dst_path=str(into), tracking_uri=client.tracking_uri))
    except FileNotFoundError as error:
        raise CorruptError(f"version {version.version} must have its files at {source}, but: {error}") from error


class Sender:
    """The background thread's side: what each message becomes in MLflow.

    `known` is what earlier deliveries returned, merged: the run, and per version its model and its number.
    Every delivery may be repeated after it failed half-way, and then leaves the same as if it had not.
    """

    def __init__(self, uri: str, experiment: str, model: str, results: Sequence[Body]):
        self._uri, self._experiment, self._model = uri, experiment, model
        self._known: Body = {}
        self._begun: str | None = None  # a run whose start failed half-way, to go on with
        for result in results:
            self._known.update(result)

    def deliver(self, kind: str, bodies: list[Body]) -> Body:
        """See Outbox. Raises whatever MLflow raises, and CorruptError for a folder that is not as it was sealed."""
        client = connect(self._uri)
        if kind == "start":
            result = self._known if "run_id" in self._known else self._start(client, **bodies[0])
        elif "run_id" not in self._known:
            raise RuntimeError("the run must have been started in MLflow before anything is added to it")
        elif kind == "points":
            result = self._points(client, [point for body in bodies for point in body["points"]])
        elif kind == "publish":
            result = self._publish(client, **bodies[0])
        else:
            result = self._finish(client, **bodies[0])
        self._known.update(result)
        return result

    def _start(self, client: "MlflowClient", name: str, params: Body, tags: Body, datasets: list[list[str]]) -> Body:
        from mlflow.entities import Param

        experiment = _experiment_id(client, self._experiment, self._uri)
        color = _free_color(client, experiment)
        if self._begun is None:
            notes = {"kind": "replay", "mlflow.runColor": color, "mlflow.note.content": run_note(name, datasets)}
            tags = {"mlflow.source.name": "omnidraft replay", "mlflow.source.type": "LOCAL", **notes, **tags}
            self._begun = client.create_run(experiment, run_name=name, tags=tags).info.run_id
        client.log_batch(self._begun, params=[Param(key, value) for key, value in params.items()])
        client.log_inputs(self._begun, datasets=_inputs([_dataset(*pair) for pair in datasets]))
        return {
            "run_id": self._begun,
            "experiment_id": experiment,
            "name": name,
            "color": color,
            "params": params,
            "datasets": datasets,
        }

    def _points(self, client: "MlflowClient", points: list[list[Any]]) -> Body:
        from mlflow.entities import Metric

        metrics = [Metric(key, value, milliseconds, step) for key, value, step, milliseconds in points]
        client.log_batch(self._known["run_id"], metrics=metrics)
        return {"last": points[-1][3]}

    def _publish(self, client: "MlflowClient", folder: str, event: Body, metrics: Body) -> Body:
        from mlflow.entities import LoggedModelOutput

        made, manifest = VersionPublished(**event), open_version(Path(folder))
        number, model_id = self._found(client, made.version)
        if number is None:
            run_id = self._version_run(client, made)
            model_id = self._logged_model(client, run_id, Path(folder), made)
            self._log_metrics(client, run_id, model_id, made.offset, metrics, manifest["created_at"])
            number = self._register(client, run_id, model_id, made)
            client.log_outputs(self._known["run_id"], [LoggedModelOutput(model_id, made.offset)])  # shown in its row
            client.set_terminated(run_id)
        if made.version == max([made.version, *self._versions()]):  # a late one must not displace a newer
            client.set_registered_model_alias(self._model, ALIAS, str(number))
        return {f"v{made.version}": {"model_id": model_id, "number": number}}

    def _versions(self) -> list[int]:
        return [int(key[1:]) for key in self._known if key[0] == "v"]

    def _found(self, client: "MlflowClient", version: int) -> tuple[int | None, str]:
        """Number and model of a version that an earlier, failed attempt had registered; removes what is half made."""
        mine = f"tags.`mlflow.parentRunId` = '{self._known['run_id']}' and params.version = '{version}'"
        for run in client.search_runs([self._known["experiment_id"]], mine):
            for found in client.search_model_versions(f"name = '{self._model}' and run_id = '{run.info.run_id}'"):
                return int(found.version), _model_id(found)
            for output in run.outputs.model_outputs if run.outputs else ():
                client.delete_logged_model(output.model_id)
            client.delete_run(run.info.run_id)
        return None, ""

    def _version_run(self, client: "MlflowClient", made: VersionPublished) -> str:
        from mlflow.entities import LoggedModelInput, Param

        known = self._known
        tags = {"mlflow.parentRunId": known["run_id"], "mlflow.runColor": known["color"], "kind": "version"}
        tags["mlflow.note.content"] = version_note(made, known["name"])
        run = client.create_run(known["experiment_id"], run_name=f"{known['name']} v{made.version}", tags=tags)
        params = {**known["params"], "version": made.version, "offset": made.offset, "reason": made.reason}
        client.log_batch(run.info.run_id, params=[Param(key, str(value)) for key, value in params.items()])
        parent = known.get(f"v{made.parent}")
        client.log_inputs(
            run.info.run_id,
            datasets=_inputs([self._stream()]),
            models=[LoggedModelInput(parent["model_id"])] if parent else None,
        )
        return run.info.run_id

    def _stream(self) -> "Dataset":
        """The run's sources as one dataset: versions of runs over the same sources share their metric columns."""
        datasets = self._known["datasets"]
        return _dataset(
            " + ".join(name for name, _ in datasets) or "stream", ", ".join(source for _, source in datasets)
        )

    def _logged_model(self, client: "MlflowClient", run_id: str, folder: Path, made: VersionPublished) -> str:
        from mlflow.entities import LoggedModelOutput

        model = client.create_logged_model(
            self._known["experiment_id"],
            name=f"{self._known['name']}-v{made.version}",
            source_run_id=run_id,
            params={"version": str(made.version), "offset": str(made.offset), "reason": made.reason},
            model_type="drafter",
        )
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, made.offset)])
        client.log_model_artifacts(model.model_id, str(folder))
        client.finalize_logged_model(model.model_id, "READY")
        return model.model_id

    def _log_metrics(
        self, client: "MlflowClient", run_id: str, model_id: str, step: int, metrics: Body, created_at: str
    ) -> None:
        """With model and dataset named, since the models table shows a column for such metrics only."""
        from mlflow.entities import Metric

        stream, when = self._stream(), int(datetime.fromisoformat(created_at).timestamp() * 1000)
        client.log_batch(
            run_id,
            metrics=[
                Metric(key, value, when, step, model_id, stream.name, stream.digest, run_id)
                for key, value in metrics.items()
            ],
        )

    def _register(self, client: "MlflowClient", run_id: str, model_id: str, made: VersionPublished) -> int:
        import mlflow

        mlflow.set_tracking_uri(self._uri)  # its SQLite registry looks the logged model up there, not in this client
        if not client.search_registered_models(f"name = '{self._model}'"):
            client.create_registered_model(self._model, description=MODEL_NOTE)
        parent = self._known.get(f"v{made.parent}", {}).get("number")
        version = client.create_model_version(
            self._model,
            f"models:/{model_id}",
            run_id,
            tags=tags_of(made, self._known["name"], parent),
            description=version_note(made, self._known["name"]),
            model_id=model_id,
        )
        link = json.dumps([{"name": self._model, "version": version.version}])
        client.set_logged_model_tags(model_id, {"mlflow.modelVersions": link})  # the models table reads it
        return int(version.version)

    def _finish(self, client: "MlflowClient", summary: Body, artifacts: list[str]) -> Body:
        from mlflow.entities import Metric

        run_id, when = self._known["run_id"], self._known.get("last", 0)
        # "final/" gives them a section of their own among the charts, step 0 a bar each instead of a lone dot
        client.log_batch(run_id, metrics=[Metric(f"final/{key}", value, when, 0) for key, value in summary.items()])
        for path in artifacts:
            client.log_artifact(run_id, path)
        client.set_terminated(run_id)
        return {}


def _model_id(version: "ModelVersion") -> str:
    """The logged model behind a registered version; MLflow leaves the version's own `model_id` empty."""
    return str(version.source).removeprefix("models:/")


def _experiment_id(client: "MlflowClient", name: str, uri: str) -> str:
    path = local_database(uri)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    return str(client.create_experiment(name, (path.parent / "mlartifacts").as_uri() if path else None))


def _free_color(client: "MlflowClient", experiment: str) -> str:
    """A colour that the latest replays do not have."""
    latest = client.search_runs([experiment], "tags.kind = 'replay'", max_results=len(_COLORS) - 1)
    taken = {run.data.tags.get("mlflow.runColor") for run in latest}
    return next(color for color in _COLORS if color not in taken)


def _dataset(name: str, source: str) -> "Dataset":
    """The digest is that of name and source, not of the content, which may be a stream without end."""
    from mlflow.entities import Dataset

    digest = hashlib.sha256(f"{name}\n{source}".encode()).hexdigest()[:8]
    return Dataset(name, digest, source_type="local", source=json.dumps({"uri": source}))


def _inputs(datasets: Sequence["Dataset"]) -> list["DatasetInput"]:
    from mlflow.entities import DatasetInput, InputTag

    return [DatasetInput(dataset, [InputTag("mlflow.data.context", "stream")]) for dataset in datasets]
