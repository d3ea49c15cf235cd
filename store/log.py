"""The run's log: events in, Parquet parts out, published by one atomic file.

    RUN/log/manifest.json                   the committed parts; what it does not name does not exist for a reader
    RUN/log/<table>/part-000001.parquet     whole, checksummed, never changed or deleted
    RUN/rejected.jsonl                      source rows that could not become prompts, one JSON object per line

The thread that runs the models only appends to lists. A writer thread turns full lists into parts. Every file is
written under a temporary name, synced and renamed, so that a crash leaves either the old state or the new one.
"""

import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from store.errors import CorruptError, OmnidraftError, RunError
from store.events import Event, PromptReceived, PromptRejected
from store.schema import SCHEMA_VERSION, TABLES, LoggedEvent, parquet_options, to_table

MANIFEST = Path("log", "manifest.json")
REJECTED = "rejected.jsonl"

# An unforced commit waits until the last one is this many seconds old: 2% of the log's age, within these bounds.
# A day of running then makes some 1,500 parts per table, which DuckDB opens in a fraction of a second.
SHORTEST_COMMIT_SECONDS, LONGEST_COMMIT_SECONDS, COMMIT_SHARE = 5.0, 60.0, 0.02

_TABLE_OF: Mapping[type, str] = MappingProxyType({event: table for table, event in TABLES.items()})


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
class Manifest:
    """What a run has committed: per table, its parts in the order of writing."""

    run: str
    tables: Mapping[str, tuple[Part, ...]]

    def to_json(self) -> bytes:
        """The manifest's file."""
        tables = {table: [asdict(part) for part in parts] for table, parts in self.tables.items()}
        return json_bytes({"schema_version": SCHEMA_VERSION, "run": self.run, "tables": tables})


def read_manifest(run_folder: Path) -> Manifest:
    """The committed state of a run, now or while it is being written.

    Raises `RunError` when the folder holds no log or one of another schema version, `CorruptError` when the
    manifest cannot be understood.
    """
    path = run_folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        version = content["schema_version"]
        if version != SCHEMA_VERSION:
            raise RunError(
                f"{path} must have schema version {SCHEMA_VERSION}, got {version}; use the release that wrote it"
            )
        tables = {table: tuple(Part(**part) for part in content["tables"][table]) for table in TABLES}
        return Manifest(content["run"], MappingProxyType(tables))
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"{run_folder} must be a run's folder, but {path} does not exist; see --run and --runs"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} must be the manifest of a log, but it cannot be read: {error!r}") from error


def part_path(run_folder: Path, part: Part) -> Path:
    """Where a part lies; the file exists as long as the run does."""
    return run_folder / MANIFEST.parent / part.file


def changed_parts(run_folder: Path) -> list[Path]:
    """Committed parts that are missing or whose bytes are not those that were written. Reads every part once."""
    parts = [part for parts in read_manifest(run_folder).tables.values() for part in parts]
    return [path for part in parts if _digest_of(path := part_path(run_folder, part)) != part.sha256]


