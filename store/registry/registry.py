"""The registry of drafters in MLflow: list versions and fetch them.

MLflow is a replica of what runs publish in their folders (store/registry/mlflow_sync.py). Importing this file does not
import mlflow; `store.registry.mlflow_client` does so on its first use.
"""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from store.errors import ModelError, UsageError
from store.files import cache_root
from store.registry.mlflow_client import KIND, SQLITE, download, fetch_pages, open_store, resolve, versions_of
from store.registry.registered_version import (
    Reference,
    RegisteredVersion,
    VersionDetails,
    check_model_name,
    check_registered,
    from_tags,
    tag_values,
)
from store.registry.version_folder import MANIFEST, create_temporary_folder, open_version, read_manifest

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

_ESCAPED = frozenset("%?#")  # releases of SQLAlchemy differ in how they read them in a URI


def default_uri(runs: Path) -> str:
    """Return the URI of the store that all runs in the folder `runs` share: SQLite, with artifacts in `mlartifacts`.

    A folder whose name cannot be part of a URI is reached by a link in the cache folder.
    """
    folder = runs.resolve()
    if _ESCAPED & set(str(folder)):
        folder = _link_to(folder)
    return f"{SQLITE}{folder / 'mlflow.db'}"


def _link_to(folder: Path) -> Path:
    link = cache_root() / "stores" / hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    if not link.is_symlink() or link.readlink() != folder:
        link.parent.mkdir(parents=True, exist_ok=True)
        new = link.with_name(f".{link.name}.{os.getpid()}")
        new.unlink(missing_ok=True)
        new.symlink_to(folder, target_is_directory=True)
        new.replace(link)
    return link


def list_models(uri: str) -> list[str]:
    """Return the names of the registered models that hold drafters, the last updated first.

    Raises UsageError without a store.
    """
    with open_store(uri) as client:
        found = fetch_pages(lambda page: client.search_registered_models(page_token=page))
    ours = [model for model in found if KIND in model.tags]
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


def resolve_number(uri: str, name: str, text: str) -> int:
    """Return the number that a text names: a number, with or without `#`, or an alias.

    Raises ModelError for any other text, UsageError without a store.
    """
    if text.removeprefix("#").isdecimal():
        return int(text.removeprefix("#"))
    known = list_versions(uri, name)
    number = next((version.number for version in known if text in version.aliases), None)
    if number is None:
        aliases = ", ".join(sorted({alias for version in known for alias in version.aliases})) or "there is none"
        raise ModelError(
            f"a version of {name} must be named by its number or an alias ({aliases}), got {text!r}; "
            "`omnidraft versions` lists them"
        )
    return number


def show_version(uri: str, name: str, number: int) -> VersionDetails:
    """Return the details of one version; of its files only the manifest is fetched.

    Raises ModelError if there is no such version, CorruptError for a damaged manifest, UsageError without a store.
    """
    with open_store(uri) as client, tempfile.TemporaryDirectory() as folder:
        version = resolve(client, Reference(name, number))
        run = client.get_run(str(version.run_id)).data
        above = run.tags.get("mlflow.parentRunId")  # the replay, with the settings
        params = {**(client.get_run(above).data.params if above else {}), **run.params}
        fetched, tags = download(client, version, Path(folder), MANIFEST).parent, tag_values(version.tags)
        manifest = read_manifest(fetched)
        check_registered(fetched, manifest["digest"], tags)
        return VersionDetails(_summary(version, version.aliases), manifest, run.metrics, params, tags)


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
