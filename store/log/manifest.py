"""The manifest: the file whose replacement commits parts of the log together with a checkpoint.

    RUN/log/manifest.json                   names the committed parts and the checkpoint that belongs to them
    RUN/log/manifest.previous.json          the manifest before that, which stands in for it if it is damaged or lost
    RUN/log/<table>/part-000001.parquet     whole, checksummed, never changed
    RUN/checkpoint/000001/...               state to resume from; see store/log/checkpoint.py

Files that the manifest does not name do not exist for a reader. A manifest has the digest of its own content. Only
`edit_manifest` changes it, under a lock that it holds for one read and one replacement, so that the run and a
compaction do not overwrite each other's edits. A crash at any moment leaves one of the two files complete; files that
the previous manifest names are not removed before it is replaced, so that a run can be read and resumed from either.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from filelock import FileLock

from store.errors import CorruptError, OmnidraftError, RunError
from store.files import json_bytes, keep_copy, sync_folder, write_whole
from store.log.schema import READABLE, SCHEMA_VERSION, TABLES

LOG = logging.getLogger("omnidraft.log")

MANIFEST = Path("log", "manifest.json")
PREVIOUS = Path("log", "manifest.previous.json")
_LOCK = Path("log", ".manifest.lock")
LOCK_SECONDS = 60.0  # for which an edit waits for another
PART_NAME = r"part-[0-9]{6,}(-[0-9]{6,})?\.parquet"  # a joined part has the numbers of its first and last source
_CHECKPOINT_FOLDER = r"checkpoint/[0-9]{6,}"
# These files are written after a log's first manifest, which is synced: if any exists, there was a manifest.
_WRITTEN_LATER = ("log/*/*part-*", "checkpoint/*", "versions/*", "rejected.jsonl", "partitions/*/log/manifest.json")

_warned: set[tuple[Path, str]] = set()  # damaged manifests that were reported, each once


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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint: its folder, and the SHA-256 of each file by name."""

    folder: str  # relative to the run's folder
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The committed state of a run: the parts of each table in the order of writing, and the checkpoint."""

    run: str
    tables: Mapping[str, tuple[Part, ...]]
    identity: str  # random; no other run has it
    kind: RunKind
    checkpoint: Checkpoint | None = None  # None before the first one and after the end of the stream
    finished: bool = False  # the whole stream is in the log
    rejected_bytes: int = 0  # size of the file of rejected rows that the commit covers; the rest is discarded

    @classmethod
    def empty(cls, run: str, kind: RunKind = RunKind.REPLAY) -> "Manifest":
        """Create the manifest of a run that begins now, with a new identity."""
        return cls(run, MappingProxyType(dict.fromkeys(TABLES, ())), identity=uuid4().hex, kind=kind)

    def to_json(self, **more: Any) -> bytes:
        content = {
            "schema_version": SCHEMA_VERSION,
            "run": self.run,
            "kind": self.kind,
            "identity": self.identity,
            "finished": self.finished,
            "rejected_bytes": self.rejected_bytes,
            "checkpoint": asdict(self.checkpoint) if self.checkpoint else None,
            "tables": {table: [asdict(part) for part in parts] for table, parts in self.tables.items()},
            **more,
        }
        return json_bytes({**content, "digest": digest_of_content(content)})


def digest_of_content(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content, its `digest` left out, whatever the order of its keys."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(run_folder: Path) -> Manifest:
    """Read the committed state of a run, finished or still being written.

    If the manifest is damaged or lost, that of the commit before is returned, and a warning names the file. Raises
    RunError if the folder has no readable log or one of another schema version, CorruptError if neither manifest can be
    read.
    """
    return _read_either(run_folder)[0]


def manifest_damage(run_folder: Path) -> str | None:
    """Return why the newest manifest cannot be read while the one before can; None if it can."""
    return _read_either(run_folder)[1]


def _read_either(run_folder: Path) -> tuple[Manifest, str | None]:
    """Return the newest readable manifest, and what is wrong with the newest one if that is another."""
    require_unicode(run_folder)
    path, previous = run_folder / MANIFEST, run_folder / PREVIOUS
    try:
        return read_manifest_file(path), None
    except FileNotFoundError:
        damage: OmnidraftError = RunError(
            f"{run_folder} must be a run's folder, but {path} does not exist; see --run and --runs"
        )
    except CorruptError as error:
        damage = error
    try:
        found = read_manifest_file(previous)
    except (FileNotFoundError, OmnidraftError):
        raise damage from None
    if (path, str(damage)) not in _warned:
        _warned.add((path, str(damage)))
        LOG.warning("%s; the commit before it, %s, is used instead", damage, previous.name)
    return found, str(damage)


def read_manifest_file(path: Path) -> Manifest:
    """Read one manifest. Raises `FileNotFoundError`, `RunError` and `CorruptError`."""
    try:
        return parse_manifest(path, json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError as error:
        raise RunError(f"{path} must be readable: {error.strerror or error}; see --run and --runs") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(
            f"{path} must be the manifest of a log as it was written, but: {error!r}; restore it from a copy"
        ) from error


def has_manifest(folder: Path) -> bool:
    """Return True if the folder of a run or of a partition has a log. Every writer calls this before it begins one.

    Raises CorruptError if the manifests are missing while files are there that are only written after one: a new log
    would overwrite them.
    """
    if (folder / MANIFEST).exists() or (folder / PREVIOUS).exists():
        return True
    found = next((path for pattern in _WRITTEN_LATER for path in folder.glob(pattern)), None)
    if found is not None:
        raise CorruptError(
            f"{folder / MANIFEST} must be there to resume the run, but it is missing while {found.relative_to(folder)} "
            "exists; nothing was changed. Restore the manifest from a copy if there is one, or begin a new run in "
            "another folder with --run; the Parquet files below log/ are complete"
        )
    return False


def create_log(folder: Path, name: str, kind: RunKind) -> Manifest:
    """Create the empty log of a run or of a partition, on disk."""
    for table in TABLES:
        (folder / MANIFEST.parent / table).mkdir(parents=True, exist_ok=True)
    manifest = Manifest.empty(name, kind)
    write_whole(folder / MANIFEST, manifest.to_json())
    for made in (folder, folder.resolve().parent):
        sync_folder(made)
    return manifest


def newest_manifest(folder: Path) -> Path:
    """Return the file of a log's manifest; that of the commit before if it is lost."""
    path, previous = folder / MANIFEST, folder / PREVIOUS
    return path if path.exists() or not previous.exists() else previous


