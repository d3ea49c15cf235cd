"""Brings MLflow up to the commits of a run, by comparing both and sending what is missing.

The run's folder is the source of truth: its log names the versions and has the numbers of all curves. What MLflow has
of the run is found by the tag `IDENTITY`. Every step can be repeated, by this process or another, after any
interruption, with the same result in MLflow.

The step of all metrics is the stream offset; docs/versions.md describes what MLflow's pages show of a run.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from store.errors import CorruptError, ModelError
from store.events import VersionPublished
from store.log.manifest import MANIFEST as LOG_MANIFEST
from store.log.manifest import Manifest, read_manifest
from store.log.partitions import LEARNER, log_folders, partition_folder
from store.registry.log_points import Curves, LogPoints, Logs, Point, RowReader
from store.registry.mlflow_client import (
    IDENTITY,
    connect,
    fetch_pages,
    find_or_create,
    find_runs,
    find_version,
    is_transient,
    local_database,
    model_id_of,
)
from store.registry.mlflow_versions import (
    Publication,
    SentRun,
    SentVersion,
    dataset,
    inputs,
)
from store.registry.registered_version import Reference, metric_key, run_note
from store.registry.relocation import ARTIFACTS
from store.registry.run_description import RunDescription, numbers_of

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT = "omnidraft"
FILES = ("summary.json", "config.json", "acceptance.png", "tokens.html")  # of a run, that become its artifacts
LOCK = Path("log", ".mlflow.lock")
LOCK_SECONDS = 120.0  # to wait for another process, such as one whose run was killed
AT_ONCE = 1000  # points of one request, the most that MLflow takes
_NOTE = "mlflow.note.content"  # the tag that pages show as a run's description


@dataclass(frozen=True)
class Sent:
    """What one update sent, and the versions that MLflow or their own files did not let through, with the reasons."""

    versions: int = 0
    points: int = 0
    refused: tuple[str, ...] = ()


class RunSync:
    """Sends what MLflow lacks of one run with a `RunDescription`. Used by one thread."""

    def __init__(self, run_folder: Path, uri: str) -> None:
        self._folder, self._uri = run_folder, uri
        self._replica: _Replica | None = None

    def update(self, *, stopped: bool, committed: Mapping[str, int] | None = None) -> Sent:
        """Send everything up to the last commits.

        Args:
            stopped: whether no process is at work on the run: unless it is finished, MLflow then shows it as killed.
            committed: versions that count as committed, by the log's folder relative to the run's. A log has more while
                its last commit is still being copied to an object store.

        Raises CorruptError if the run's description or a part of its log is damaged, and what MLflow raises; what was
        sent stays.
        """
        with FileLock(self._folder / LOCK, timeout=LOCK_SECONDS):  # a process of a killed run may still be sending
            try:
                return self._update(stopped, committed or {})
            except BaseException:
                self._replica = None  # what was sent of it is compared anew
                raise

    def _update(self, stopped: bool, committed: Mapping[str, int]) -> Sent:
        folders = [folder for folder in log_folders(self._folder) if (folder / LOG_MANIFEST).exists()]
        logs = {folder: read_manifest(folder) for folder in folders}
        if self._replica is None:
            description = RunDescription.read(self._folder)
            if description is None:
                raise CorruptError(f"{self._folder} must hold a run that is published, but has no description of one")
            self._replica = _compare(connect(self._uri), self._uri, self._folder, description)
        # The learner ends last, if it has a process of its own.
        last: Manifest | None = logs.get(partition_folder(self._folder, LEARNER)) or logs.get(self._folder)
        finished = last is not None and last.finished
        return self._replica.update(logs, committed, finished=finished, stopped=stopped)


def _compare(client: "MlflowClient", uri: str, folder: Path, description: RunDescription) -> "_Replica":
    """Find out what MLflow has of a run, and create what a run begins with."""
    from mlflow.entities import Param, ViewType

    experiment, like = _experiment_id(client, uri), f"tags.`{IDENTITY}` LIKE '{description.identity}%'"
    # the run and its nested runs, also those that somebody deleted
    mine = fetch_pages(lambda page: client.search_runs([experiment], like, ViewType.ALL, page_token=page))
    runs = [run for run in mine if run.data.tags[IDENTITY] == description.identity]
    active = [run for run in runs if run.info.lifecycle_stage == "active"]
    if runs and not active:
        return _Replica(client, folder, None)
    # A request that was sent twice makes two runs: the one that was used before is kept.
    run = max(active, key=lambda run: len(run.data.metrics), default=None) or _create_run(
        client, experiment, description
    )
    if run.info.status != "FINISHED":
        client.log_batch(run.info.run_id, params=[Param(key, value) for key, value in description.params.items()])
        client.log_inputs(run.info.run_id, datasets=inputs([dataset(*pair) for pair in description.datasets]))
    sent = {run.data.tags[IDENTITY]: SentVersion.parse(run) for run in mine if run not in runs}
    versions = {int(identity.rpartition("/v")[2]): one for identity, one in sent.items() if one}
    base = _find_base(client, description.params.get("drafter", ""))
    found = SentRun(experiment, run.info.run_id, description, base, versions)
    return _Replica(client, folder, found, run.info.status)


class _Replica:
    """What MLflow has of a run, and how to complete it.

    `run` is None if somebody deleted it in MLflow: then nothing is sent. Once its `status` is finished, MLflow has all
    points.
    """

    def __init__(self, client: "MlflowClient", folder: Path, run: SentRun | None, status: str = "") -> None:
        self._client, self._folder, self._run, self._status = client, folder, run, status
        self._rows, self._events = RowReader(), dict[int, VersionPublished]()
        if run is not None:
            self._points = LogPoints(run.description.began, run.description.targets)
            self._curves = Curves(run.description.targets)

    def update(self, logs: Logs, committed: Mapping[str, int], *, finished: bool, stopped: bool) -> Sent:
        if self._run is None:
            return Sent()
        wanted = "FINISHED" if finished else "KILLED" if stopped else "RUNNING"
        if self._status != wanted == "RUNNING":
            self._client.update_run(self._run.run_id, status=wanted)
        versions, refused = self._send_versions(logs, committed, self._run)
        complete = self._status == wanted == "FINISHED"
        points = 0 if complete else self._send_points(self._run.run_id, logs, ended=finished)
        if self._status != wanted != "RUNNING":
            if finished:
                self._finish(self._run)
            self._client.set_terminated(self._run.run_id, wanted, self._ended(self._run))
        self._status = wanted
        return Sent(versions, points, refused)

    def _send_versions(self, logs: Logs, committed: Mapping[str, int], run: SentRun) -> tuple[int, tuple[str, ...]]:
        for folder, manifest in logs.items():
            most = committed.get(str(folder.relative_to(self._folder)))
            for event in self._rows.read(folder, manifest, "versions", VersionPublished, most=most):
                self._events[event.version] = event
        sent, refused = 0, list[str]()
        for number, event in sorted(self._events.items()):
            if number in run.versions:
                continue
            try:
                publication = Publication(self._client, run, event, self._folder / event.folder)
                values, when = self._curves.describe_version(event), publication.ended
                self._log(run.run_id, [Point(key, value, event.offset, when) for key, value in values.items()])
                run.versions[number] = publication.send()  # last, since what was sent is not sent again
                sent += 1
            except Exception as error:
                if not isinstance(error, CorruptError) and is_transient(error):
                    raise
                refused.append(f"version {number}: {error}")  # the others do not wait for it
        return sent, tuple(refused)

    def _send_points(self, run_id: str, logs: Logs, *, ended: bool) -> int:
        points, total = self._points.read(logs, ended=ended), 0
        while chunk := list(islice(points, AT_ONCE)):
            self._log(run_id, chunk)
            total += len(chunk)
        return total

    def _log(self, run_id: str, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        if points:
            metrics = [Metric(metric_key(key), value, when, step) for key, value, step, when in points]
            self._client.log_batch(run_id, metrics=metrics)

    def _finish(self, run: SentRun) -> None:
        path = self._folder / FILES[0]
        summary = numbers_of(json.loads(path.read_bytes())) if path.is_file() else {}
        # step 0 makes a bar of each among the charts instead of a dot
        self._log(run.run_id, [Point(key, value, 0, self._ended(run)) for key, value in summary.items()])
        for file in [self._folder / name for name in FILES]:
            if file.is_file():
                self._client.log_artifact(run.run_id, str(file))

    def _ended(self, run: SentRun) -> int:
        """When the run ended, by its log: with its last prompt or its last version."""
        return max([self._points.last_time, *(one.ended for one in run.versions.values())])


def _create_run(client: "MlflowClient", experiment: str, description: RunDescription) -> "Run":
    params = description.params
    tags = {"kind": "replay", IDENTITY: description.identity, _NOTE: run_note(description.name, description.datasets)}
    tags |= {"mlflow.source.name": "omnidraft replay", "mlflow.source.type": "LOCAL"}
    tags |= {key: params[key] for key in ("target", "drafter") if key in params}  # pages filter runs by tags
    return find_or_create(
        lambda: find_runs(client, experiment, description.identity),
        lambda: client.create_run(experiment, description.began, tags, description.name),
        lambda other: client.delete_run(other.info.run_id),
    )


def _find_base(client: "MlflowClient", drafter: str) -> SentVersion | None:
    """Return the registered version that a run starts from, if it was not removed."""
    try:
        reference = Reference.parse(drafter)
    except ModelError:
        return None
    version = find_version(client, reference)
    return None if version is None else SentVersion(model_id_of(version), int(version.version), reference.name)


def _experiment_id(client: "MlflowClient", uri: str) -> str:
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is not None:
        return str(found.experiment_id)
    path = local_database(uri)
    return str(client.create_experiment(EXPERIMENT, (path.parent / ARTIFACTS).as_uri() if path else None))
