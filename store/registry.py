"""Where drafters are kept beyond their run: sending a run's points and versions, listing and fetching them.

One replay is one MLflow run, each published version a version of one registered model. MLflow is a replica: the run's
folder holds everything, and what MLflow has not taken yet waits in a spool file. Importing this file does not import
mlflow; `store.mlflow_client` does so when it is first used.
"""

import math
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from store.errors import UsageError
from store.events import VersionPublished
from store.mlflow_client import aliases_of, download, reading, resolve, versions_of
from store.mlflow_store import Sender
from store.outbox import Ledger, Outbox, Patience
from store.version_folder import MANIFEST, folder_beside, open_version, read_manifest
from store.versions import Reference, RegisteredVersion, VersionDetails, check_registered, from_tags, plain

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

MODEL = "omnidraft-drafter"
EXPERIMENT = "omnidraft"
Point = tuple[str, float, int, int]  # key, value, step (stream offset), milliseconds since the epoch


class Registry(Protocol):
    """Where a run's points and versions are sent. Called by one thread, but for `release`.

    A new run calls `start_run` first, one that goes on from a commit `resume` instead; `close` comes last. What was
    sent behind that commit is discarded, since it is sent again: so a commit stores `mark()`, and `release` of that
    mark lets the messages before it out once the commit stands.

    No method but `close` waits for the receiver, and none raises because of it: what could not be delivered is
    counted by `close`. The same point sent twice (same key, step and time) is one point.
    """

    def start_run(
        self,
        name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        datasets: Sequence[tuple[str, str]],
        identity: str | None = None,
    ) -> None:
        """Begin; once. `datasets` are (name, source) pairs. Few params: pages show them all side by side.

        `identity`: a text that no other run has, by which the receiver's run is found again; None makes one.
        """

    def pause(self) -> None:
        """Show the run as stopped before its end."""

    def resume(self) -> None:
        """Show the run, which an earlier process started, as running again."""

    def log_points(self, points: Sequence[Point]) -> None:
        """Add points to the run's curves, any number of times. Values that are not finite are left out."""

    def publish(
        self, folder: Path, event: VersionPublished, metrics: Mapping[str, float], drift: int | None = None
    ) -> None:
        """Register a sealed folder as a new version. The folder must stay as it is until it was sent.

        `metrics`: those named `probe/...` were measured on a fixed set of prompts, the others on the stream.
        `drift`: offset of the drift that this version is the first to answer.
        """

    def finish(self, summary: Mapping[str, float], artifacts: Sequence[Path]) -> None:
        """Add the summary's numbers and files to the run and mark it as finished; once."""

    def mark(self) -> int:
        """Bring all messages so far onto the disk; a number above theirs and below all later ones'. Raises OSError."""

    def release(self, mark: int) -> None:
        """Let the messages below the mark out. From any thread."""

    def close(self, timeout: float) -> int:
        """Wait at most `timeout` seconds for what is released; the number of messages that stayed unsent.

        May be called again, with the same answer. Nothing else may be called after it.
        """

    @property
    def trouble(self) -> str | None:
        """The last failure while the receiver does not answer; None while all is well."""


class NoRegistry:
    """Sends nothing anywhere: the run's own folder is all there is."""

    trouble: str | None = None

    def start_run(
        self,
        name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        datasets: Sequence[tuple[str, str]],
        identity: str | None = None,
    ) -> None:
        """Nothing."""

    def pause(self) -> None:
        """Nothing."""

    def resume(self) -> None:
        """Nothing."""

    def log_points(self, points: Sequence[Point]) -> None:
        """Nothing."""

    def publish(
        self, folder: Path, event: VersionPublished, metrics: Mapping[str, float], drift: int | None = None
    ) -> None:
        """Nothing."""

    def finish(self, summary: Mapping[str, float], artifacts: Sequence[Path]) -> None:
        """Nothing."""

    def mark(self) -> int:
        """Nothing is ever posted."""
        return 0

    def release(self, mark: int) -> None:
        """Nothing."""

    def close(self, timeout: float) -> int:
        """Nothing is ever unsent."""
        return 0


