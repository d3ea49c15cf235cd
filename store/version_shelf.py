"""Which registered versions are in use, and which may go: champion, its predecessors, and what prune takes away."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from store.errors import ModelError, UsageError
from store.files import digest_of
from store.mlflow_client import erase, reading, resolve
from store.mlflow_comparison import write_comparison
from store.registry import list_versions
from store.versions import Reference, RegisteredVersion

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHAMPION, CANDIDATE = "champion", "candidate"
_FORMER = "former_champions"  # tag of the registered model: their numbers, the latest last
_MOST_FORMER = 100


def promote(uri: str, name: str, number: int) -> int | None:
    """Give a version the alias `champion`; the number of the one that had it before, None if none had.

    Raises ModelError for a version that does not exist, UsageError without a store.
    """
    with reading(uri) as client:
        resolve(client, Reference(name, number, None))
        champion, former = _champions(client, name)
        if champion is not None and champion != number:
            _remember(client, name, [*former, champion])  # first: the alias is what counts
        client.set_registered_model_alias(name, CHAMPION, str(number))
    return champion


def rollback(uri: str, name: str) -> tuple[int, int]:
    """Give the alias `champion` back to the version that had it before; the numbers of who lost and who got it.

    Raises ModelError if there is no such version, UsageError without a store.
    """
    with reading(uri) as client:
        resolve(client, Reference(name, None, CHAMPION))
        champion, former = _champions(client, name)
        earlier = _still_there(former, list_versions(uri, name), champion)
        if champion is None or not earlier:
            raise ModelError(
                f"a former champion of {name!r} must exist to go back to, but version {champion} has had none that is"
                " still there; choose one with `omnidraft versions promote`"
            )
        client.set_registered_model_alias(name, CHAMPION, str(earlier[-1]))
        _remember(client, name, earlier[:-1])
    return champion, earlier[-1]


def prune(uri: str, name: str, keep_last: int, dry_run: bool) -> list[int]:
    """Delete versions with their files; the numbers of those that go, or with `dry_run` would go, ascending.

    Champion, candidate, the version that `rollback` would go back to, all their ancestors and the newest `keep_last`
    stay; so does one that comes under this protection meanwhile. The runs that show the figures of those that go stay
    too, tagged `pruned`. Raises UsageError without a store or for a negative number.
    """
    if keep_last < 0:
        raise UsageError(f"the number of versions to keep must be at least 0, got {keep_last}")
    with reading(uri) as client:
        planned, gone = _not_needed(client, uri, name, keep_last), []
        for number in [] if dry_run else planned:
            if number in _not_needed(client, uri, name, keep_last):  # it may have been promoted meanwhile
                erase(client, resolve(client, Reference(name, number, None)))
                gone.append(number)
    return planned if dry_run else gone


def record_comparison(
    uri: str, name: str, first: int, second: int, figures: Mapping[str, float], files: Sequence[Path]
) -> str:
    """Write a comparison of two versions as an MLflow run of its own; the run's id.

    The same comparison is one run, however often it is written: same versions, figures and contents of files.
    Raises ModelError for a version that does not exist, UsageError without a store.
    """
    said = [name, first, second, sorted(figures.items()), [(path.name, digest_of(path)) for path in files]]
    identity = f"comparison-{hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]}"
    with reading(uri) as client:
        pair = [resolve(client, Reference(name, number, None)) for number in (first, second)]
        return write_comparison(client, identity, pair, figures, files)


def _champions(client: "MlflowClient", name: str) -> tuple[int | None, list[int]]:
    """The champion, and those before it, the latest last."""
    model = client.get_registered_model(name)
    champion, former = model.aliases.get(CHAMPION), re.findall(r"[0-9]+", model.tags.get(_FORMER, ""))
    return None if champion is None else int(champion), [int(number) for number in former]


def _remember(client: "MlflowClient", name: str, former: Sequence[int]) -> None:
    client.set_registered_model_tag(name, _FORMER, ", ".join(map(str, former[-_MOST_FORMER:])))


def _still_there(former: Sequence[int], versions: Sequence[RegisteredVersion], champion: int | None) -> list[int]:
    """The former champions that `rollback` may go back to, the latest last."""
    left = {version.number for version in versions} - {champion}
    return [number for number in former if number in left]


def _not_needed(client: "MlflowClient", uri: str, name: str, keep_last: int) -> list[int]:
    """Numbers of the versions that may go, ascending."""
    versions = list_versions(uri, name)
    if not versions:
        return []
    champion, former = _champions(client, name)
    used = [version.number for version in versions if {CHAMPION, CANDIDATE} & set(version.aliases)]
    kept = _with_ancestors([*used, *_still_there(former, versions, champion)[-1:]], versions)
    kept |= {version.number for version in versions[:keep_last]}
    return sorted({version.number for version in versions} - kept)


def _with_ancestors(numbers: Sequence[int], versions: Sequence[RegisteredVersion]) -> set[int]:
    parents = {version.number: version.parent for version in versions}
    kept: set[int] = set()
    for start in numbers:
        number: int | None = start
        while number is not None and number in parents and number not in kept:
            kept.add(number)
            number = parents[number]
    return kept
