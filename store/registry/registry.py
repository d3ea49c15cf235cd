"""The registry of drafters in MLflow: list versions, fetch them, put them into service, and delete old ones.

MLflow is a replica of what runs publish in their folders (store/registry/mlflow_sync.py). Importing this file does not
import mlflow; `store.registry.mlflow_client` does so on its first use.
"""

import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from store.errors import ModelError, UsageError
from store.files import find_plain_path
from store.registry.mlflow_client import (
    KIND,
    SQLITE,
    delete_version,
    download,
    fetch_pages,
    open_store,
    resolve,
    versions_of,
)
from store.registry.mlflow_versions import CANDIDATE
from store.registry.registered_version import (
    Reference,
    RegisteredVersion,
    VersionDetails,
    check_model_name,
    check_registered,
    find_lineage,
    from_tags,
    tag_values,
)
from store.registry.version_folder import MANIFEST, create_temporary_folder, open_version, read_manifest

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"
_FORMER = "former_champions"  # tag of the registered model: their numbers, the latest last


def default_uri(runs: Path) -> str:
    """Return the URI of the store that all runs in the folder `runs` share: SQLite, with artifacts in `mlartifacts`."""
    folder = find_plain_path(runs, "%?#")  # releases of SQLAlchemy differ in how they read them in a URI
    return f"{SQLITE}{folder / 'mlflow.db'}"


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
    """Return the number that a text names: `RUN/VERSION`, a number, with or without `#`, or an alias.

    Of runs of one name it is the newest. Raises ModelError for any other text, UsageError without a store.
    """
    if text.removeprefix("#").isdecimal():
        return int(text.removeprefix("#"))
    known = list_versions(uri, name)
    number = next((version.number for version in known if text in (version.label, *version.aliases)), None)
    if number is None:
        aliases = ", ".join(sorted({alias for version in known for alias in version.aliases})) or "there is none"
        raise ModelError(
            f"a version of {name} must be named by RUN/VERSION, its number or an alias ({aliases}), got {text!r}; "
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


def promote(uri: str, name: str, number: int) -> int | None:
    """Give a version the alias `champion`; return the number of the previous champion, or None.

    Raises ModelError for a version that does not exist, UsageError without a store.
    """
    with open_store(uri) as client:
        resolve(client, Reference(name, number))
        champion, former = _champions(client, name)
        if champion is not None and champion != number:
            _remember(client, name, [*former, champion])  # first, so that a kill loses no champion
        client.set_registered_model_alias(name, CHAMPION, str(number))
    return champion


def rollback(uri: str, name: str) -> tuple[int | None, int]:
    """Give the alias `champion` back to the previous champion; return the numbers of the old and the new champion.

    The old one is None if it was deleted. Raises ModelError if there is no such version, UsageError without a store.
    """
    with open_store(uri) as client:
        versions = list_versions(uri, name)
        champion, former = _champions(client, name) if versions else (None, [])
        earlier = _still_there(former, versions, champion)
        if not earlier:
            store = "" if uri == default_uri(Path("runs")) else f" --mlflow-uri {shlex.quote(uri)}"
            label = next((version.label for version in versions if version.number == champion), "")
            present = f"{label} has" if label else "it has no champion and has"
            raise ModelError(
                f"a former champion of {name!r} must exist to go back to, but {present} had none that is"
                f" still there; choose one with `omnidraft versions promote VERSION --name {shlex.quote(name)}{store}`"
            )
        _remember(client, name, earlier)  # without what a killed process left
        client.set_registered_model_alias(name, CHAMPION, str(earlier[-1]))
        _remember(client, name, earlier[:-1])
    return champion, earlier[-1]


def prune(uri: str, name: str, keep_last: int, dry_run: bool) -> list[int]:
    """Delete versions with their files; return their numbers, ascending. With `dry_run`, only return them.

    Champion, candidate, the version that `rollback` would restore, all their ancestors and the newest `keep_last` stay.
    The runs with the metrics of deleted versions stay, tagged `pruned`. Raises UsageError without a store.
    """
    with open_store(uri) as client:
        versions = list_versions(uri, name)
        if not versions:
            return []
        champion, former = _champions(client, name)
        used = [version.number for version in versions if {CHAMPION, CANDIDATE} & set(version.aliases)]
        used += _still_there(former, versions, champion)[-1:]
        kept = {ancestor for number in used for ancestor in find_lineage(number, versions)}
        kept |= {version.number for version in versions[:keep_last]}
        planned = sorted({version.number for version in versions} - kept)
        for number in [] if dry_run else planned:
            delete_version(client, resolve(client, Reference(name, number)))
    return planned


def _champions(client: "MlflowClient", name: str) -> tuple[int | None, list[int]]:
    """Return the champion and the former champions, the latest last.

    A process that is killed between its two writes leaves the champion among the former ones, as the last.
    """
    model = client.get_registered_model(name)
    alias = model.aliases.get(CHAMPION)
    champion = None if alias is None else int(alias)
    former = [int(number) for number in re.findall(r"[0-9]+", model.tags.get(_FORMER, ""))]
    return champion, former[:-1] if former and former[-1] == champion else former


def _remember(client: "MlflowClient", name: str, former: Sequence[int]) -> None:
    client.set_registered_model_tag(name, _FORMER, ", ".join(map(str, former)))


def _still_there(former: Sequence[int], versions: Sequence[RegisteredVersion], champion: int | None) -> list[int]:
    left = {version.number for version in versions} - {champion}
    return [number for number in former if number in left]