class MlflowRegistry:
    """Sends to MLflow from one background thread, through a spool file beside the run's log.

    Opening it on the spool of an earlier process sends what that one left over, into the same MLflow run.
    `keep`: the mark that the run's last commit stores; 0 for a new run. Messages from it on are discarded, and what is
    sent from now on waits for `release`. None, for a caller without commits, sends everything as soon as may be.
    """

    def __init__(
        self,
        uri: str,
        spool: Path,
        *,
        experiment: str = EXPERIMENT,
        model: str = MODEL,
        patience: Patience | None = None,
        keep: int | None = None,
    ):
        self._run_folder = _run_folder(spool)
        sender = Sender(uri, experiment, model, Ledger.read(spool).known, self._run_folder)
        self._outbox = Outbox(
            spool,
            sender.deliver,
            merged=frozenset({"points"}),
            gates=frozenset({"start"}),
            patience=patience or Patience(),
            keep=keep,
        )

    def start_run(
        self,
        name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        datasets: Sequence[tuple[str, str]],
        identity: str | None = None,
    ) -> None:
        """See Registry."""
        body = {
            "name": name,
            "params": {key: str(value) for key, value in params.items()},
            "tags": dict(tags),
            "datasets": list(datasets),
            "identity": identity or str(uuid.uuid4()),
        }
        self._outbox.post("start", body)

    def pause(self) -> None:
        """See Registry."""
        self._outbox.post("pause", {})

    def resume(self) -> None:
        """See Registry."""
        self._outbox.post("resume", {})

    def log_points(self, points: Sequence[Point]) -> None:
        """See Registry."""
        finite = [point for point in points if math.isfinite(point[1])]
        if finite:
            self._outbox.post("points", {"points": finite})

    def publish(
        self, folder: Path, event: VersionPublished, metrics: Mapping[str, float], drift: int | None = None
    ) -> None:
        """See Registry."""
        numbers = {"acceptance": event.acceptance, "cache_entries": event.cache_entries, **metrics}
        body = {"folder": self._named(folder), "event": asdict(event), "metrics": _finite(numbers), "drift": drift}
        self._outbox.post("publish", body)

    def finish(self, summary: Mapping[str, float], artifacts: Sequence[Path]) -> None:
        """See Registry."""
        paths = [self._named(path) for path in artifacts]
        self._outbox.post("finish", {"summary": _finite(summary), "artifacts": paths})

    def mark(self) -> int:
        """See Registry."""
        return self._outbox.mark()

    def release(self, mark: int) -> None:
        """See Registry."""
        self._outbox.release(mark)

    def close(self, timeout: float) -> int:
        """See Registry."""
        return self._outbox.close(timeout)

    @property
    def trouble(self) -> str | None:
        """See Registry."""
        return self._outbox.trouble

    def _named(self, path: Path) -> str:
        """As the spool names it: within the run's folder, wherever that is when it is sent; else where it is now."""
        there = path.resolve()
        inside = there.is_relative_to(self._run_folder)
        return (there.relative_to(self._run_folder) if inside else there).as_posix()


def default_uri(runs: Path) -> str:
    """The store that every run under the folder `runs` shares: SQLite there, with artifacts in `mlartifacts`."""
    return f"sqlite:///{runs.resolve() / 'mlflow.db'}"


def experiment_id(uri: str, experiment: str = EXPERIMENT) -> str:
    """MLflow's number of the experiment, for links to its pages. Raises UsageError without a store or experiment."""
    with reading(uri) as client:
        found = client.get_experiment_by_name(experiment)
    if found is None:
        raise UsageError(f"MLflow must know the experiment {experiment!r}, but does not; `omnidraft replay` makes it")
    return str(found.experiment_id)


def list_versions(uri: str, name: str = MODEL) -> list[RegisteredVersion]:
    """Every registered version, newest first; none when the model is not known. Raises UsageError without a store."""
    with reading(uri) as client:
        aliases = aliases_of(client, name)
        return [_summary(version, aliases) for version in versions_of(client, name, "DESC")]


def show_version(uri: str, name: str, number: int) -> VersionDetails:
    """All about one version, of which only the manifest is fetched.

    Raises ModelError when there is none of that number, CorruptError for a broken manifest, UsageError without a store.
    """
    with reading(uri) as client, tempfile.TemporaryDirectory() as folder:
        version = resolve(client, Reference(name, number, None))
        run = client.get_run(str(version.run_id))
        fetched, tags = download(client, version, Path(folder), MANIFEST).parent, plain(version.tags)
        manifest = read_manifest(fetched)
        check_registered(fetched, manifest["digest"], tags)
        summary = _summary(version, aliases_of(client, name))
        return VersionDetails(summary, manifest, run.data.metrics, run.data.params, tags)


def fetch_version(reference: str, uri: str, into: Path) -> Path:
    """Copy `models:/NAME/NUMBER` or `models:/NAME@ALIAS` into the folder `into`, check every digest, return the folder.

    `into` must be absent or empty, and appears whole or not at all. Raises ModelError for a version that does not
    exist, CorruptError for one that is not what was published, UsageError without a store.
    """
    parsed, target = Reference.parse(reference), into.resolve()
    with reading(uri) as client, folder_beside(target) as part:
        version = resolve(client, parsed)
        copied = download(client, version, Path(part))
        check_registered(copied, open_version(copied)["digest"], plain(version.tags))
        copied.replace(target)
    return into


def _summary(version: "ModelVersion", aliases: Mapping[int, Sequence[str]]) -> RegisteredVersion:
    number = int(version.version)
    return from_tags(number, version.tags, aliases.get(number, ()), version.creation_timestamp)


def _run_folder(spool: Path) -> Path:
    """The folder that a spool lies in, or in a partition of."""
    folder = spool.resolve().parent
    return folder.parents[1] if folder.parent.name == "partitions" else folder


def _finite(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {key: value for key, value in numbers.items() if value is not None and math.isfinite(value)}