def folders_with_manifest(parent: Path) -> list[Path]:
    """Return the folders directly in `parent` that have a log, sorted by name."""
    return sorted({path.parents[1] for path in parent.glob("*/log/manifest*.json")})


def require_unicode(folder: Path) -> None:
    """Raise `RunError` for a folder whose name is not valid UTF-8: it can be neither printed nor used in a query."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise RunError(f"a run's folder must have a name in UTF-8, got {str(folder)!a}; rename it") from None


def parse_manifest(path: Path, content: dict[str, Any]) -> Manifest:
    """Build a manifest from the content of its file. Raises RunError for another schema version, and for what is no
    manifest, or was changed, one of the exceptions that `read_manifest_file` translates.
    """
    version, digest = content["schema_version"], content.get("digest")
    if digest is not None and digest != digest_of_content(content):
        raise ValueError("it has another digest than the one that it states")
    if version not in READABLE:
        raise RunError(
            f"{path} must have schema version {SCHEMA_VERSION}, got {version!r}; use the release that wrote it"
        )
    if digest is None:
        raise ValueError("it states no digest")
    tables = {table: tuple(Part(**part) for part in content["tables"][table]) for table in TABLES}
    checkpoint = Checkpoint(**content["checkpoint"]) if content["checkpoint"] else None
    _require_numbers(tables)
    _require_inside(tables, checkpoint)
    rest = {key: content[key] for key in ("identity", "finished", "rejected_bytes")}
    kind = RunKind(content["kind"])
    return Manifest(content["run"], MappingProxyType(tables), checkpoint=checkpoint, kind=kind, **rest)


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


def edit_manifest(run_folder: Path, edit: Callable[[Manifest], Manifest]) -> Manifest:
    """Replace the manifest by the result of `edit`, under a lock, and return it. Its predecessor is kept.

    Raises what `read_manifest` raises, and OSError if the folder cannot be written; the manifest is then unchanged.
    """
    with FileLock(run_folder / _LOCK, timeout=LOCK_SECONDS):
        before, damage = _read_either(run_folder)
        manifest = edit(before)
        if damage is None:  # a damaged one must not take the place of the one that stands in for it
            keep_copy(run_folder / MANIFEST, run_folder / PREVIOUS)
        write_whole(run_folder / MANIFEST, manifest.to_json())
    return manifest


def replace_previous(run_folder: Path) -> None:
    """Make the previous manifest equal to the present one, so that no other files are needed and these may go."""
    edit_manifest(run_folder, lambda manifest: manifest)


def part_path(run_folder: Path, part: Part) -> Path:
    """Return the path of a part."""
    return run_folder / MANIFEST.parent / part.file
