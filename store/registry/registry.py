"""The registry of drafters in MLflow: send a run's metrics and versions, list versions and fetch them.

One replay is one MLflow run; each published version is a version of one registered model. MLflow is a replica: the
run's folder holds everything, and messages that MLflow has not received wait in a spool file. Importing this file does
not import mlflow; `store.registry.mlflow_client` does so on its first use.
"""

import math
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from store.errors import ModelError, UsageError
from store.events import VersionPublished
from store.outbox import Ledger, Outbox, RetryPolicy
from store.registry.mlflow_client import KIND, download, fetch_pages, open_store, resolve, versions_of
from store.registry.mlflow_sender import Sender
from store.registry.registered_version import (
    MODEL,
    Reference,
    RegisteredVersion,
    VersionDetails,
    check_model_name,
    check_registered,
    from_tags,
    tag_values,
)
from store.registry.sender_process import SenderProcess
from store.registry.version_folder import MANIFEST, create_temporary_folder, open_version, read_manifest

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

EXPERIMENT = "omnidraft"
# Metrics of a version that are sent first: MLflow's comparison begins with the first one that all versions have.
_FIRST = ("probe/acceptance", "probe/tokens_per_second", "probe/tokens_per_forward", "acceptance")
Tags = Mapping[str, str]
Datasets = Sequence[tuple[str, str]]  # name and source of each
Point = tuple[str, float, int, int]  # key, value, step (stream offset), milliseconds since the epoch


class Registry:
    """Receives a run's metrics and versions; this base class ignores them. Not thread-safe, except for `release`.

    A new run calls `start_run` first, a resumed run `resume`; `close` comes last. A resumed run sends everything after
    its commit again, so earlier messages after that commit are discarded. For this a commit stores `mark()`, and after
    the commit `release` of that mark lets the messages before it be delivered.

    No method except `close` waits for the receiver, and none raises because of it: `close` counts the messages that
    could not be delivered. The same point sent twice (same key, step and time) is one point.
    """

    def start_run(
        self, name: str, params: Mapping[str, object], tags: Tags, datasets: Datasets, identity: str | None = None
    ) -> None:
        """Start the run in MLflow; called once. Keep params few: MLflow's pages show all of them.

        `identity`: a unique text by which the run is found again in MLflow; None generates one.
        """

    def pause(self) -> None:
        """Mark the run as stopped before its end."""

    def resume(self) -> None:
        """Mark the run, which an earlier process started, as running again."""

    def log_points(self, points: Sequence[Point]) -> None:
        """Add points to the run's curves, any number of times. Values that are not finite are left out."""

    def publish(
        self, folder: Path, event: VersionPublished, metrics: Mapping[str, float], drift: int | None = None
    ) -> None:
        """Register a sealed folder as a new version. The folder must not change until it is sent.

        `metrics`: those named `probe/...` were measured on a fixed set of prompts, the others on the stream.
        `drift`: offset of the drift to which this version is the first response.
        """

    def finish(self, summary: Mapping[str, float], artifacts: Sequence[Path]) -> None:
        """Add the summary's numbers and files to the run and mark it as finished; called once."""

    def mark(self) -> int:
        """Sync all messages so far to disk; return a mark between them and all later ones. Raises OSError."""
        return 0

    def release(self, mark: int) -> None:
        """Allow delivery of the messages below the mark. May be called from any thread."""

    def close(self, timeout: float) -> int:
        """Wait at most `timeout` seconds for released messages; return the number of unsent ones.

        May be called again, with the same result. No other method may be called after it.
        """
        return 0

    @property
    def last_error(self) -> str | None:
        """The last failure; None after a successful delivery and before the first failure."""
        return None


class NoRegistry(Registry):
    """A registry that sends nothing: the run is only in its own folder."""


