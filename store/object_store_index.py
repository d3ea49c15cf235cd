"""What a run on an object store consists of: the manifest, and under "mirror" in it the files that no log names.

RUN/log/manifest.json       the run's manifest, with the index; its replacement is the commit
RUN/objects/SHA256          all that it names, by content; never changed
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from store.errors import CorruptError
from store.files import json_bytes
from store.manifest import Manifest
from store.manifest import _manifest as manifest_of

_SHA256 = re.compile(r"[0-9a-f]{64}")

Files = Mapping[str, tuple[str, ...]]  # by path in the run's folder: the sha256 of the objects it is made of, in order


@dataclass(frozen=True)
class Owner:
    """Who wrote a manifest."""

    host: str
    pid: int
    since: str  # ISO 8601, UTC
    identity: str  # what no other process has, whatever its machine calls it

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


@dataclass(frozen=True)
class Index:
    """A commit on an object store.

    Attributes:
        manifest: the log's, which names parts and the checkpoint.
        files: all others.
        owner: who wrote it.
    """

    manifest: Manifest
    owner: Owner
    files: Files = field(default_factory=dict)

    @classmethod
    def parse(cls, where: str, content: bytes) -> "Index":
        """Raises CorruptError for what is no manifest of a run on an object store, or names paths elsewhere; RunError
        for a version of the schema that is not known."""
        try:
            parsed = json.loads(content)
            mirror: dict[str, Any] = parsed["mirror"]
            files = {_inside(path): tuple(map(_digest, digests)) for path, digests in mirror["files"].items()}
            return cls(manifest_of(Path(where), parsed), Owner(**mirror["owner"]), files)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptError(f"{where} must be the manifest of a run on an object store, but: {error!r}") from error

    def to_json(self) -> bytes:
        """The object."""
        mirror = {"owner": asdict(self.owner), "files": self.files}
        return json_bytes({**json.loads(self.manifest.to_json()), "mirror": mirror})

    def parts(self) -> Files:
        """What the log names."""
        tables = self.manifest.tables.values()
        return {f"log/{part.file}": (part.sha256,) for parts in tables for part in parts}

    def checkpoint(self) -> Files:
        """What a run goes on from."""
        kept = self.manifest.checkpoint
        return {f"{kept.folder}/{name}": (digest,) for name, digest in kept.files.items()} if kept else {}

    def everything(self) -> Files:
        """All files of the run but the manifest."""
        return {**self.parts(), **self.checkpoint(), **self.files}

    def digests(self) -> frozenset[str]:
        """Of all objects."""
        return frozenset(digest for digests in self.everything().values() for digest in digests)


def _inside(path: str) -> str:
    """A path that stays in the run's folder, beside what the log and the checkpoint name (`ValueError` else)."""
    plain = PurePosixPath(path)
    if plain.is_absolute() or ".." in plain.parts or "\\" in path or plain.as_posix() != path or path == ".":
        raise ValueError(f"a file must lie in the run's folder, got {path!r}")
    if plain.parts[0].startswith(".") or plain.parts[0] in ("log", "checkpoint", "partitions"):
        raise ValueError(f"a file must not lie where others belong, got {path!r}")
    return path


def _digest(text: str) -> str:
    if not _SHA256.fullmatch(text):
        raise ValueError(f"an object must be named by its sha256, got {text!r}")
    return text
