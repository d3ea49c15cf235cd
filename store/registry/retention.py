"""Registered versions in use and versions to delete: promote, rollback and prune."""

import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from store.errors import ModelError
from store.registry.mlflow_client import delete_version, open_store, resolve
from store.registry.mlflow_versions import CANDIDATE
from store.registry.registered_version import Reference, RegisteredVersion, find_lineage
from store.registry.registry import list_versions

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHAMPION = "champion"
_FORMER = "former_champions"  # tag of the registered model: their numbers, the latest last


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
            present = "it has no champion and has" if champion is None else f"version {champion} has"
            raise ModelError(
                f"a former champion of {name!r} must exist to go back to, but {present} had none that is"
                f" still there; choose one with `omnidraft versions promote N --name {shlex.quote(name)}`"
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
