"""How a published version comes into MLflow: a nested run, a logged model with the files, a registered version.

MLflow's pages decide the shape. The registry's comparison shows the numbers of *runs*, so every version is a nested
run of its own; the models table shows metrics that name a model and a dataset. Run and model carry the tag `IDENTITY`,
by which they are found again: whatever a killed process left half-made is completed.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from store.events import VersionPublished
from store.files import digest_of
from store.mlflow_client import every, once, versions_of
from store.outbox import Body
from store.version_folder import MANIFEST, open_version
from store.versions import MODEL_NOTE, Lineage, metric_key, tags_of, version_note

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, DatasetInput, LoggedModel, Run
    from mlflow.entities.model_registry import ModelVersion

IDENTITY = "mlflow.omnidraft.identity"  # a tag; pages of runs and models show none that begins like this
ALIAS = "candidate"  # the newest version that was sent
LONGEST_NAME, LONGEST_SOURCE = 200, 10_000  # of a data set, in characters; MLflow allows 500 and 65535
PROBE = "probe/"  # metrics of this section are measured on a fixed set of prompts, not on the stream


class Publication:
    """One version on its way into MLflow.

    Args:
        client: of the store.
        known: of the run, see Sender.
        model: name of the registered model.
        made: what was published.
        drift: offset of the drift that it answers.
    """

    def __init__(self, client: "MlflowClient", known: Body, model: str, made: VersionPublished, drift: int | None):
        self._client, self._known, self._model, self._made = client, known, model, made
        self._identity = f"{known['identity']}/v{made.version}"
        self._parent = self._sent_parent()
        first = None if made.parent is None else min(self._parent.get("next", 0), made.offset)
        sources = ", ".join(name for name, _ in known["datasets"])
        self._lineage = Lineage(known["name"], self._parent.get("number"), first, drift, sources)

    def send(self, folder: Path, metrics: Body) -> Body:
        """Complete whatever is not there yet; what is to be known of the version from now on."""
        manifest = open_version(folder)
        run_id = self._run()
        model_id = self._logged_model(run_id, folder)
        self._log_metrics(run_id, model_id, metrics, manifest["created_at"])
        probe, sealed = metrics.get(f"{PROBE}acceptance"), digest_of(folder / MANIFEST)
        number = self._register(run_id, model_id, tags_of(self._made, self._lineage, probe, sealed))
        self._note_output(self._known["run_id"], model_id)  # shown in its row of the runs table
        self._client.set_terminated(run_id)
        self._move_alias(number)
        after = self._made.offset + (self._made.parent is not None)  # the first version is there before its offset
        about = {"next": after, "target": self._made.target}
        return {"run_id": run_id, "model_id": model_id, "number": number, **about}

    def _sent_parent(self) -> Body:
        """The parent if it was sent, else the last version before it that was; what the run goes on from if none."""
        made, known = self._made, self._known
        if made.parent is not None:
            for version in sorted(versions_in(known), reverse=True):
                if version <= made.parent and known[f"v{version}"].get("target", made.target) == made.target:
                    return dict(known[f"v{version}"])
        return dict(known.get("base", {}))

    def _run(self) -> str:
        from mlflow.entities import LoggedModelInput, Param

        run: Run = once(lambda: find_runs(self._client, self._known, self._identity), self._create_run, self._drop_run)
        run_id, made = run.info.run_id, self._made
        params = {**self._known["params"], "version": made.version, "offset": made.offset, "reason": made.reason}
        self._client.log_batch(run_id, params=[Param(key, str(value)) for key, value in params.items()])
        parents = [LoggedModelInput(self._parent["model_id"])] if self._parent else None
        self._client.log_inputs(run_id, datasets=inputs([stream_of(self._known)]), models=parents)
        return str(run_id)

    def _create_run(self) -> None:
        tags = {
            IDENTITY: self._identity,
            "kind": "version",
            "mlflow.parentRunId": self._known["run_id"],
            "mlflow.runColor": self._known["color"],
            "mlflow.note.content": version_note(self._made, self._lineage),
        }
        name = f"{self._known['name']} v{self._made.version}"
        self._client.create_run(self._known["experiment_id"], run_name=name, tags=tags)

    def _drop_run(self, run: "Run") -> None:
        self._client.delete_run(run.info.run_id)

    def _logged_model(self, run_id: str, folder: Path) -> str:
        model = once(
            lambda: find_models(self._client, self._known, self._identity),
            lambda: self._create_model(run_id),
            lambda other: self._client.delete_logged_model(other.model_id),
        )
        self._note_output(run_id, model.model_id)
        if str(model.status) != "READY":
            self._client.log_model_artifacts(model.model_id, str(folder))
            self._client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    def _create_model(self, run_id: str) -> None:
        made = self._made
        self._client.create_logged_model(
            self._known["experiment_id"],
            name=f"{self._known['name']}-v{made.version}",
            source_run_id=run_id,
            tags={IDENTITY: self._identity},
            params={"version": str(made.version), "offset": str(made.offset), "reason": made.reason},
            model_type="drafter",
        )

    def _note_output(self, run_id: str, model_id: str) -> None:
        from mlflow.entities import LoggedModelOutput

        outputs = self._client.get_run(run_id).outputs
        if model_id not in [output.model_id for output in (outputs.model_outputs if outputs else ())]:
            self._client.log_outputs(run_id, [LoggedModelOutput(model_id, self._made.offset)])

    def _log_metrics(self, run_id: str, model_id: str, metrics: Body, created_at: str) -> None:
        """With model and dataset named, since the models table shows a column for such metrics only.

        What was measured on the probe names the probe, so that versions of any two runs share those columns.
        """
        from mlflow.entities import Metric

        when = int(datetime.fromisoformat(created_at).timestamp() * 1000)
        stream, probe = stream_of(self._known), dataset("probe", str(self._known["params"].get("probe", "")))
        of = {key: probe if key.startswith(PROBE) else stream for key in metrics}
        self._client.log_batch(
            run_id,
            metrics=[
                Metric(metric_key(key), value, when, self._made.offset, model_id, of[key].name, of[key].digest, run_id)
                for key, value in metrics.items()
            ],
        )

    def _register(self, run_id: str, model_id: str, tags: dict[str, str]) -> int:
        import mlflow

        client = self._client
        mlflow.set_tracking_uri(client.tracking_uri)  # its SQLite registry looks logged models up there
        if not client.search_registered_models(f"name = '{self._model}'"):
            client.create_registered_model(self._model, description=MODEL_NOTE)
        version: ModelVersion = once(
            lambda: find_versions(client, self._model, [run_id]),
            lambda: self._create_version(run_id, model_id, tags),
            lambda other: client.delete_model_version(self._model, other.version),
        )
        link = json.dumps([{"name": self._model, "version": int(version.version)}])
        client.set_logged_model_tags(model_id, {"mlflow.modelVersions": link})  # the models table reads it
        return int(version.version)

    def _create_version(self, run_id: str, model_id: str, tags: dict[str, str]) -> None:
        self._client.create_model_version(
            self._model,
            f"models:/{model_id}",
            run_id,
            tags=tags,
            description=version_note(self._made, self._lineage),
            model_id=model_id,
        )

    def _move_alias(self, number: int) -> None:
        """Forward only: neither a late version of the run nor a repeated message may displace a newer one."""
        newest_of_run = self._made.version == max([self._made.version, *versions_in(self._known)])
        aliases = self._client.get_registered_model(self._model).aliases
        if newest_of_run and number > int(aliases.get(ALIAS, 0)):
            self._client.set_registered_model_alias(self._model, ALIAS, str(number))


def versions_in(known: Body) -> list[int]:
    """Numbers within the run of the versions that were sent."""
    return [int(key[1:]) for key in known if key[0] == "v"]


def sweep(client: "MlflowClient", known: Body, model: str) -> None:
    """Remove what a request made that arrived after everyone had given it up."""
    sent, mine = [known[f"v{version}"] for version in versions_in(known)], f"{known['identity']}%"
    for version in find_versions(client, model, [one["run_id"] for one in sent]):
        if int(version.version) not in [one["number"] for one in sent]:
            client.delete_model_version(model, version.version)
    for logged in find_models(client, known, mine):
        if logged.model_id not in [one["model_id"] for one in sent]:
            client.delete_logged_model(logged.model_id)
    for run in find_runs(client, known, mine):
        if run.info.run_id not in [known["run_id"], *(one["run_id"] for one in sent)]:
            client.delete_run(run.info.run_id)


def find_runs(client: "MlflowClient", known: Body, identity: str) -> list["Run"]:
    """Runs of that identity, or like it where it ends with %, oldest first."""
    like = f"tags.`{IDENTITY}` LIKE '{identity}'"
    where, by = [known["experiment_id"]], ["attributes.start_time ASC"]
    return every(lambda page: client.search_runs(where, like, order_by=by, page_token=page))


def find_models(client: "MlflowClient", known: Body, identity: str) -> list["LoggedModel"]:
    """Logged models, as `find_runs`."""
    like = f"tags.`{IDENTITY}` LIKE '{identity}'"
    found = every(lambda page: client.search_logged_models([known["experiment_id"]], like, page_token=page))
    return sorted(found, key=lambda one: one.creation_timestamp)


def find_versions(client: "MlflowClient", model: str, runs: Collection[str]) -> list["ModelVersion"]:
    """Registered versions of those runs, oldest first."""
    if len(runs) == 1:
        mine = f"name = '{model}' and run_id = '{next(iter(runs))}'"
        return list(client.search_model_versions(mine, order_by=["version_number ASC"]))
    return [version for version in versions_of(client, model) if version.run_id in runs]


def stream_of(known: Body) -> "Dataset":
    """The run's sources as one dataset: versions of runs over the same sources share their metric columns."""
    pairs = known["datasets"]
    return dataset(" + ".join(name for name, _ in pairs) or "stream", ", ".join(source for _, source in pairs))


def dataset(name: str, source: str) -> "Dataset":
    """The digest is that of name and source, not of the content, which may be a stream without end.

    It tells apart what is equal only since MLflow has room for a part of it.
    """
    from mlflow.entities import Dataset

    digest = hashlib.sha256(f"{name}\n{source}".encode()).hexdigest()[:8]
    shown = json.dumps({"uri": source[:LONGEST_SOURCE]})
    return Dataset(name[:LONGEST_NAME], digest, source_type="local", source=shown)


def inputs(datasets: Sequence["Dataset"]) -> list["DatasetInput"]:
    """What a run reads, as MLflow wants it."""
    from mlflow.entities import DatasetInput, InputTag

    return [DatasetInput(one, [InputTag("mlflow.data.context", "stream")]) for one in datasets]