def write_whole(path: Path, content: bytes) -> None:
    """Put `content` at `path` such that a reader, also after a crash, finds all of it or what was there before."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


class RunLog:
    """Keeps the events of one run. One thread appends and commits; a context manager, which closes at the end.

    `part_rows`: rows of a table that make a part. `queue_parts`: full parts that may wait for the disk; when
    there are more, `append` waits too, so that memory stays bounded.
    `clock`: monotonic seconds, for the distance between unforced commits.

    Raises `RunError` when the folder already holds a log or cannot be written. A failure of the writer thread is
    raised as `OmnidraftError` by every later `append`, `commit` and `close`; what was committed before it stays good.
    """

    def __init__(
        self,
        run_folder: Path,
        part_rows: int = 50_000,
        queue_parts: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = run_folder
        self._parts = _Parts(run_folder)
        self._part_rows = part_rows
        self._clock = clock
        self._opened = self._committed = clock()
        self._pending: dict[type, list[LoggedEvent]] = {event: [] for event in TABLES.values()}
        self._failure: BaseException | None = None
        self._closed = False
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(maxsize=queue_parts)
        self._writer = threading.Thread(target=self._work, name="log-writer", daemon=True)
        self._writer.start()

    def append(self, event: Event) -> None:
        """Keep one event; a list append, unless a part is full and the writer thread is behind.

        A `PromptRejected` goes to `rejected.jsonl` at once. A `PromptReceived` is not kept: its text comes again
        with `PromptCompleted`.
        """
        self._require_working()
        rows = self._pending.get(type(event))
        if rows is None:
            self._append_without_table(event)
            return
        rows.append(event)  # type: ignore[arg-type]
        if len(rows) >= self._part_rows:
            self._hand_over(type(event))

    def commit(self, *, force: bool = False) -> None:
        """Make everything appended so far visible to readers, by one replacement of the manifest.

        Meant to be called after every prompt. Unforced it is a hint: nothing happens while the last commit is
        younger than 2% of the log's age (at least 5 and at most 60 seconds), so that parts stay large, and it does
        not wait for the disk. With `force` it always commits, and readers see the rows when it returns.
        """
        self._require_working()
        now = self._clock()
        wait = COMMIT_SHARE * (now - self._opened)
        if force or now - self._committed >= min(max(wait, SHORTEST_COMMIT_SECONDS), LONGEST_COMMIT_SECONDS):
            self._committed = now
            self._publish(wait=force)

    def close(self) -> None:
        """Commit everything and stop the writer thread; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._publish(wait=True)
        finally:
            self._jobs.put(None)
            self._writer.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append_without_table(self, event: Event) -> None:
        if isinstance(event, PromptRejected):
            with open(self._folder / REJECTED, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(event), ensure_ascii=False) + "\n")
        elif not isinstance(event, PromptReceived):
            raise TypeError(f"the log keeps the events of store/events.py, got {type(event).__name__}")

    def _publish(self, wait: bool) -> None:
        for kind in self._pending:
            self._hand_over(kind)
        self._jobs.put(self._parts.publish)
        if wait:
            self._jobs.join()
            self._raise_failure()

    def _hand_over(self, kind: type) -> None:
        """Queue the pending rows of one table; waits while the queue is full, which is what bounds the memory."""
        if rows := self._pending[kind]:
            self._jobs.put(partial(self._parts.write, _TABLE_OF[kind], rows))
            self._pending[kind] = []  # only now: a Ctrl-C while waiting must not lose the rows

    def _work(self) -> None:
        """The writer thread. After a failure it drops jobs, so that nobody waits for ever and no hole is published."""
        for job in iter(self._jobs.get, None):
            try:
                if self._failure is None:
                    job()
            except BaseException as error:
                self._failure = error
            finally:
                self._jobs.task_done()

    def _require_working(self) -> None:
        self._raise_failure()
        if self._closed:
            raise RunError(f"the log of {self._folder} must be open, but it was closed; open a log in a new folder")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise OmnidraftError(
                f"the log below {self._folder} must be writable, but writing failed: {self._failure!r}; "
                "what was committed before is whole. Free the disk and start the run again"
            ) from self._failure


class _Parts:
    """The files of one log; used by the writer thread alone once the log is open."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / MANIFEST.parent
        self._manifest_path = run_folder / MANIFEST
        self._run = run_folder.resolve().name
        self._written: dict[str, list[Part]] = {table: [] for table in TABLES}
        self._rows = dict.fromkeys(TABLES, 0)
        if self._manifest_path.exists():
            raise RunError(f"{run_folder} must not hold a log yet, but it does; name another folder with --run")
        try:
            for table in TABLES:
                (self._folder / table).mkdir(parents=True, exist_ok=True)
            self.publish()
        except OSError as error:
            raise RunError(
                f"{run_folder} must be a folder that can be written, got {error}; try another --run"
            ) from error

    def write(self, table: str, events: Sequence[LoggedEvent]) -> None:
        """Write one part; nobody sees it before `publish`."""
        parts = self._written[table]
        name = f"{table}/part-{len(parts) + 1:06d}.parquet"
        sink = pa.BufferOutputStream()
        pq.write_table(to_table(table, self._rows[table], events), sink, **parquet_options(table))
        content = sink.getvalue().to_pybytes()
        write_whole(self._folder / name, content)
        offsets = [event.offset for event in events]
        digest = hashlib.sha256(content).hexdigest()
        parts.append(Part(name, len(events), len(content), digest, min(offsets), max(offsets)))
        self._rows[table] += len(events)

    def publish(self) -> None:
        """Name every part written so far in the manifest."""
        tables = {table: tuple(parts) for table, parts in self._written.items()}
        write_whole(self._manifest_path, Manifest(self._run, tables).to_json())


def json_bytes(content: Any) -> bytes:
    """Readable JSON of `content`; refuses NaN, which other readers of JSON cannot parse (`ValueError`)."""
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _digest_of(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut, on systems where a folder can be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
