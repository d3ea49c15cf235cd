"""What the registry does in MLflow: what each message of a run becomes there.

All curves draw on one step axis, the stream offset; what a run's pages show is laid out in docs/registry.md.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from store.errors import ModelError
from store.events import VersionPublished
from store.mlflow_client import answers, connect, local_database, may_pass, model_id_of, once
from store.mlflow_versions import IDENTITY, Publication, dataset, find_runs, inputs, sweep
from store.outbox import Body, OutageError
from store.versions import Reference, metric_key, run_note

if TYPE_CHECKING:
    from mlflow import MlflowClient

# Okabe and Ito's colours, told apart by colour-blind readers too; MLflow's own choice may give two runs the same.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_NOTE = "mlflow.note.content"  # the tag that pages show as a run's description
_MOST_DOUBTS = 20  # about ten minutes; then a server that answers other requests does not like this message


class Sender:
    """The background thread's side.

    `known` is what earlier deliveries returned, merged: the run, and per version its model and its number.
    Every delivery may be repeated, by this process or by a later one, wherever it broke off or although it was done,
    and then leaves the same as if it had been made once. Files and folders are named relative to `run_folder`, which
    may be another one, on another machine, than it was for the process that posted.
    """

    def __init__(self, uri: str, experiment: str, model: str, known: Body, run_folder: Path = Path()):
        self._run_folder = run_folder
        self._uri, self._experiment, self._model, self._known = uri, experiment, model, known
        self._doubts = 0  # failures in a row that may not be the message's fault

    def deliver(self, kind: str, bodies: list[Body]) -> Body:
        """See Outbox. Raises OutageError when MLflow does not answer, or not reliably.

        Otherwise raises whatever MLflow raises, and CorruptError for a folder that is not as it was sealed.
        """
        try:
            result = self._deliver(connect(self._uri), kind, bodies)
        except Exception as error:
            self._doubts += 1
            if answers(self._uri) and not (may_pass(error) and self._doubts < _MOST_DOUBTS):
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
        notes["mlflow.runColor"] = _free_color(client, known["experiment_id"])
        run = once(
            lambda: find_runs(client, known, identity),
            lambda: client.create_run(known["experiment_id"], run_name=name, tags={**notes, **tags}),
            lambda other: client.delete_run(other.info.run_id),
        )
        known |= {"run_id": run.info.run_id, "color": run.data.tags["mlflow.runColor"]}
        client.log_batch(run.info.run_id, params=[Param(key, value) for key, value in params.items()])
        client.log_inputs(run.info.run_id, datasets=inputs([dataset(*pair) for pair in datasets]))
        about = {"name": name, "params": params, "datasets": datasets, "identity": identity, "note": tags.get(_NOTE)}
        return {**known, **about, "base": self._base(client, params.get("drafter", ""))}

    def _base(self, client: "MlflowClient", drafter: str) -> Body:
        """The registered version that the run goes on from, if it is one of the same model and was not removed."""
        from mlflow.exceptions import MlflowException

        try:
            reference = Reference.parse(drafter)
        except ModelError:
            return {}
        if reference.name != self._model:
            return {}
        try:
            if reference.alias is None:
                version = client.get_model_version(self._model, str(reference.number))
            else:
                version = client.get_model_version_by_alias(self._model, reference.alias)
        except MlflowException as error:
            if may_pass(error):
                raise
            return {}  # the drafter was loaded before; the run shall not wait for ever for its name
        return {"number": int(version.version), "model_id": model_id_of(version)}

    def _points(self, client: "MlflowClient", points: list[list[Any]]) -> Body:
        from mlflow.entities import Metric

        metrics = [Metric(metric_key(key), value, when, step) for key, value, step, when in sorted(points)]
        client.log_batch(self._known["run_id"], metrics=metrics)
        return {"last": max(point[3] for point in points)}

    def _publish(self, client: "MlflowClient", folder: str, event: Body, metrics: Body, drift: int | None) -> Body:
        made = VersionPublished(**event)
        sent = Publication(client, self._known, self._model, made, drift).send(self._run_folder / folder, metrics)
        return {f"v{made.version}": sent}

    def _finish(self, client: "MlflowClient", summary: Body, artifacts: list[str]) -> Body:
        from mlflow.entities import Metric

        run_id, when = self._known["run_id"], self._known.get("last", 0)
        # "final/" gives them a section of their own among the charts, step 0 a bar each instead of a lone dot
        final = {metric_key(f"final/{key}"): value for key, value in summary.items()}
        client.log_batch(run_id, metrics=[Metric(key, value, when, 0) for key, value in final.items()])
        paths = [self._run_folder / path for path in artifacts]
        for path in filter(os.path.isfile, paths):  # the run is finished without those that are gone
            client.log_artifact(run_id, str(path))
        note = self._known["note"] or run_note(self._known["name"], self._known["datasets"], summary)
        client.set_tag(run_id, _NOTE, note)
        sweep(client, self._known, self._model)
        client.set_terminated(run_id)
        return {}


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
