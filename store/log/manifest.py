"""The manifest: the file whose replacement commits parts of the log together with a checkpoint.

    RUN/log/manifest.json                   names the committed parts and the checkpoint that belongs to them
    RUN/log/manifest.previous.json          the manifest before that; see store/recovery/repair.py
    RUN/log/<table>/part-000001.parquet     whole, checksummed, never changed
    RUN/checkpoint/000001/...               state to resume from; see store/log/checkpoint.py

Files that the manifest does not name do not exist for a reader. Only `edit_manifest` changes the manifest, under a lock
that it holds for one read and one replacement, so that the run and a compaction do not overwrite each other's edits.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from filelock import FileLock

from store.errors import CorruptError, RunError
from store.files import json_bytes, keep_copy, write_whole
from store.log.rollups import COUNTS
from store.log.schema import SCHEMA_VERSION, TABLES

MANIFEST = Path("log", "manifest.json")
PREVIOUS = Path("log", "manifest.previous.json")
UNREADABLE = Path("log", "manifest.unreadable.json")  # what a repair put aside
_LOCK = Path("log", ".manifest.lock")
LOCK_SECONDS = 60.0  # for which an edit waits for another
READABLE_VERSIONS = tuple(range(3, SCHEMA_VERSION + 1))
PART_NAME = r"part-[0-9]{6,}(-[0-9]{6,})?\.parquet"  # a joined part has the numbers of its first and last source
_CHECKPOINT_FOLDER = r"checkpoint/[0-9]{6,}"
# These files are written after a log's first manifest, which is synced: if any exists, there was a manifest.
_WRITTEN_LATER = (
    *("log/*/*part-*", PREVIOUS.as_posix(), "checkpoint/*", "versions/*", "rejected.jsonl"),
    "partitions/*/log/manifest.json",
)


class RunKind(StrEnum):
    """The kind of process that writes a log."""

    REPLAY = "replay"  # a replay in one process, in the run's own log
    CLUSTER = "cluster"  # the driver of several workers, in the run's own log
    SERVE = "serve"  # a server, in the run's own log
    ENGINE = "engine"  # drafts inside another engine, which decides; in the run's own log
    TRAINING = "training"  # a training from the logs of other runs, in the run's own log
    WORKER = "worker"  # a decode worker, in a partition
    LEARNER = "learner"  # the learner of workers or of a server, in a partition


@dataclass(frozen=True, slots=True)
class Part:
    """One committed Parquet file. Offsets are the lowest and highest stream offset in it, both included."""

    file: str  # relative to the log's folder
    rows: int
    bytes: int
    sha256: str
    first_offset: int
    last_offset: int
    schema_version: int = SCHEMA_VERSION  # with which it was written; a resumed or compacted log has older parts, too


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint: its folder, and the SHA-256 of each file by name."""

    folder: str  # relative to the run's folder
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The committed state of a run: the parts of each table in the order of writing, and the checkpoint.

    Attributes:
        run: the run's name.
        identity: a random id that no other run has.
        tables: parts by table.
        checkpoint: None before the first one and after the end of the stream.
        finished: the whole stream is in the log.
        messages: number of messages to the registry that the commit covers; later ones are discarded.
        rejected_bytes: size of the file of rejected rows that the commit covers, in bytes; the rest is discarded.
        kind: None in a log of an older release, until it is resumed.
    """

    run: str
    tables: Mapping[str, tuple[Part, ...]]
    identity: str = ""
    checkpoint: Checkpoint | None = None
    finished: bool = False
    messages: int = 0
    rejected_bytes: int = 0
    kind: RunKind | None = None

    @classmethod
    def empty(cls, run: str, kind: RunKind = RunKind.REPLAY) -> "Manifest":
        """Create the manifest of a run that begins now, with a new identity."""
        return cls(run, MappingProxyType(dict.fromkeys(TABLES, ())), identity=uuid4().hex, kind=kind)

    def to_json(self) -> bytes:
        """Encode the manifest as the content of its file."""
        tables = {table: [asdict(part) for part in parts] for table, parts in self.tables.items()}
        checkpoint = asdict(self.checkpoint) if self.checkpoint else None
        return json_bytes(
            {
                "schema_version": SCHEMA_VERSION,
                "run": self.run,
                "kind": self.kind,
                "identity": self.identity,
                "finished": self.finished,
                "messages": self.messages,
                "rejected_bytes": self.rejected_bytes,
                "checkpoint": checkpoint,
                "tables": tables,
            }
        )


def read_manifest(run_folder: Path, file: Path = MANIFEST) -> Manifest:
    """Read the committed state of a run, finished or still being written, also of schema versions 3 to 6.

    Args:
        run_folder: of the run or partition.
        file: `PREVIOUS` reads the commit before the last.

    Raises:
        RunError: the folder has no log, the log cannot be opened, or its schema version is unknown.
        CorruptError: the manifest cannot be parsed or names files outside its run.
    """
    require_unicode(run_folder)
    path = run_folder / file
    try:
        return _manifest(path, json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"{run_folder} must be a run's folder, but {path} does not exist; see --run and --runs"
        ) from None
    except OSError as error:
        raise RunError(f"{path} must be readable: {error.strerror or error}; see --run and --runs") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(
            f"{path} must be the manifest of a log, but it cannot be read: {error!r}; `omnidraft repair` rebuilds it"
        ) from error


def has_manifest(folder: Path) -> bool:
    """Return True if the folder of a run or of a partition has a log. Every writer calls this before it begins one.

    Raises:
        CorruptError: the manifest is missing, but there are files that are only written after it. A new log would
            overwrite them.
    """
    if (folder / MANIFEST).exists():
        return True
    found = next((path for pattern in _WRITTEN_LATER for path in folder.glob(pattern)), None)
    if found is not None:
        raise CorruptError(
            f"{folder / MANIFEST} must be there to resume the run, but it is missing while {found.relative_to(folder)} "
            "exists; nothing was changed. `omnidraft repair` rebuilds it. Restore the manifest from a copy if there is "
            "one, or begin a new run in another folder with --run; the Parquet files below log/ are complete"
        )
    return False


def require_unicode(folder: Path) -> None:
    """Raise `RunError` for a folder whose name is not valid UTF-8: it can be neither printed nor used in a query."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise RunError(f"a run's folder must have a name in UTF-8, got {str(folder)!a}; rename it") from None


