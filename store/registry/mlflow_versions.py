"""Published versions in MLflow: each is a nested run, a logged model with the files, and a registered version.

This follows from MLflow's pages. The registry's comparison shows the metrics of *runs*, so every version is a nested
run; the models table shows metrics that name a model and a dataset. Run and model have the tag `IDENTITY`, by which
they are found again, so that whatever a killed process left half-made is completed. The last thing to be written is the
tag `SENT` of the nested run: a version whose run has it is never sent again, even if somebody deletes it.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from store.errors import CorruptError
from store.events import VersionPublished
from store.files import digest_of
from store.registry.mlflow_client import IDENTITY, KIND, find_models, find_or_create, find_runs
from store.registry.registered_version import HIDDEN, MODEL_NOTE, drafter_of_name, metric_key, part_of_name
from store.registry.run_description import RunDescription
from store.registry.version_folder import MANIFEST, open_version

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, DatasetInput, LoggedModel, Run
    from mlflow.entities.model_registry import ModelVersion

SENT = "mlflow.omnidraft.sent"  # tag: what is in MLflow of the version
CANDIDATE = "candidate"  # alias of the newest version of the last run that learned something, or of any
LONGEST_NAME, LONGEST_SOURCE = 200, 10_000  # of a data set, in characters; MLflow allows 500 and 65535
_OF_STREAM = "window_"  # metrics that were measured on the stream, not on the probe


@dataclass(frozen=True, slots=True)
class SentVersion:
    """A version in MLflow. Of a version that another run published only the model and the number are known."""

    model_id: str
    number: int  # in the registered model
    name: str  # of the registered model
    run_id: str = ""
    next: int = 0  # the stream offset after its last prompt
    target: str = ""
    ended: int = 0  # milliseconds since 1970

    @classmethod
    def parse(cls, run: "Run") -> "SentVersion | None":
        """Read the tag of a nested run; None if the version was not sent to its end."""
        text = run.data.tags.get(SENT)
        return cls(**json.loads(text)) if text else None


@dataclass(frozen=True, slots=True)
class SentRun:
    """A run in MLflow."""

    experiment: str
    run_id: str
    description: RunDescription
    base: SentVersion | None  # the registered version that the run starts from
    versions: dict[int, SentVersion]  # by their numbers within the run


class Publication:
    """Sends one version of a run that is in MLflow. Raises CorruptError if its files are not as they were sealed."""

    def __init__(self, client: "MlflowClient", run: SentRun, made: VersionPublished, folder: Path) -> None:
        self._client, self._run, self._made, self._folder = client, run, made, folder
        self._manifest = manifest = open_version(folder)
        self._model = manifest["name"]
        self._identity = f"{run.description.identity}/v{made.version}"
        self._name = f"{run.description.name} v{made.version}"
        self.ended = int(datetime.fromisoformat(manifest["created_at"]).timestamp() * 1000)  # milliseconds since 1970
        self._parent = parent = self._find_parent()
        self._drafter = drafter_of_name(manifest["drafter"])
        # the first stream offset since its parent; None for the drafter as it was loaded
        self._first = None if made.parent is None else min(parent.next if parent else 0, made.offset)

    def send(self) -> SentVersion:
        """Create everything in MLflow that does not exist yet."""
        self._open_model()
        run_id = self._create_run()
        model_id = self._create_model(run_id)
        self._log_metrics(run_id, model_id)
        number = self._register(run_id, model_id)
        self._note_output(self._run.run_id, model_id)  # shown in its row of the runs table
        self._move_alias(number)
        after = self._made.offset + (self._made.parent is not None)  # the first version is published before its offset
        sent = SentVersion(model_id, number, self._model, run_id, after, self._made.target, self.ended)
        self._client.set_terminated(run_id, end_time=self.ended)
        self._client.set_tag(run_id, SENT, json.dumps(asdict(sent)))
        return sent

    def _find_parent(self) -> SentVersion | None:
        """Return the parent, or the last version before it that was sent, or the version that the run starts from."""
        if self._made.parent is not None:
            for version, sent in sorted(self._run.versions.items(), reverse=True):
                if version <= self._made.parent and sent.target == self._made.target:
                    return sent
        return self._run.base

    def _create_run(self) -> str:
        from mlflow.entities import LoggedModelInput, Param

        made, run = self._made, self._run
        tags = {
            IDENTITY: self._identity,
            "kind": "version",
            "mlflow.parentRunId": run.run_id,
            "mlflow.note.content": self._describe(),
        }
        began = self._parent.ended if self._parent and self._parent.ended else run.description.began
        found: Run = find_or_create(
            lambda: find_runs(self._client, run.experiment, self._identity),
            lambda: self._client.create_run(run.experiment, min(began, self.ended), tags, self._name),
            lambda other: self._client.delete_run(other.info.run_id),
        )
        run_id = str(found.info.run_id)
        params = {"changes": made.changes or "unknown", "offset": made.offset, "reason": made.reason}
        self._client.log_batch(run_id, params=[Param(key, str(value)) for key, value in params.items()])
        parents = [LoggedModelInput(self._parent.model_id)] if self._parent else None
        self._client.log_inputs(run_id, datasets=inputs([stream_of(run.description)]), models=parents)
        return run_id

    def _create_model(self, run_id: str) -> str:
        made = self._made
        params = {"version": str(made.version), "offset": str(made.offset), "reason": made.reason}
        name = re.sub(r"[^\w-]+", "-", f"{self._run.description.name}-v{made.version}")  # MLflow refuses others
        model: LoggedModel = find_or_create(
            lambda: find_models(self._client, self._run.experiment, self._identity),
            lambda: self._client.create_logged_model(
                self._run.experiment, name, run_id, {IDENTITY: self._identity}, params, "drafter"
            ),
            lambda other: self._client.delete_logged_model(other.model_id),
        )
        self._note_output(run_id, model.model_id)
        if str(model.status) != "READY":
            self._client.log_model_artifacts(model.model_id, str(self._folder))
            self._client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    def _note_output(self, run_id: str, model_id: str) -> None:
        from mlflow.entities import LoggedModelOutput

        outputs = self._client.get_run(run_id).outputs
        if model_id not in [output.model_id for output in (outputs.model_outputs if outputs else ())]:
            self._client.log_outputs(run_id, [LoggedModelOutput(model_id, self._made.offset)])

    def _log_metrics(self, run_id: str, model_id: str) -> None:
        """Log metrics with model and dataset, since the models table shows only such metrics.

        Metrics of the probe name the probe as dataset, so that versions of all runs share their columns.
        """
        from mlflow.entities import Metric

        description = self._run.description
        stream, probe = stream_of(description), dataset("probe", description.params.get("probe", ""))
        metrics = [
            Metric(metric_key(key), value, self.ended, self._made.offset, model_id, of.name, of.digest, run_id)
            for key, value in sorted(self._manifest["metrics"].items())
            if math.isfinite(value)
            for of in [stream if key.startswith(_OF_STREAM) else probe]
        ]
        self._client.log_batch(run_id, metrics=metrics)

    def _register(self, run_id: str, model_id: str) -> int:
        import mlflow

        client = self._client
        mlflow.set_tracking_uri(client.tracking_uri)  # its SQLite registry looks logged models up there
        tags, note = self._make_tags(), self._describe()
        mine = f"name = '{self._model}' and run_id = '{run_id}'"
        version: ModelVersion = find_or_create(
            lambda: list(client.search_model_versions(mine, order_by=["version_number ASC"])),
            lambda: client.create_model_version(
                self._model, f"models:/{model_id}", run_id, tags=tags, description=note, model_id=model_id
            ),
            lambda other: client.delete_model_version(self._model, other.version),
        )
        link = json.dumps([{"name": self._model, "version": int(version.version)}])
        client.set_logged_model_tags(model_id, {"mlflow.modelVersions": link})  # the models table reads it
        return int(version.version)

    def _open_model(self) -> None:
        """Create the registered model, unless there is one of this pair; refuse that of another pair."""
        target, drafter, name = self._made.target, self._drafter, self._model
        found = self._client.search_registered_models(f"name = '{name}'")
        if not found:
            tags = {KIND: "drafter", "target": target, "drafter": drafter}
            self._client.create_registered_model(name, tags, MODEL_NOTE)
            return
        held = found[0].tags.get("target", target), found[0].tags.get("drafter", drafter)
        if target != held[0] or drafter not in (held[1], part_of_name(name)):  # the latter began as one of its versions
            raise CorruptError(
                f"the registered model {name} must hold one pair, {held[1]} for {held[0]}, got {drafter} for {target}; "
                "choose another name with --set publish.name=NAME"
            )

    def _make_tags(self) -> dict[str, str]:
        """Return the tags of a registered version. Four are shown, since MLflow's table of versions has a line for
        each.
        """
        made, manifest, description, parent = self._made, self._manifest, self._run.description, self._parent
        metrics = manifest["metrics"]
        shown: dict[str, object] = {
            "run": description.name,
            "reason": made.reason,
            "changes": made.changes or None,
            "probe": round(metrics["acceptance"], 4) if "acceptance" in metrics else None,
        }
        hidden: dict[str, object] = {
            "version": made.version,
            "parent": parent.number if parent and parent.name == self._model else None,
            "target": made.target,
            "drafter": self._drafter,
            "prompts": None if self._first is None else f"{self._first}-{made.offset}",
            "drift": manifest["drift"],
            "acceptance": None if made.acceptance is None else round(made.acceptance, 4),
            "offset": made.offset,
            "datasets": ", ".join(name for name, _ in description.datasets),
            "digest": made.digest,
            "manifest": digest_of(self._folder / MANIFEST),
            "created_at": manifest["created_at"],
            "probe_low": metrics.get("acceptance_low"),
            "probe_high": metrics.get("acceptance_high"),
        }
        tags = shown | {f"{HIDDEN}{key}": value for key, value in hidden.items()}
        return {key: str(value) for key, value in tags.items() if value is not None}

    def _describe(self) -> str:
        """Describe a version. The text begins with what distinguishes it: tables show about twenty characters of it."""
        made, drift = self._made, self._manifest["drift"]
        since = "" if self._first is None else f" since prompt {self._first}"
        after = "" if drift is None else f", the first version after the {drift}"
        return f"{made.reason} at prompt {made.offset}: {made.changes or 'changes unknown'}{since}{after}"

    def _move_alias(self, number: int) -> None:
        """Move the alias to this version, unless a newer one has it: a version can be sent late or again.

        A version whose run had changed neither drafter nor head takes the alias only from its own run.
        """
        own = {version: one.number for version, one in self._run.versions.items() if one.name == self._model}
        held = self._client.get_registered_model(self._model).aliases.get(CANDIDATE)
        learned = self._made.drafter_version or self._made.head_version
        free = held is None or int(held) in own.values() or (learned and number > int(held))
        if free and self._made.version >= max(own, default=0):
            self._client.set_registered_model_alias(self._model, CANDIDATE, str(number))


def stream_of(description: RunDescription) -> "Dataset":
    """Describe the run's sources as one dataset, so that runs over the same sources share their metric columns."""
    pairs = description.datasets
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
