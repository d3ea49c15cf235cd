"""The run's log: writes events as Parquet parts and commits them atomically, together with a checkpoint.

The thread that runs the models only appends to lists. A writer thread turns full lists into parts and commits: it
writes the checkpoint's files, then replaces the manifest (see store/log/manifest.py) that names both. Every file is
written under a temporary name, synced and renamed, so that a crash leaves either the old state or the new one. A
resumed run first removes files that no commit names.

    RUN/rejected.jsonl      source rows that could not become prompts, one JSON object per line
"""

import json
import os
import queue
import shlex
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import thread_time
from types import MappingProxyType
from typing import Self

from store.errors import CorruptError, OmnidraftError, RunError
from store.events import Event, PromptReceived, PromptRejected
from store.fault_points import fault_point
from store.files import sync_file, sync_folder
from store.log.checkpoint import remove_other_checkpoints, write_checkpoint
from store.log.manifest import (
    MANIFEST,
    Checkpoint,
    Manifest,
    RunKind,
    create_log,
    edit_manifest,
    has_manifest,
    replace_previous,
)
from store.log.partitions import partition_folder
from store.log.parts import PartWriter, last_number, newest_number
from store.log.schema import TABLES, LoggedEvent

REJECTED = "rejected.jsonl"

_TABLE_OF = {event: table for table, event in TABLES.items()}


@dataclass(frozen=True)
class Commit:
    """Request to commit the events appended so far. Both functions are called by the writer thread."""

    files: Callable[[], Mapping[str, bytes]] | None  # returns the checkpoint's files by name; None ends the stream
    done: Callable[[], None] = lambda: None  # called after the commit
    kept: frozenset[str] = frozenset()  # files of the last commit's checkpoint that are part of this one, unchanged


class Mirror:
    """Copies the commits of one log to another place (store/object_store/mirror.py); this class copies nothing.

    Called by one thread at a time: `pull`, then `acquire`, then `push`.
    """

    def __init__(self, local: Path) -> None:
        self._local, self.name = local, str(local)  # of the run, as on the command line

    def manifest(self) -> Manifest | None:
        return None

    def pull(self) -> None:
        """Make the local folder equal to the commit of the other place. Called before the folder is read."""

    def acquire(self, manifest: Manifest) -> None:
        """Take over the other place for this process. Called before its first commit, with the log's manifest."""

    def push(self, manifest: Manifest) -> None:
        """Copy a local commit; it counts when this method returns."""

    def partitions(self) -> list[str]:
        """Return the names of the run's partitions in the other place."""
        return []

    def partition(self, name: str) -> "Mirror":
        return Mirror(partition_folder(self._local, name))


