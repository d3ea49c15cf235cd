"""Where drafters are kept beyond their run: sending a run's points and versions, listing and fetching them.

One replay is one MLflow run with step metrics on the stream offset; each published version is a version of one
registered model. MLflow is a replica: the run's folder holds everything, and what MLflow has not taken yet waits in
a spool file. Importing this file does not import mlflow; `store.mlflow_store` does so when it is first used.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from store.errors import CorruptError, ModelError, UsageError
from store.events import VersionPublished
from store.mlflow_store import Sender, download, reading
from store.outbox import Ledger, Outbox, Patience
from store.version_folder import MANIFEST, open_version, read_manifest
from store.versions import Reference, RegisteredVersion, VersionDetails, from_tags

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

MODEL = "omnidraft-drafter"
EXPERIMENT = "omnidraft"
Point = tuple[str, float, int, int]  # key, value, step (stream offset), milliseconds since the epoch


class Registry(Protocol):
    """Where a run's points and versions are sent. Called by one thread: `start_run` first, `close` last.

    No method but `close` waits for the receiver, and none raises because of it: what could not be delivered is
    counted by `close`. The same point sent twice (same key, step and time) is one point.
    """

    def start_run(
        self, name: str, params: Mapping[str, object], tags: Mapping[str, str], datasets: Sequence[tuple[str, str]]
    ) -> None:
        """Begin; once. `datasets` are (name, source) pairs. Few params: pages show them all side by side."""

    def log_points(self, points: Sequence[Point]) -> None:
        """Add points to the run's curves, any number of times. Values that are not finite are left out."""

    def publish(self, folder: Path, event: VersionPublished, metrics: Mapping[str, float]) -> None:
        """Register a sealed folder as a new version. The folder must stay as it is until it was sent."""

    def finish(self, summary: Mapping[str, float], artifacts: Sequence[Path]) -> None:
        """Add the summary's numbers and files to the run and mark it as finished; once."""

    def close(self, timeout: float) -> int:
        """Wait at most `timeout` seconds for what is under way; the number of messages that stayed unsent.

        May be called again, with the same answer. Nothing else may be called after it.
        """

    @property
    def trouble(self) -> str | None:
        """The last failure while the receiver does not answer; None while all is well."""