def _manifest(path: Path, content: dict[str, Any]) -> Manifest:
    version = content["schema_version"]
    if version not in READABLE_VERSIONS:
        known = f"{', '.join(map(str, READABLE_VERSIONS[:-1]))} or {READABLE_VERSIONS[-1]}"
        raise RunError(f"{path} must have schema version {known}, got {version}; use the release that wrote it")
    if version == 3:
        content = _from_version_3(content)
    named = {table: [] for table in COUNTS} | content["tables"]
    oldest = {"schema_version": version}  # of parts in manifests that do not name it
    tables = {table: tuple(Part(**(oldest | part)) for part in named[table]) for table in TABLES}
    checkpoint = Checkpoint(**content["checkpoint"]) if content["checkpoint"] else None
    _require_numbers(tables)
    _require_inside(tables, checkpoint)
    rest = {key: content[key] for key in ("identity", "finished", "messages", "rejected_bytes")}
    rest["kind"] = RunKind(content["kind"]) if content.get("kind") else None
    return Manifest(content["run"], MappingProxyType(tables), checkpoint=checkpoint, **rest)


def _require_numbers(tables: Mapping[str, tuple[Part, ...]]) -> None:
    """Raise `ValueError` for counts of a part that are no numbers; readers add them up."""
    for part in (part for parts in tables.values() for part in parts):
        counts = {name: getattr(part, name) for name in ("rows", "bytes", "first_offset", "last_offset")}
        wrong = {name: value for name, value in counts.items() if type(value) is not int or value < 0}
        if wrong:
            raise ValueError(f"the numbers of {part.file!r} must be integers from 0 on, got {wrong}")


def _require_inside(tables: Mapping[str, tuple[Part, ...]], checkpoint: Checkpoint | None) -> None:
    """Raise `ValueError` for file names that a run does not use: a manifest must not name files outside its run."""
    for table, parts in tables.items():
        for part in parts:
            if not re.fullmatch(rf"{table}/{PART_NAME}", part.file):
                raise ValueError(f"a part of {table} must be {table}/part-NUMBER.parquet, got {part.file!r}")
    if checkpoint is None:
        return
    if not re.fullmatch(_CHECKPOINT_FOLDER, checkpoint.folder):
        raise ValueError(f"a checkpoint must be checkpoint/NUMBER, got {checkpoint.folder!r}")
    for name in checkpoint.files:
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ValueError(f"a checkpoint's file must have a plain name, got {name!r}")


def _from_version_3(content: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a manifest of version 3, which has no checkpoint, so its runs count as finished."""
    return {**content, "identity": "", "checkpoint": None, "finished": True, "messages": 0, "rejected_bytes": 0}


def edit_manifest(run_folder: Path, edit: Callable[[Manifest], Manifest]) -> Manifest:
    """Replace the manifest by the result of `edit`, under a lock, and return it. Its predecessor is kept.

    Raises what `read_manifest` raises, and OSError if the folder cannot be written; the manifest is then unchanged.
    """
    with FileLock(run_folder / _LOCK, timeout=LOCK_SECONDS):
        manifest = edit(read_manifest(run_folder))
        keep_copy(run_folder / MANIFEST, run_folder / PREVIOUS)
        write_whole(run_folder / MANIFEST, manifest.to_json())
    return manifest


def replace_unreadable(run_folder: Path, manifest: Manifest) -> None:
    """Put a manifest in the place of one that is lost or cannot be read, which is kept as `UNREADABLE`.

    Raises OSError if the folder cannot be written; the manifest is then unchanged.
    """
    with FileLock(run_folder / _LOCK, timeout=LOCK_SECONDS):
        if (run_folder / MANIFEST).exists():
            keep_copy(run_folder / MANIFEST, run_folder / UNREADABLE)
        write_whole(run_folder / MANIFEST, manifest.to_json())


def require_open(run_folder: Path, manifest: Manifest) -> None:
    """Raise `RunError` if a log is finished, for example closed by a process that took this one for dead."""
    if manifest.finished:
        raise RunError(f"the log of {run_folder} must be open to be written to, but it is finished; begin a new run")


def part_path(run_folder: Path, part: Part) -> Path:
    """Return the path of a part."""
    return run_folder / MANIFEST.parent / part.file
