"""A published drafter version: where it came from, and its use as a drafter or as a model of `transformers`."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from store.errors import ModelError
from store.registry.registered_version import Reference, VersionDetails
from store.registry.registry import (
    default_uri,
    fetch_version,
    find_only_model,
    resolve_number,
    show_version,
)
from store.registry.version_folder import VersionManifest, open_version

RUNS = Path("runs")


@dataclass(frozen=True)
class PublishedVersion:
    """A drafter version that a run published. Pass it as `drafter` to `replay` or `LLM`."""

    reference: str  #: how settings name it: `models:/NAME/NUMBER`, or its folder
    uri: str | None  #: of the MLflow store that holds it; None for a folder
    name: str  #: of the registered model
    number: int | None  #: in the registered model, from 1, over all runs; None for a folder
    run: str  #: the run that published it
    version: int  #: within that run, from 0
    offset: int  #: of the last prompt before it, in the run's stream
    target: str  #: model that the run used, as it was configured
    drafter: str  #: model that the run used, as it was configured
    created_at: datetime  #: time of publication, UTC
    digest: str  #: sha256 over the names and contents of its files
    aliases: tuple[str, ...] = ()  #: such as `candidate` or `champion`; none for a folder
    #: such as `acceptance`, on fixed prompts, and `window_acceptance`, on the run's own since the version before; none
    #: for a folder.
    metrics: Mapping[str, float] = field(default_factory=dict)

    def load(self) -> tuple[Any, Any]:
        """The drafter as a model and a tokenizer of `transformers`, on the CPU, in the type that it was saved in.

        Every file is compared with its digest first. Nothing stays on disk.

        Raises:
            ModelError: the version is gone, or holds no model.
            CorruptError: a file is not what was published.
        """
        from pipeline.versions.export import load_plain_drafter

        if self.uri is None:
            open_version(Path(self.reference))
            return load_plain_drafter(Path(self.reference))
        with TemporaryDirectory(prefix="omnidraft-version-") as scratch:
            return load_plain_drafter(fetch_version(self.reference, self.uri, Path(scratch) / "version"))

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """A version's folder, such as `RUN/versions/000003`. Raises CorruptError if any file is not as published."""
        return cls(str(folder), None, number=None, **_origin(open_version(folder)))

    @classmethod
    def from_registry(cls, details: VersionDetails, uri: str) -> Self:
        """A registered version of the store at `uri`."""
        summary, origin = details.summary, _origin(details.manifest)
        reference = f"models:/{origin['name']}/{summary.number}"
        known: dict[str, Any] = {"number": summary.number, "aliases": summary.aliases, "metrics": details.metrics}
        return cls(reference, uri, **known, **origin)


def _origin(manifest: VersionManifest) -> dict[str, Any]:
    keys = ("name", "run", "version", "offset", "target", "drafter", "digest")
    return {key: manifest[key] for key in keys} | {"created_at": datetime.fromisoformat(manifest["created_at"])}  # type: ignore[literal-required]


def load_version(version: int | str | os.PathLike[str], uri: str | None = None) -> PublishedVersion:
    """Find a published drafter version and read its metadata.

    Args:
        version: `NAME/NUMBER` or `NAME@ALIAS` (also after `models:/`), its folder, or, where the store has versions of
            one pair of target and drafter only, its number.
        uri: of the MLflow store; by default the local one of the runs below `runs/`.

    Raises:
        ModelError: there is no such version.
        CorruptError: a file is not what was published.
        UsageError: there is no store, or a number could be that of several versions.
    """
    if isinstance(version, os.PathLike) or (isinstance(version, str) and Path(version).is_dir()):
        return PublishedVersion.from_folder(Path(version))
    store = uri or default_uri(RUNS)
    reference = _parse_reference(version, store)
    number = reference.number or resolve_number(store, reference.name, str(reference.alias))
    return PublishedVersion.from_registry(show_version(store, reference.name, number), store)


def _parse_reference(version: int | str, store: str) -> Reference:
    text = str(version).removeprefix("models:/")
    if text.isdecimal():
        return Reference(find_only_model(store), int(text))
    if not re.fullmatch(r"[^/@:]+(/[0-9]+|@[\w.-]+)", text):
        raise ModelError(
            "a version must be a number, NAME/NUMBER, NAME@ALIAS or a folder that exists, "
            f"got {version!r}; `omnidraft versions` lists the numbers"
        )
    return Reference.parse(f"models:/{text}")