class NoRegistry:
    """Sends nothing anywhere: the run's own folder is all there is."""

    trouble: str | None = None

    def start_run(
        self, name: str, params: Mapping[str, object], tags: Mapping[str, str], datasets: Sequence[tuple[str, str]]
    ) -> None:
        """Nothing."""

    def log_points(self, points: Sequence[Point]) -> None:
        """Nothing."""

    def publish(self, folder: Path, event: VersionPublished, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def finish(self, summary: Mapping[str, float], artifacts: Sequence[Path]) -> None:
        """Nothing."""

    def close(self, timeout: float) -> int:
        """Nothing is ever unsent."""
        return 0


class MlflowRegistry:
    """Sends to MLflow from one background thread, through a spool file beside the run's log.

    Opening it on the spool of an earlier process sends what that one left over, into the same MLflow run.
    """

    def __init__(
        self,
        uri: str,
        spool: Path,
        *,
        experiment: str = EXPERIMENT,
        model: str = MODEL,
        patience: Patience | None = None,
    ):
        sender = Sender(uri, experiment, model, Ledger.read(spool).results)
        self._outbox = Outbox(
            spool,
            sender.deliver,
            merged=frozenset({"points"}),
            gates=frozenset({"start"}),
            patience=patience or Patience(),
        )

    def start_run(
        self, name: str, params: Mapping[str, object], tags: Mapping[str, str], datasets: Sequence[tuple[str, str]]
    ) -> None:
        """See Registry."""
        texts = {key: str(value) for key, value in params.items()}
        self._outbox.post("start", {"name": name, "params": texts, "tags": dict(tags), "datasets": list(datasets)})

    def log_points(self, points: Sequence[Point]) -> None:
        """See Registry."""
        finite = [point for point in points if math.isfinite(point[1])]
        if finite:
            self._outbox.post("points", {"points": finite})

    def publish(self, folder: Path, event: VersionPublished, metrics: Mapping[str, float]) -> None:
        """See Registry."""
        numbers = {"acceptance": event.acceptance, "cache_entries": event.cache_entries, **metrics}
        body = {"folder": str(folder.resolve()), "event": asdict(event), "metrics": _finite(numbers)}
        self._outbox.post("publish", body)

    def finish(self, summary: Mapping[str, float], artifacts: Sequence[Path]) -> None:
        """See Registry."""
        paths = [str(path.resolve()) for path in artifacts]
        self._outbox.post("finish", {"summary": _finite(summary), "artifacts": paths})

    def close(self, timeout: float) -> int:
        """See Registry."""
        return self._outbox.close(timeout)

    @property
    def trouble(self) -> str | None:
        """See Registry."""
        return self._outbox.trouble


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
        aliases = _aliases(client, name)
        found = client.search_model_versions(f"name = '{name}'", order_by=["version_number DESC"])
        return [_summary(version, aliases) for version in found]


def show_version(uri: str, name: str, number: int) -> VersionDetails:
    """All about one version, of which only the manifest is fetched.

    Raises ModelError when there is none of that number, CorruptError for a broken manifest, UsageError without a store.
    """
    with reading(uri) as client, tempfile.TemporaryDirectory() as folder:
        version = _resolve(client, Reference(name, number, None))
        run = client.get_run(str(version.run_id))
        manifest = read_manifest(download(client, version, Path(folder), MANIFEST).parent)
        return VersionDetails(
            _summary(version, _aliases(client, name)), manifest, run.data.metrics, run.data.params, dict(version.tags)
        )


def fetch_version(reference: str, uri: str, into: Path) -> Path:
    """Copy `models:/NAME/NUMBER` or `models:/NAME@ALIAS` into the folder `into`, check every digest, return the folder.

    `into` must be absent or empty, and appears whole or not at all. Raises ModelError for a version that does not
    exist, CorruptError for one that is not what was published, UsageError without a store.
    """
    parsed = Reference.parse(reference)
    if into.exists() and any(into.iterdir()):
        raise UsageError(f"a version must be fetched into a new or empty folder, but {into} holds files; name another")
    into.parent.mkdir(parents=True, exist_ok=True)
    with reading(uri) as client, tempfile.TemporaryDirectory(dir=into.parent) as part:
        version = _resolve(client, parsed)
        copied = download(client, version, Path(part))
        _check_fetched(copied, version.tags.get("digest"))
        copied.replace(into)
    return into


def _check_fetched(folder: Path, digest: str | None) -> None:
    """The manifest travels with the files; the registry's own tag is what tells that both were replaced together."""
    found = open_version(folder)["digest"]
    if digest is not None and found != digest:
        raise CorruptError(f"the version must have the registered digest {digest}, got {found}; publish it again")


def _resolve(client: "MlflowClient", reference: Reference) -> "ModelVersion":
    known = {int(version.version): version for version in client.search_model_versions(f"name = '{reference.name}'")}
    number = reference.number if reference.alias is None else _aliased(client, reference)
    if number not in known:
        raise ModelError(
            f"{reference.name!r} must have a version {reference.alias or number}, but has"
            f" {f'1 to {max(known)}' if known else 'none'}; `omnidraft versions` lists them"
        )
    return known[number]


def _aliased(client: "MlflowClient", reference: Reference) -> int | None:
    found = [number for number, aliases in _aliases(client, reference.name).items() if reference.alias in aliases]
    return found[0] if found else None


def _aliases(client: "MlflowClient", name: str) -> dict[int, list[str]]:
    """Aliases by version number; listing versions does not bring them."""
    aliases: dict[int, list[str]] = {}
    if client.search_registered_models(f"name = '{name}'"):
        for alias, number in client.get_registered_model(name).aliases.items():
            aliases.setdefault(int(number), []).append(alias)
    return aliases


def _summary(version: "ModelVersion", aliases: Mapping[int, Sequence[str]]) -> RegisteredVersion:
    number = int(version.version)
    return from_tags(number, version.tags, aliases.get(number, ()), version.creation_timestamp)


def _finite(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {key: value for key, value in numbers.items() if value is not None and math.isfinite(value)}
