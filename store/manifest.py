"""What a run has committed: the one file whose replacement makes parts of the log and a checkpoint count.

    RUN/log/manifest.json                   names the committed parts and the checkpoint that belongs to them
    RUN/log/<table>/part-000001.parquet     whole, checksummed, never changed
    RUN/checkpoint/000001/...               what the run goes on from; see store/checkpoint.py

What the manifest does not name does not exist for a reader. It is only ever changed by `edit_manifest`, under a lock
that is held for one reading and one replacement: so the run that writes and a compaction do not undo each other.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from filelock import FileLock

from store.errors import CorruptError, RunError
from store.files import json_bytes, write_whole
from store.rollups import COUNTS
from store.schema import SCHEMA_VERSION, TABLES

MANIFEST = Path("log", "manifest.json")
_LOCK = Path("log", ".manifest.lock")
LOCK_SECONDS = 60.0  # that an edit waits for another
_READABLE_VERSIONS = (3, SCHEMA_VERSION)
_PART_NAME = r"part-[0-9]{6,}(-[0-9]{6,})?\.parquet"  # the second number: of the last part that a joined one is made of
_CHECKPOINT_FOLDER = r"checkpoint/[0-9]{6,}"


@dataclass(frozen=True, slots=True)
class Part:
    """One committed Parquet file. Offsets are the lowest and highest stream offset in it, both included."""

    file: str  # relative to the log's folder
    rows: int
    bytes: int
    sha256: str
    first_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint. The digests are sha256, by the names of its files."""

    folder: str  # relative to the run's folder
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a run has committed: per table, its parts in the order of writing, and where it goes on.

    Attributes:
        run: its name.
        identity: what no other run has.
        tables: parts by table.
        checkpoint: None before the first and behind the end of the stream.
        finished: the whole stream is in the log.
        messages: to the registry, of those that were posted: what comes behind them never happened.
        rejected_bytes: of the file of rejected rows, alike.
    """

    run: str
    tables: Mapping[str, tuple[Part, ...]]
    identity: str = ""
    checkpoint: Checkpoint | None = None
    finished: bool = False
    messages: int = 0
    rejected_bytes: int = 0

    @classmethod
    def empty(cls, run: str) -> "Manifest":
        """Of a run that has begun."""
        return cls(run, MappingProxyType(dict.fromkeys(TABLES, ())), identity=uuid4().hex)

    def to_json(self) -> bytes:
        """The manifest's file."""
        tables = {table: [asdict(part) for part in parts] for table, parts in self.tables.items()}
        checkpoint = asdict(self.checkpoint) if self.checkpoint else None
        return json_bytes(
            {
                "schema_version": SCHEMA_VERSION,
                "run": self.run,
                "identity": self.identity,
                "finished": self.finished,
                "messages": self.messages,
                "rejected_bytes": self.rejected_bytes,
                "checkpoint": checkpoint,
                "tables": tables,
            }
        )


def read_manifest(run_folder: Path) -> Manifest:
    """The committed state of a run, now or while it is being written.

    A log of the schema version before is read as well. Raises `RunError` when the folder holds no log, one that cannot
    be opened or one of a version that is not known, `CorruptError` when the manifest cannot be understood or names
    files elsewhere.
    """
    require_unicode(run_folder)
    path = run_folder / MANIFEST
    try:
        return _manifest(path, json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"{run_folder} must be a run's folder, but {path} does not exist; see --run and --runs"
        ) from None
    except OSError as error:
        raise RunError(f"{path} must be readable: {error.strerror or error}; see --run and --runs") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{path} must be the manifest of a log, but it cannot be read: {error!r}") from error


def require_unicode(folder: Path) -> None:
    """Refuse a folder whose name is not valid UTF-8 (`RunError`): such a name cannot be printed or put in a query."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise RunError(f"a run's folder must have a name in UTF-8, got {str(folder)!a}; rename it") from None


def _manifest(path: Path, content: dict[str, Any]) -> Manifest:
    version = content["schema_version"]
    if version not in _READABLE_VERSIONS:
        known = " or ".join(map(str, _READABLE_VERSIONS))
        raise RunError(f"{path} must have schema version {known}, got {version}; use the release that wrote it")
    if version == 3:
        content = _from_version_3(content)
    named = {table: [] for table in COUNTS} | content["tables"]
    tables = {table: tuple(Part(**part) for part in named[table]) for table in TABLES}
    checkpoint = Checkpoint(**content["checkpoint"]) if content["checkpoint"] else None
    _require_inside(tables, checkpoint)
    rest = {key: content[key] for key in ("identity", "finished", "messages", "rejected_bytes")}
    return Manifest(content["run"], MappingProxyType(tables), checkpoint=checkpoint, **rest)


def _require_inside(tables: Mapping[str, tuple[Part, ...]], checkpoint: Checkpoint | None) -> None:
    """Refuse other names than a run gives (`ValueError`): a manifest from elsewhere must not point out of its run."""
    for table, parts in tables.items():
        for part in parts:
            if not re.fullmatch(rf"{table}/{_PART_NAME}", part.file):
                raise ValueError(f"a part of {table} must be {table}/part-NUMBER.parquet, got {part.file!r}")
    if checkpoint is None:
        return
    if not re.fullmatch(_CHECKPOINT_FOLDER, checkpoint.folder):
        raise ValueError(f"a checkpoint must be checkpoint/NUMBER, got {checkpoint.folder!r}")
    for name in checkpoint.files:
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ValueError(f"a checkpoint's file must have a plain name, got {name!r}")


def _from_version_3(content: Mapping[str, Any]) -> dict[str, Any]:
    """Version 3 named parts and nothing to go on from, so that its runs are over."""
    return {**content, "identity": "", "checkpoint": None, "finished": True, "messages": 0, "rejected_bytes": 0}


def edit_manifest(run_folder: Path, edit: Callable[[Manifest], Manifest]) -> Manifest:
    """Replace the manifest by what `edit` makes of it, and return that; no other edit comes in between.

    Raises what `read_manifest` raises, and OSError where the folder cannot be written; the manifest is then as before.
    """
    with FileLock(run_folder / _LOCK, timeout=LOCK_SECONDS):
        manifest = edit(read_manifest(run_folder))
        write_whole(run_folder / MANIFEST, manifest.to_json())
    return manifest


def require_open(run_folder: Path, manifest: Manifest) -> None:
    """Refuse to write to a log that is finished, be it closed by another process that took this one to be dead.

    Raises `RunError`.
    """
    if manifest.finished:
        raise RunError(f"the log of {run_folder} must be open to be written to, but it is finished; begin a new run")


def part_path(run_folder: Path, part: Part) -> Path:
    """Where a part lies."""
    return run_folder / MANIFEST.parent / part.file
