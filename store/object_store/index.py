"""The index of a run on an object store: its manifest, with the files that no log names under "mirror"."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

from store.errors import CorruptError
from store.log.lock import Owner
from store.log.manifest import Manifest, parse_manifest

_SHA256 = re.compile(r"[0-9a-f]{64}")

Files = Mapping[str, str]  # SHA-256 by path in the run's folder


@dataclass(frozen=True)
class Writer(Owner):
    """The process that wrote a manifest."""

    identity: str = field(default_factory=lambda: uuid4().hex)  # unique over all machines


@dataclass(frozen=True)
class Index:
    """A commit on an object store."""

    manifest: Manifest  # the log's manifest, which names parts and the checkpoint
    owner: Writer  # the process that wrote it
    files: Files = field(default_factory=dict)  # all other files

    @classmethod
    def parse(cls, where: str, content: bytes) -> "Index":
        """Parse a manifest. Raises CorruptError for anything but that of a run on an object store, or for paths outside
        of it; RunError for an unknown version of the schema.
        """
        try:
            parsed = json.loads(content)
            mirror: dict[str, Any] = parsed["mirror"]
            files = {_check_path(path): _check_digest(digest) for path, digest in mirror["files"].items()}
            return cls(parse_manifest(Path(where), parsed), Writer(**mirror["owner"]), files)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptError(f"{where} must be the manifest of a run on an object store, but: {error!r}") from error

    def to_json(self) -> bytes:
        mirror = {"owner": asdict(self.owner), "files": self.files}
        return self.manifest.to_json(mirror=mirror)

    def parts(self) -> Files:
        tables = self.manifest.tables.values()
        return {f"log/{part.file}": part.sha256 for parts in tables for part in parts}

    def checkpoint(self) -> Files:
        kept = self.manifest.checkpoint
        return {f"{kept.folder}/{name}": digest for name, digest in kept.files.items()} if kept else {}

    def all_files(self) -> Files:
        return {**self.parts(), **self.checkpoint(), **self.files}

    def digests(self) -> frozenset[str]:
        return frozenset(self.all_files().values())


def _check_path(path: str) -> str:
    """Return a path if it is in the run's folder, outside of log and checkpoint; otherwise raise ValueError."""
    plain = PurePosixPath(path)
    if plain.is_absolute() or ".." in plain.parts or "\\" in path or plain.as_posix() != path or path == ".":
        raise ValueError(f"a file must lie in the run's folder, got {path!r}")
    if plain.parts[0].startswith(".") or plain.parts[0] in ("log", "checkpoint", "partitions"):
        raise ValueError(f"a file must not lie where others belong, got {path!r}")
    return path


def _check_digest(text: str) -> str:
    if not _SHA256.fullmatch(text):
        raise ValueError(f"an object must be named by its sha256, got {text!r}")
    return text