class RunLog:
    """Writes the events of one run; one thread appends and commits. A context manager, which finishes the log unless it
    was closed before or an exception is raised.

    An unfinished log in the folder is continued after its last commit; later events are removed. A failure of the
    writer thread is raised as `OmnidraftError` by every later `append`, `commit` and `finish`; earlier commits stay
    valid.

    Args:
        run_folder: folder of the log.
        part_rows: rows of a table that make a part.
        queue_parts: full parts that may wait for the disk; with more, `append` waits, so that memory stays bounded.
        mirror: copies every commit before it is done.
        kind: kind of the run, for the manifest.
    """

    def __init__(
        self,
        run_folder: Path,
        part_rows: int = 50_000,
        queue_parts: int = 4,
        mirror: Mirror | None = None,
        kind: RunKind = RunKind.REPLAY,
    ) -> None:
        self._folder, self._mirror = run_folder, mirror or Mirror(run_folder)
        self._files = _LogFiles(run_folder, self._mirror, kind)
        self._part_rows = part_rows
        self._pending: dict[type, list[LoggedEvent]] = {event: [] for event in TABLES.values()}
        self._failure: BaseException | None = None
        self._closed, self._requested = False, 0  # commits handed to the writer thread
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(maxsize=queue_parts)
        self._writer = threading.Thread(target=self._work, name="log-writer", daemon=True)
        self._writer.start()

    @property
    def commit_seconds(self) -> float:
        """Processor time that the last commit took on the writer thread: waiting for the disk keeps nobody."""
        return self._files.commit_seconds

    @property
    def all_commit_seconds(self) -> float:
        return self._files.all_commit_seconds

    @property
    def committing(self) -> bool:
        return self._files.committed < self._requested

    def append(self, event: Event) -> None:
        """Add one event. This is a list append, unless a part is full and the queue of the writer thread is, too.

        A `PromptRejected` is written to `rejected.jsonl` at once. A `PromptReceived` is not stored: `PromptCompleted`
        has its text.
        """
        self._require_working()
        rows = self._pending.get(type(event))
        if rows is None:
            if isinstance(event, PromptRejected):
                with open(self._folder / REJECTED, "a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(event), ensure_ascii=False) + "\n")
            elif not isinstance(event, PromptReceived):
                raise TypeError(f"the log keeps the events of store/events.py, got {type(event).__name__}")
            return
        rows.append(event)  # type: ignore[arg-type]
        if len(rows) >= self._part_rows:
            self._hand_over(type(event))

    def commit(self, commit: Commit, *, wait: bool = False) -> None:
        """Commit everything appended so far, on the writer thread. With `wait`, return when readers see the rows."""
        self._require_working()
        for kind in self._pending:
            self._hand_over(kind)
        self._requested += 1
        path = self._folder / REJECTED
        self._jobs.put(partial(self._files.commit, commit, path.stat().st_size if path.exists() else 0))
        if wait:
            self._jobs.join()
            self._raise_failure()

    def finish(self, done: Callable[[], None] = lambda: None) -> None:
        """Commit everything at the end of the stream, remove the checkpoint, and close the log."""
        try:
            self.commit(Commit(None, done), wait=True)
        finally:
            self.close()

    def close(self) -> None:
        """Stop the writer thread; events since the last commit are dropped. May be called again."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._writer.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self._closed:
            self.finish()
        self.close()

    def _hand_over(self, kind: type) -> None:
        """Queue the pending rows of one table; waits while the queue is full, which bounds the memory."""
        if rows := self._pending[kind]:
            self._jobs.put(partial(self._files.parts.write, _TABLE_OF[kind], rows))
            self._pending[kind] = []  # only now: a Ctrl-C while waiting must not lose the rows

    def _work(self) -> None:
        """Run jobs on the writer thread; drop them after a failure, so that no caller waits and no gap is committed."""
        for job in iter(self._jobs.get, None):
            try:
                if self._failure is None:
                    job()
            except BaseException as error:
                self._failure = error
            finally:
                del job  # with a commit's snapshot
                self._jobs.task_done()

    def _require_working(self) -> None:
        self._raise_failure()
        if self._closed:
            raise RunError(f"the log of {self._folder} must be open, but it was closed; open a log in a new folder")

    def _raise_failure(self) -> None:
        if isinstance(self._failure, RunError):
            raise self._failure
        if (failure := self._failure) is not None:
            raise OmnidraftError(
                f"the log below {self._mirror.name} must be writable, but writing failed: {failure!r}; what was "
                "committed before is whole. Free the disk, or let the object store answer again, then resume with "
                f"`omnidraft replay --resume {shlex.quote(self._mirror.name)}`"
            ) from failure


class _LogFiles:
    """The files of one log; used by the writer thread alone once the log is open."""

    def __init__(self, run_folder: Path, mirror: Mirror, kind: RunKind) -> None:
        self._run_folder, self._mirror, self._kind = run_folder, mirror, kind
        self.committed = 0  # commits done
        self.commit_seconds = self.all_commit_seconds = 0.0  # of the last commit, and of all
        try:
            manifest = self._begin()
            mirror.acquire(manifest)
        except OSError as error:
            raise RunError(
                f"{run_folder} must be a folder that can be written, got {error}; try another --run"
            ) from error
        self.parts = PartWriter(run_folder, manifest.tables)
        self._checkpoint = manifest.checkpoint
        self._number = int(manifest.checkpoint.folder.rpartition("/")[2]) if manifest.checkpoint else 0

    def _begin(self) -> Manifest:
        """Create a new log, or open the unfinished one and remove what was not committed."""
        if not has_manifest(self._run_folder):
            return create_log(self._run_folder, self._run_folder.resolve().name, self._kind)

        def reopen(manifest: Manifest) -> Manifest:
            if manifest.finished:
                raise RunError(
                    f"{self._run_folder} must not hold a log yet, but it does; name another folder with --run"
                )
            return replace(manifest, kind=self._kind)

        def clean(manifest: Manifest) -> Manifest:
            """Runs under the manifest's lock, so no compaction is amid an edit."""
            remove_uncommitted(self._run_folder, manifest)
            return manifest

        edit_manifest(self._run_folder, reopen)  # from here on the previous manifest names no other files
        return edit_manifest(self._run_folder, clean)

    def commit(self, commit: Commit, rejected_bytes: int) -> None:
        """Write the checkpoint, then name it and every part written so far in the manifest."""
        started = thread_time()
        checkpoint: Checkpoint | None = None
        if commit.files is not None:
            self._number += 1
            kept = commit.kept, self._checkpoint
            checkpoint = write_checkpoint(self._run_folder, self._number, commit.files(), *kept)
        if rejected_bytes:
            sync_file(self._run_folder / REJECTED)
            if checkpoint is None:  # writing one has synced the folder
                sync_folder(self._run_folder)
        fault_point("commit: before the manifest")
        written = self.parts.take()
        previous: Checkpoint | None = None

        def add_commit(manifest: Manifest) -> Manifest:
            nonlocal previous
            if manifest.finished:  # for example closed by a process that took this one for dead
                raise RunError(
                    f"the log of {self._run_folder} must be open to be written to, but it is finished; begin a new run"
                )
            previous = manifest.checkpoint
            tables = {table: (*manifest.tables[table], *written[table]) for table in TABLES}
            return replace(
                manifest,
                tables=MappingProxyType(tables),
                checkpoint=checkpoint,
                finished=commit.files is None,
                rejected_bytes=rejected_bytes,
            )

        manifest = edit_manifest(self._run_folder, add_commit)
        fault_point("commit: after the manifest")
        if manifest.finished:
            replace_previous(self._run_folder)  # which names a checkpoint that goes
        self._checkpoint = checkpoint
        self._mirror.push(manifest)
        commit.done()
        # That of the previous manifest stays, for resuming if the new one is damaged.
        remove_other_checkpoints(self._run_folder, checkpoint, previous if checkpoint else None)
        self.commit_seconds = thread_time() - started
        self.all_commit_seconds += self.commit_seconds
        self.committed += 1


def remove_uncommitted(run_folder: Path, manifest: Manifest) -> None:
    """Remove parts, checkpoints and rejected rows that no commit names, as a killed run leaves them.

    Parts that a compaction replaced have lower numbers than the newest committed part; they stay for readers until a
    compaction removes them.
    """
    folder = run_folder / MANIFEST.parent
    for table in manifest.tables:
        (folder / table).mkdir(exist_ok=True)
        newest = newest_number(manifest.tables, table)
        for path in (folder / table).glob("part-*.parquet"):
            if last_number(path.name) > newest:
                path.unlink()
        for path in (folder / table).glob(".part-*.tmp"):
            path.unlink()
        sync_folder(folder / table)
    remove_other_checkpoints(run_folder, manifest.checkpoint)
    rejected = run_folder / REJECTED
    if rejected.exists():
        if rejected.stat().st_size < manifest.rejected_bytes:
            raise CorruptError(
                f"{rejected} must have {manifest.rejected_bytes} bytes at least, as committed, but is shorter"
            )
        os.truncate(rejected, manifest.rejected_bytes)
