"""Delivery of a run's messages to MLflow.

The step of all metrics is the stream offset; docs/versions.md describes what MLflow's pages show of a run.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from store.errors import ModelError
from store.events import VersionPublished
from store.outbox import Body, OutageError
from store.registry.mlflow_client import (
    connect,
    find_or_create,
    find_version,
    is_available,
    is_transient,
    local_database,
    model_id_of,
)
from store.registry.mlflow_versions import IDENTITY, Publication, dataset, find_runs, inputs, remove_duplicates
from store.registry.registered_version import Reference, metric_key, run_note
from store.registry.relocation import ARTIFACTS
from store.registry.version_folder import open_version

if TYPE_CHECKING:
    from mlflow import MlflowClient

# Okabe and Ito's colours, which colour-blind readers can tell apart; MLflow may give two runs the same colour.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_NOTE = "mlflow.note.content"  # the tag that pages show as a run's description
_MOST_DOUBTS = 20  # about ten minutes; then the failure counts as a refusal of the message


class Sender:
    """Delivers messages to MLflow; used by one thread.

    Every delivery can be repeated, by this process or a later one, after any interruption or although it was done, with
    the same result in MLflow.

    Args:
        uri: the MLflow store.
        experiment: name of the experiment.
        model: name of the registered model; None is that of each version's manifest.
        known: the merged results of earlier deliveries: the run, and for each version its model and its number.
        run_folder: folder to which files and folders in messages are relative. It may differ from that of the process
            that posted, also in its machine.
    """

    def __init__(self, uri: str, experiment: str, model: str | None, known: Body, run_folder: Path = Path()) -> None:
        self._run_folder = run_folder
        self._uri, self._experiment, self._model, self._known = uri, experiment, model, known
        self._doubts = 0  # failures in a row that may not be due to the message

    def deliver(self, kind: str, bodies: list[Body]) -> Body:
        """Deliver messages of one kind; the `deliver` of `Outbox`.

        Raises:
            OutageError: MLflow does not answer, or not reliably.
            CorruptError: a folder differs from its seal.
            Exception: what MLflow raises.
        """
        try:
            result = self._deliver(connect(self._uri), kind, bodies)
        except Exception as error:
            self._doubts += 1
            if is_available(self._uri) and not (is_transient(error) and self._doubts < _MOST_DOUBTS):
                raise
            raise OutageError(str(error)) from error
        self._doubts = 0
        self._known.update(result)
        return result

    def _deliver(self, client: "MlflowClient", kind: str, bodies: list[Body]) -> Body:
        if kind == "start":
            return self._start(client, **bodies[0])
        if "run_id" not in self._known:
            raise RuntimeError("the run must have been started in MLflow before anything is added to it")
        if kind == "points":
            return self._points(client, [point for body in bodies for point in body["points"]])
        if kind == "publish":
            return self._publish(client, **bodies[0])
        if kind == "finish":
            return self._finish(client, **bodies[0])
        client.update_run(self._known["run_id"], status={"pause": "KILLED", "resume": "RUNNING"}[kind])
        return {}

    def _start(
        self, client: "MlflowClient", name: str, params: Body, tags: Body, datasets: list[list[str]], identity: str
    ) -> Body:
        from mlflow.entities import Param

        known = {"experiment_id": _experiment_id(client, self._experiment, self._uri)}
        notes = {"kind": "replay", _NOTE: run_note(name, datasets), IDENTITY: identity}
        notes |= {"mlflow.source.name": "omnidraft replay", "mlflow.source.type": "LOCAL"}
        notes |= {key: str(params[key]) for key in ("target", "drafter") if key in params}  # pages filter runs by tags
        notes["mlflow.runColor"] = _free_color(client, known["experiment_id"])
        run = find_or_create(
            lambda: find_runs(client, known["experiment_id"], identity),
            lambda: client.create_run(known["experiment_id"], run_name=name, tags={**notes, **tags}),
            lambda other: client.delete_run(other.info.run_id),
        )
        known |= {"run_id": run.info.run_id, "color": run.data.tags["mlflow.runColor"]}
        client.log_batch(run.info.run_id, params=[Param(key, value) for key, value in params.items()])
        client.log_inputs(run.info.run_id, datasets=inputs([dataset(*pair) for pair in datasets]))
        about = {"name": name, "params": params, "datasets": datasets, "identity": identity, "note": tags.get(_NOTE)}
        return {**known, **about, "base": self._base(client, params.get("drafter", ""))}

    def _base(self, client: "MlflowClient", drafter: str) -> Body:
        """Return the registered version that the run starts from, if it was not removed."""
        try:
            reference = Reference.parse(drafter)
        except ModelError:
            return {}
        # The drafter is already loaded; the run does not wait forever for its name.
        version = find_version(client, reference)
        if version is None:
            return {}
        return {"number": int(version.version), "model_id": model_id_of(version), "name": reference.name}

    def _points(self, client: "MlflowClient", points: list[list[Any]]) -> Body:
        from mlflow.entities import Metric

        metrics = [Metric(metric_key(key), value, when, step) for key, value, step, when in sorted(points)]
        client.log_batch(self._known["run_id"], metrics=metrics)
        return {"last": max(point[3] for point in points)}

    def _publish(self, client: "MlflowClient", folder: str, event: Body, metrics: Body, drift: int | None) -> Body:
        made = VersionPublished(**event)
        sealed = self._run_folder / folder
        sent = Publication(client, self._known, self._model, made, drift, open_version(sealed)).send(sealed, metrics)
        return {f"v{made.version}": sent}

    def _finish(self, client: "MlflowClient", summary: Body, artifacts: list[str]) -> Body:
        from mlflow.entities import Metric

        run_id, when = self._known["run_id"], self._known.get("last", 0)
        # "final/" makes a section of their own among the charts; step 0 makes a bar of each instead of a dot
        final = {metric_key(f"final/{key}"): value for key, value in summary.items()}
        client.log_batch(run_id, metrics=[Metric(key, value, when, 0) for key, value in final.items()])
        paths = [self._run_folder / path for path in artifacts]
        for path in filter(os.path.isfile, paths):  # the run is finished without files that were removed
            client.log_artifact(run_id, str(path))
        note = self._known["note"] or run_note(self._known["name"], self._known["datasets"], summary)
        client.set_tag(run_id, _NOTE, note)
        remove_duplicates(client, self._known)
        client.set_terminated(run_id)
        return {}


def _experiment_id(client: "MlflowClient", name: str, uri: str) -> str:
    path = local_database(uri)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    return str(client.create_experiment(name, (path.parent / ARTIFACTS).as_uri() if path else None))


def _free_color(client: "MlflowClient", experiment: str) -> str:
    """A colour that the latest replays do not have."""
    latest = client.search_runs([experiment], "tags.kind = 'replay'", max_results=len(_COLORS) - 1)
    taken = {run.data.tags.get("mlflow.runColor") for run in latest}
    return next(color for color in _COLORS if color not in taken)
