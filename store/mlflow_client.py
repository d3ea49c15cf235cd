"""Talking to MLflow. Only the files `store/mlflow_*.py` import it, and only inside functions (over a second)."""

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from store.errors import CorruptError, ModelError, UsageError
from store.versions import Reference, check_model_name

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.store.entities import PagedList

T = TypeVar("T")
_SQLITE = "sqlite:///"
_ENVIRONMENT = {  # read by mlflow when it is imported
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # a call then fails after seconds, not minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # the terminal belongs to the run's own display
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def connect(uri: str) -> "MlflowClient":
    """A client of the store at `uri`, made ready by the first call that uses it (a new SQLite schema: 6 s)."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.ERROR)  # also where somebody has imported it before
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextmanager
def reading(uri: str) -> Iterator["MlflowClient"]:
    """A client of what exists: raises UsageError, and makes nothing, where no store is or none answers."""
    path = local_database(uri)
    if path is not None and not path.exists():
        raise UsageError(f"an MLflow store must exist to be read, but {path} does not; `omnidraft replay` makes one")
    try:
        yield connect(uri)
    except ImportError as error:
        raise UsageError(f"MLflow at {uri} must be reached by a package that is not there: {error}; add it") from error
    except _refusals() as error:
        reason = getattr(error, "message", str(error))
        raise UsageError(f"MLflow at {uri} must answer, but: {reason}; check --mlflow-uri") from error


def _refusals() -> tuple[type[Exception], ...]:
    """What a store that cannot be read raises; a database of its own lets the driver's exceptions through."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError


def answers(uri: str) -> bool:
    """Whether the store takes the simplest of requests."""
    try:
        connect(uri).search_experiments(max_results=1)
    except Exception:  # whatever it is, the store is not well
        return False
    return True


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later: the connection broke, or the server says that it is its own fault."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.get_http_status_code() >= 500 or error.get_http_status_code() == 429
    gone = isinstance(error, FileNotFoundError | NotADirectoryError)  # a file of ours, which does not come back
    return isinstance(error, OSError) and not gone  # the base of what `requests` raises


def local_database(uri: str) -> Path | None:
    """The file behind a SQLite URI; None for any other store."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def once(find: Callable[[], list[T]], make: Callable[[], object], remove: Callable[[T], object]) -> T:
    """The one thing that `find` finds, oldest first; made if there is none, the others removed if there are several.

    A request whose answer was lost is sent again, by MLflow's client or by a later process, and may make a second.
    """
    found = find()
    if not found:
        make()
        found = find()
    kept, *others = found
    for other in others:
        remove(other)
    return kept


def every(search: Callable[[str | None], "PagedList[T]"]) -> list[T]:
    """What a search finds on all its pages; it is given the token of the page, None for the first."""
    page = search(None)
    found = list(page)
    while page.token:
        page = search(page.token)
        found += page
    return found


def versions_of(client: "MlflowClient", name: str, order: str = "ASC") -> list["ModelVersion"]:
    """All registered versions of a model, by number; none for an unknown one."""
    by = [f"version_number {order}"]
    return every(lambda page: client.search_model_versions(f"name = '{name}'", order_by=by, page_token=page))


def resolve(client: "MlflowClient", reference: Reference) -> "ModelVersion":
    """The registered version. Raises ModelError when there is none."""
    known = {int(version.version): version for version in versions_of(client, reference.name)}
    number = reference.number if reference.alias is None else _aliased(client, reference)
    if number not in known:
        raise ModelError(
            f"{reference.name!r} must have a version {reference.alias or number}, but has"
            f" {_spans(known) or 'none'}; `omnidraft versions` lists them"
        )
    return known[number]


def _spans(numbers: Iterable[int]) -> str:
    """The numbers as text, neighbours together: `1 to 3, 7`."""
    groups = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in group] for _, group in groups]
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans)


def _aliased(client: "MlflowClient", reference: Reference) -> int | None:
    found = [number for number, aliases in aliases_of(client, reference.name).items() if reference.alias in aliases]
    return found[0] if found else None


def aliases_of(client: "MlflowClient", name: str) -> dict[int, list[str]]:
    """Aliases by version number; listing versions does not bring them. Raises ModelError for an impossible name."""
    check_model_name(name)
    aliases: dict[int, list[str]] = {}
    if client.search_registered_models(f"name = '{name}'"):
        for alias, number in client.get_registered_model(name).aliases.items():
            aliases.setdefault(int(number), []).append(alias)
    return aliases


def model_id_of(version: "ModelVersion") -> str:
    """The logged model behind a registered version; MLflow leaves the version's own `model_id` empty."""
    return str(version.source).removeprefix("models:/")


def download(client: "MlflowClient", version: "ModelVersion", into: Path, file: str = "") -> Path:
    """Copy a version's artifacts, or the one named, into a folder; the path of the copy. Nothing else is checked yet.

    Raises CorruptError when the registry's version has lost its files, or when they are not below the folder.
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


def erase(client: "MlflowClient", version: "ModelVersion") -> None:
    """Delete a registered version with its files, in an order that can be taken up again wherever it breaks off."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    location = client.get_model_version_download_uri(version.name, version.version)
    get_artifact_repository(location, client.tracking_uri).delete_artifacts()
    client.set_tag(str(version.run_id), "pruned", "true")
    client.delete_logged_model(model_id_of(version))
    client.delete_model_version(version.name, version.version)