class MlflowRegistry(Registry):
    """Sends to MLflow through a spool file in the run's folder: from a process of its own, or, where MLflow has been
    imported already, from a thread.

    Opened on the spool of an earlier process, it sends the remaining messages into the same MLflow run.

    `model`: name of the registered model; None is that of each version's manifest.
    `keep`: the mark that the run's last commit stores; 0 for a new run. Messages from it on are discarded, and later
    ones wait for `release`. None, for a caller without commits, sends everything as soon as possible.
    """

    def __init__(
        self,
        uri: str,
        spool: Path,
        *,
        experiment: str = EXPERIMENT,
        model: str | None = None,
        retry_policy: RetryPolicy | None = None,
        keep: int | None = None,
    ) -> None:
        self._run_folder = _run_folder(spool)
        known = Ledger.read(spool).known
        in_thread = "mlflow" in sys.modules
        sender = (Sender if in_thread else SenderProcess)(uri, experiment, model, known, self._run_folder)
        self._process = sender if isinstance(sender, SenderProcess) else None
        self._outbox = Outbox(
            spool,
            sender.deliver,
            merged=frozenset({"points"}),
            gates=frozenset({"start"}),
            retry_policy=retry_policy or RetryPolicy(),
            keep=keep,
        )

    @override
    def start_run(
        self, name: str, params: Mapping[str, object], tags: Tags, datasets: Datasets, identity: str | None = None
    ) -> None:
        texts = {key: str(value) for key, value in params.items()}
        body = {"name": name, "params": texts, "tags": dict(tags), "datasets": list(datasets)}
        self._outbox.post("start", {**body, "identity": identity or str(uuid.uuid4())})

    @override
    def pause(self) -> None:
        self._outbox.post("pause", {})

    @override
    def resume(self) -> None:
        self._outbox.post("resume", {})

    @override
    def log_points(self, points: Sequence[Point]) -> None:
        if finite := [point for point in points if math.isfinite(point[1])]:
            self._outbox.post("points", {"points": finite})

    @override
    def publish(
        self, folder: Path, event: VersionPublished, metrics: Mapping[str, float], drift: int | None = None
    ) -> None:
        known = {**metrics, "acceptance": event.acceptance, "version/cache_entries": event.cache_entries}
        numbers = _finite({key: known.get(key) for key in dict.fromkeys((*_FIRST, *known))})
        body = {"folder": self._spool_path(folder), "event": asdict(event), "metrics": numbers, "drift": drift}
        self._outbox.post("publish", body)

    @override
    def finish(self, summary: Mapping[str, float], artifacts: Sequence[Path]) -> None:
        paths = [self._spool_path(path) for path in artifacts]
        self._outbox.post("finish", {"summary": _finite(summary), "artifacts": paths})

    @override
    def mark(self) -> int:
        return self._outbox.mark()

    @override
    def release(self, mark: int) -> None:
        self._outbox.release(mark)

    @override
    def close(self, timeout: float) -> int:
        if self._process:
            self._process.wait_for()
        left = self._outbox.close(timeout)
        if self._process:
            self._process.end()
        return left

    @property
    @override
    def last_error(self) -> str | None:
        return self._outbox.last_error

    def _spool_path(self, path: Path) -> str:
        """Return a path for the spool: relative to the run's folder if it is inside, otherwise absolute."""
        there = path.resolve()
        inside = there.is_relative_to(self._run_folder)
        return (there.relative_to(self._run_folder) if inside else there).as_posix()


def default_uri(runs: Path) -> str:
    """Return the URI of the store that all runs in the folder `runs` share: SQLite, with artifacts in `mlartifacts`."""
    return f"sqlite:///{runs.resolve() / 'mlflow.db'}"


def list_models(uri: str) -> list[str]:
    """Return the names of the registered models that hold drafters, the last updated first.

    Raises UsageError without a store.
    """
    with open_store(uri) as client:
        found = fetch_pages(lambda page: client.search_registered_models(page_token=page))
    ours = [model for model in found if model.name == MODEL or KIND in model.tags]
    return [str(model.name) for model in sorted(ours, key=lambda model: -model.last_updated_timestamp)]


def find_only_model(uri: str) -> str:
    """Return the name of the only registered model that holds drafters.

    Raises UsageError if there are several, or without a store; ModelError if there is none.
    """
    names = list_models(uri)
    if not names:
        raise ModelError("a drafter must have been published, but there is none; `omnidraft replay` publishes some")
    if len(names) > 1:
        raise UsageError(
            "versions of several pairs of target and drafter are registered, so one of them must be named, such as "
            f"with --name: {', '.join(names)}"
        )
    return names[0]


def list_versions(uri: str, name: str | None = None) -> list[RegisteredVersion]:
    """Return all versions of a registered model, newest first; none for an unknown model.

    `name`: None for those of all models that hold drafters, one model after the other.
    Raises UsageError without a store.
    """
    if name is None:
        return [version for found in list_models(uri) for version in list_versions(uri, found)]
    check_model_name(name)
    with open_store(uri) as client:
        versions = versions_of(client, name, "DESC")
        aliases = client.get_registered_model(name).aliases if versions else {}  # the search does not return them
    return [
        _summary(version, [alias for alias, number in aliases.items() if int(number) == int(version.version)])
        for version in versions
    ]


def show_version(uri: str, name: str, number: int) -> VersionDetails:
    """Return the details of one version; of its files only the manifest is fetched.

    Raises ModelError if there is no such version, CorruptError for a damaged manifest, UsageError without a store.
    """
    with open_store(uri) as client, tempfile.TemporaryDirectory() as folder:
        version = resolve(client, Reference(name, number))
        run = client.get_run(str(version.run_id))
        fetched, tags = download(client, version, Path(folder), MANIFEST).parent, tag_values(version.tags)
        manifest = read_manifest(fetched)
        check_registered(fetched, manifest["digest"], tags)
        return VersionDetails(_summary(version, version.aliases), manifest, run.data.metrics, run.data.params, tags)


def fetch_version(reference: str, uri: str, into: Path) -> Path:
    """Copy `models:/NAME/NUMBER` or `models:/NAME@ALIAS` into the folder `into`, check every digest, return the folder.

    `into` must be absent or empty; it is written atomically. Raises ModelError for a version that does not exist,
    CorruptError for one that differs from what was published, UsageError without a store.
    """
    parsed, target = Reference.parse(reference), into.resolve()
    with open_store(uri) as client, create_temporary_folder(target) as part:
        version = resolve(client, parsed)
        copied = download(client, version, Path(part))
        check_registered(copied, open_version(copied)["digest"], tag_values(version.tags))
        copied.replace(target)
    return into


def _summary(version: "ModelVersion", aliases: Sequence[str]) -> RegisteredVersion:
    return from_tags(str(version.name), int(version.version), version.tags, aliases, version.creation_timestamp)


def _run_folder(spool: Path) -> Path:
    """Return the run's folder of a spool, which is in that folder or in a partition of it."""
    folder = spool.resolve().parent
    return folder.parents[1] if folder.parent.name == "partitions" else folder


def _finite(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {key: value for key, value in numbers.items() if value is not None and math.isfinite(value)}
