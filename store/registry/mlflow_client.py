"""Requests to MLflow. Only the files `store/registry/mlflow_*.py` import it, and only inside functions (over 1 s)."""

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from store.errors import CorruptError, ModelError, UsageError
from store.registry.registered_version import Reference
from store.registry.relocation import adopt_artifacts

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.store.entities import PagedList

T = TypeVar("T")
IDENTITY = "mlflow.omnidraft.identity"  # tag by which runs and logged models are found again; pages hide the prefix
KIND = "mlflow.omnidraft.kind"  # tag of the registered models that hold drafters
SQLITE = "sqlite:///"
_ENVIRONMENT = {  # read by mlflow when it is imported
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # a call then fails after seconds, not minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # the terminal belongs to the run's own display
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def connect(uri: str) -> "MlflowClient":
    """Return a client of the store at `uri`. Its first request sets up the store (6 s for a new SQLite schema).

    A local store whose folder was moved is changed first, so that it finds its files.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if (path := local_database(uri)) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        adopt_artifacts(path)
    from mlflow import MlflowClient

    for library in ("mlflow", "urllib3"):  # which reports each of its retries
        logging.getLogger(library).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextmanager
def open_store(uri: str) -> Iterator["MlflowClient"]:
    """Yield a client of an existing store. Raises UsageError, and creates nothing, if there is none or none answers."""
    path = local_database(uri)
    if path is not None and not path.exists():
        raise UsageError(f"an MLflow store must exist to be read, but {path} does not; `omnidraft replay` makes one")
    with explain_failures(uri):
        yield connect(uri)


@contextmanager
def explain_failures(uri: str) -> Iterator[None]:
    """Raise UsageError for what MLflow raises because it does not answer, or refuses."""
    try:
        yield
    except ImportError as error:
        raise UsageError(f"MLflow at {uri} must be reached by a package that is not there: {error}; add it") from error
    except _refusals() as error:
        reason = str(getattr(error, "message", error)).partition(" (Caused by")[0]
        raise UsageError(f"MLflow at {uri} must answer, but: {reason}; check --mlflow-uri") from error


def _refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions of a store that cannot be read; a local database passes the driver's exceptions on."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError


def is_transient(error: Exception) -> bool:
    """Return True if the request may succeed later: the connection broke, or the server reported 429 or 5xx."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        status = int(error.get_http_status_code())
        return status >= 500 or status == 429
    gone = isinstance(error, FileNotFoundError | NotADirectoryError)  # a local file, which does not come back
    return isinstance(error, OSError) and not gone  # the base of what `requests` raises


def local_database(uri: str) -> Path | None:
    """Return the file of a SQLite URI; None for any other store."""
    return Path(uri.removeprefix(SQLITE)).resolve() if uri.startswith(SQLITE) else None


def find_or_create(find: Callable[[], list[T]], make: Callable[[], object], remove: Callable[[T], object]) -> T:
    """Return the oldest thing that `find` finds; make it if there is none, and remove the others.

    A request whose response was lost is sent again, by MLflow's client or by a later process, and may create a
    duplicate.
    """
    found = find()
    if not found:
        make()
        found = find()
    kept, *others = found
    for other in others:
        remove(other)
    return kept


def fetch_pages(search: Callable[[str | None], "PagedList[T]"]) -> list[T]:
    """Return the results of a search from all its pages; `search` gets the token of the page, None for the first."""
    page = search(None)
    found = list(page)
    while page.token:
        page = search(page.token)
        found += page
    return found


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


def versions_of(client: "MlflowClient", name: str, order: str = "ASC") -> list["ModelVersion"]:
    """Return all registered versions of a model, sorted by number; none for an unknown model."""
    by = [f"version_number {order}"]
    return fetch_pages(lambda page: client.search_model_versions(f"name = '{name}'", order_by=by, page_token=page))


def find_version(client: "MlflowClient", reference: Reference) -> "ModelVersion | None":
    """Return a registered version; None if MLflow reports that it does not exist."""
    from mlflow.exceptions import MlflowException

    try:
        if reference.alias is None:
            return client.get_model_version(reference.name, str(reference.number))
        return client.get_model_version_by_alias(reference.name, reference.alias)
    except MlflowException as error:
        if is_transient(error):
            raise
        return None


def resolve(client: "MlflowClient", reference: Reference) -> "ModelVersion":
    """Return a registered version. Raises ModelError if it does not exist."""
    found = find_version(client, reference)
    if found is None:
        known = _spans(int(version.version) for version in versions_of(client, reference.name))
        raise ModelError(
            f"{reference.name!r} must have a version {reference.alias or reference.number}, but has"
            f" {known or 'none'}; `omnidraft versions` lists them"
        )
    return found


def _spans(numbers: Iterable[int]) -> str:
    """Format numbers as text, with ranges: `1 to 3, 7`."""
    groups = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in group] for _, group in groups]
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans)


def model_id_of(version: "ModelVersion") -> str:
    """Return the id of a registered version's logged model; MLflow leaves the version's own `model_id` empty."""
    return str(version.source).removeprefix("models:/")


def download(client: "MlflowClient", version: "ModelVersion", into: Path, file: str = "") -> Path:
    """Copy a version's artifacts, or one file, into a folder; return the path of the copy. Digests are not checked.

    Raises CorruptError if the version's files are lost, or the copy is not inside the folder.
    """
    from mlflow.artifacts import download_artifacts

    folder = client.get_logged_model(model_id_of(version)).artifact_location
    source = f"{folder}/{file}" if file else folder
    try:
        copied = Path(download_artifacts(artifact_uri=source, dst_path=str(into), tracking_uri=client.tracking_uri))
    except OSError as error:
        raise CorruptError(f"version {version.version} must have its files at {source}, but: {error}") from error
    if not copied.resolve().is_relative_to(into.resolve()):
        raise CorruptError(f"version {version.version} must be copied into {into}, but {source} leads to {copied}")
    return copied


def delete_version(client: "MlflowClient", version: "ModelVersion") -> None:
    """Delete a registered version with its files, in an order that can be repeated after any interruption."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    location = client.get_model_version_download_uri(version.name, version.version)
    get_artifact_repository(location, client.tracking_uri).delete_artifacts()
    client.set_tag(str(version.run_id), "pruned", "true")
    client.delete_logged_model(model_id_of(version))
    client.delete_model_version(version.name, version.version)
