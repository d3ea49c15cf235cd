"""Published versions in MLflow: each is a nested run, a logged model with the files, and a registered version.

This follows from MLflow's pages. The registry's comparison shows the metrics of *runs*, so every version is a nested
run; the models table shows metrics that name a model and a dataset. Run and model have the tag `IDENTITY`, by which
they are found again, so that whatever a killed process left half-made is completed. A comparison of two versions is a
run of its own, on the same level as replays.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from store.events import VersionPublished
from store.files import digest_of
from store.outbox import Body
from store.registry.mlflow_client import (
    KIND,
    fetch_pages,
    find_or_create,
    model_id_of,
    open_store,
    resolve,
    versions_of,
)
from store.registry.registered_version import (
    MODEL_NOTE,
    Lineage,
    Reference,
    drafter_of_name,
    metric_key,
    tags_of,
    version_note,
)
from store.registry.version_folder import MANIFEST, VersionManifest

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, DatasetInput, LoggedModel, Run
    from mlflow.entities.model_registry import ModelVersion

IDENTITY = "mlflow.omnidraft.identity"  # a tag; MLflow's pages hide tags with this prefix
ALIAS = "candidate"  # the newest version that learned something, or any where there is none
LONGEST_NAME, LONGEST_SOURCE = 200, 10_000  # of a data set, in characters; MLflow allows 500 and 65535
PROBE = "probe/"  # metrics of this section are measured on a fixed set of prompts, not on the stream


@dataclass(frozen=True, slots=True)
class SentVersion:
    """A version in MLflow. Of a version that another run published only the model and the number are known."""

    model_id: str
    number: int  # in the registered model
    run_id: str = ""
    next: int = 0  # the stream offset after its last prompt
    target: str | None = None  # messages of older releases have none
    name: str = ""  # of the registered model; messages of older releases have none


class Publication:
    """Sends one published version to MLflow.

    Args:
        client: client of the store.
        known: results of the run's earlier deliveries, as in `Sender`.
        model: name of the registered model; None is that of the manifest.
        made: the event of the publication.
        drift: offset of the drift to which the version is the first response.
        manifest: of the version's folder.
    """

    def __init__(
        self,
        client: "MlflowClient",
        known: Body,
        model: str | None,
        made: VersionPublished,
        drift: int | None,
        manifest: VersionManifest,
    ) -> None:
        self._client, self._known, self._made = client, known, made
        self._manifest, self._model = manifest, model or manifest["name"]
        self._experiment: str = known["experiment_id"]
        self._identity = f"{known['identity']}/v{made.version}"
        self._parent = self._sent_parent()
        first = None if made.parent is None else min(self._parent.next if self._parent else 0, made.offset)
        sources = ", ".join(name for name, _ in known["datasets"])
        drafter = drafter_of_name(manifest["drafter"])
        parent = self._parent.number if self._parent and self._parent.name in ("", self._model) else None
        self._lineage = Lineage(known["name"], drafter, parent, first, drift, sources)

    def send(self, folder: Path, metrics: Body) -> Body:
        """Create everything in MLflow that does not exist yet; return the fields of `SentVersion`."""
        run_id = self._run()
        model_id = self._logged_model(run_id, folder)
        self._log_metrics(run_id, model_id, metrics, self._manifest["created_at"])
        tags = tags_of(self._made, self._lineage, metrics, digest_of(folder / MANIFEST))
        number = self._register(run_id, model_id, tags)
        self._note_output(self._known["run_id"], model_id)  # shown in its row of the runs table
        self._client.set_terminated(run_id)
        self._move_alias(number)
        after = self._made.offset + (self._made.parent is not None)  # the first version is published before its offset
        return asdict(SentVersion(model_id, number, run_id, after, self._made.target, self._model))

    def _sent_parent(self) -> SentVersion | None:
        """Return the parent, or the last version before it that was sent, or the version that the run starts from."""
        made, known = self._made, self._known
        if made.parent is not None:
            for version, sent in sorted(sent_versions(known).items(), reverse=True):
                if version <= made.parent and (sent.target or made.target) == made.target:
                    return sent
        return SentVersion(**known["base"]) if known.get("base") else None

    def _run(self) -> str:
        from mlflow.entities import LoggedModelInput, Param

        run: Run = find_or_create(
            lambda: find_runs(self._client, self._experiment, self._identity),
            self._create_run,
            lambda other: self._client.delete_run(other.info.run_id),
        )
        run_id, made = run.info.run_id, self._made
        params = {**self._known["params"], "version": made.version, "offset": made.offset, "reason": made.reason}
        self._client.log_batch(run_id, params=[Param(key, str(value)) for key, value in params.items()])
        parents = [LoggedModelInput(self._parent.model_id)] if self._parent else None
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
        self._client.create_run(self._experiment, run_name=name, tags=tags)

    def _logged_model(self, run_id: str, folder: Path) -> str:
        model = find_or_create(
            lambda: find_models(self._client, self._experiment, self._identity),
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
            self._experiment,
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
        """Log metrics with model and dataset, since the models table shows only such metrics.

        Metrics of the probe name the probe as dataset, so that versions of all runs share their columns.
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
        if not (found := client.search_registered_models(f"name = '{self._model}'")):
            pair = {KIND: "drafter", "target": self._made.target, "drafter": self._lineage.drafter}
            client.create_registered_model(self._model, pair, MODEL_NOTE)
        elif KIND not in found[0].tags:  # created by an earlier release
            client.set_registered_model_tag(self._model, KIND, "drafter")
        version: ModelVersion = find_or_create(
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
        """Move the alias to this version, unless a newer one has it: messages can be late or repeated.

        A version whose run had changed neither drafter nor head takes the alias only where no version has it.
        """
        sent = [version for version, one in sent_versions(self._known).items() if one.name in ("", self._model)]
        newest_of_run = self._made.version == max([self._made.version, *sent])
        aliases = self._client.get_registered_model(self._model).aliases
        free = ALIAS not in aliases
        learned = self._made.drafter_version or self._made.head_version
        if newest_of_run and (free or (learned and number > int(aliases[ALIAS]))):
            self._client.set_registered_model_alias(self._model, ALIAS, str(number))


def record_comparison(
    uri: str, name: str, first: int, second: int, metrics: Mapping[str, float], files: Sequence[Path]
) -> str:
    """Write a comparison of two versions as an MLflow run of its own; return the run's id.

    A comparison with the same versions, metrics and contents of files is one run, however often it is written. Raises
    ModelError for a version that does not exist, UsageError without a store.
    """
    from mlflow.entities import LoggedModelInput, Metric, Param

    content = [name, first, second, sorted(metrics.items()), [(path.name, digest_of(path)) for path in files]]
    identity = f"comparison-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]}"
    with open_store(uri) as client:
        pair = [resolve(client, Reference(name, number)) for number in (first, second)]
        experiment = client.get_run(str(pair[1].run_id)).info.experiment_id
        tags = _comparison_tags(identity, pair, metrics)
        run = find_or_create(
            lambda: find_runs(client, experiment, identity),
            lambda: client.create_run(experiment, run_name=f"#{first} and #{second}", tags=tags),
            lambda other: client.delete_run(other.info.run_id),
        )
        run_id, made = str(run.info.run_id), run.info.start_time  # the same for every attempt
        if run.info.status != "FINISHED":
            points = [Metric(key, value, made, 0) for key, value in sorted(metrics.items())]
            params = [Param("first", str(first)), Param("second", str(second))]
            client.log_batch(run_id, metrics=points, params=params)
            client.log_inputs(run_id, models=[LoggedModelInput(model_id_of(version)) for version in pair])
            for path in files:
                client.log_artifact(run_id, str(path))
            client.set_terminated(run_id)
    return run_id


def _comparison_tags(identity: str, pair: Sequence["ModelVersion"], metrics: Mapping[str, float]) -> dict[str, str]:
    rows = "\n".join(f"| {key} | {value:.4g} |" for key, value in sorted(metrics.items()))
    versions = "\n".join(f"- version {version.version}: {version.description}" for version in pair)
    note = f"Two versions of {pair[0].name} on the same prompts:\n\n{versions}\n\n| metric | value |\n|---|---|\n{rows}"
    return {
        IDENTITY: identity,
        "kind": "comparison",
        "mlflow.source.name": "omnidraft versions compare",
        "mlflow.source.type": "LOCAL",
        "mlflow.note.content": note,
    }


def sent_versions(known: Body) -> dict[int, SentVersion]:
    """Return the versions of the run that were sent, by their numbers within it."""
    return {int(key[1:]): SentVersion(**sent) for key, sent in known.items() if key[0] == "v"}


def remove_duplicates(client: "MlflowClient", known: Body) -> None:
    """Remove duplicates made by requests that arrived after they were given up."""
    experiment, mine, sent = known["experiment_id"], f"{known['identity']}%", sent_versions(known).values()
    for model in {one.name for one in sent if one.name}:
        mine_there = [one for one in sent if one.name == model]
        for version in find_versions(client, model, [one.run_id for one in mine_there]):
            if int(version.version) not in [one.number for one in mine_there]:
                client.delete_model_version(model, version.version)
    for logged in find_models(client, experiment, mine):
        if logged.model_id not in [one.model_id for one in sent]:
            client.delete_logged_model(logged.model_id)
    for run in find_runs(client, experiment, mine):
        if run.info.run_id not in [known["run_id"], *(one.run_id for one in sent)]:
            client.delete_run(run.info.run_id)


def find_runs(client: "MlflowClient", experiment: str, identity: str) -> list["Run"]:
    """Find the runs of an experiment with this identity, or this prefix if it ends with %; oldest first."""
    like = f"tags.`{IDENTITY}` LIKE '{identity}'"
    by = ["attributes.start_time ASC"]
    return fetch_pages(lambda page: client.search_runs([experiment], like, order_by=by, page_token=page))


def find_models(client: "MlflowClient", experiment: str, identity: str) -> list["LoggedModel"]:
    """Find the logged models of an experiment with this identity, as `find_runs` does."""
    like = f"tags.`{IDENTITY}` LIKE '{identity}'"
    found = fetch_pages(lambda page: client.search_logged_models([experiment], like, page_token=page))
    return sorted(found, key=lambda one: one.creation_timestamp)


def find_versions(client: "MlflowClient", model: str, runs: Collection[str]) -> list["ModelVersion"]:
    """Find the registered versions of these runs, oldest first."""
    if len(runs) == 1:
        mine = f"name = '{model}' and run_id = '{next(iter(runs))}'"
        return list(client.search_model_versions(mine, order_by=["version_number ASC"]))
    return [version for version in versions_of(client, model) if version.run_id in runs]


def stream_of(known: Body) -> "Dataset":
    """Describe the run's sources as one dataset, so that runs over the same sources share their metric columns."""
    pairs = known["datasets"]
    return dataset(" + ".join(name for name, _ in pairs) or "stream", ", ".join(source for _, source in pairs))


def dataset(name: str, source: str) -> "Dataset":
    """Describe a dataset for MLflow. The digest covers name and source, since the content may be an endless stream.

    The digest distinguishes names and sources that are equal only because MLflow truncates them.
    """
    from mlflow.entities import Dataset

    digest = hashlib.sha256(f"{name}\n{source}".encode()).hexdigest()[:8]
    shown = json.dumps({"uri": source[:LONGEST_SOURCE]})
    return Dataset(name[:LONGEST_NAME], digest, source_type="local", source=shown)


def inputs(datasets: Sequence["Dataset"]) -> list["DatasetInput"]:
    """Convert datasets to the inputs of an MLflow run."""
    from mlflow.entities import DatasetInput, InputTag

    return [DatasetInput(one, [InputTag("mlflow.data.context", "stream")]) for one in datasets]
