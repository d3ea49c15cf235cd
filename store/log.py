"""The run's log: events in, Parquet parts out, made to count by one atomic commit together with a checkpoint.

The thread that runs the models only appends to lists. A writer thread turns full lists into parts and commits: it
writes the checkpoint's files, then replaces the manifest (see store/manifest.py) that names both. Every file is written
under a temporary name, synced and renamed, so that a crash leaves either the old state or the new one. A run that goes
on first removes what no commit names.

    RUN/rejected.jsonl      source rows that could not become prompts, one JSON object per line
"""

import json
import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import MappingProxyType, TracebackType
from typing import Self

from store import faults
from store.checkpoint import remove_others, write_checkpoint
from store.errors import CorruptError, OmnidraftError, RunError
from store.events import Event, PromptReceived, PromptRejected
from store.files import sync_file, sync_folder, write_whole
from store.manifest import MANIFEST, Checkpoint, Manifest, edit_manifest, require_open
from store.object_store_mirror import Mirror, NoMirror
from store.parts import PartWriter, last_number, newest_number
from store.schema import TABLES, LoggedEvent

REJECTED = "rejected.jsonl"

_TABLE_OF: Mapping[type, str] = MappingProxyType({event: table for table, event in TABLES.items()})


@dataclass(frozen=True)
class Commit:
    """What makes the events appended so far count.

    Attributes:
        files: makes the files of the checkpoint that covers them, by name; called by the writer thread. None at the
            end of the stream.
        messages: to the registry, of those that were posted.
        done: called by the writer thread once the commit stands.
    """

    files: Callable[[], Mapping[str, bytes]] | None
    messages: int = 0
    done: Callable[[], None] = lambda: None


class RunLog:
    """Keeps the events of one run. One thread appends and commits.

    A context manager: leaving it is the end of the stream, unless it was closed before or an exception leaves it.

    Where the folder holds an unfinished log already, it goes on behind its last commit and forgets what came after.

    `part_rows`: rows of a table that make a part. `queue_parts`: full parts that may wait for the disk; when
    there are more, `append` waits too, so that memory stays bounded. `mirror`: copies every commit before it is done.

    Raises `RunError` when the folder holds a finished log or cannot be written. A failure of the writer thread is
    raised as `OmnidraftError` by every later `append`, `commit` and `finish`; what was committed before it stays good.
    """

    def __init__(
        self, run_folder: Path, part_rows: int = 50_000, queue_parts: int = 4, mirror: Mirror | None = None
    ) -> None:
        self._folder, self._mirror = run_folder, mirror or NoMirror(run_folder)
        self._files = _Files(run_folder, self._mirror)
        self._part_rows = part_rows
        self._pending: dict[type, list[LoggedEvent]] = {event: [] for event in TABLES.values()}
        self._failure: BaseException | None = None
        self._closed, self._asked = False, 0  # commits handed to the writer thread
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(maxsize=queue_parts)
        self._writer = threading.Thread(target=self._work, name="log-writer", daemon=True)
        self._writer.start()

    @property
    def commit_seconds(self) -> float:
        """What the last commit took the writer thread."""
        return self._files.commit_seconds

    @property
    def all_commit_seconds(self) -> float:
        """What all commits took the writer thread."""
        return self._files.all_commit_seconds

    @property
    def committing(self) -> bool:
        """Whether a commit is still being written."""
        return self._files.committed < self._asked

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

    def commit(self, commit: Commit, *, wait: bool = False) -> None:
        """Make everything appended so far count, with the checkpoint that covers it.

        The writer thread does it. With `wait` readers see the rows when it returns.
        """
        self._require_working()
        for kind in self._pending:
            self._hand_over(kind)
        self._asked += 1
        self._jobs.put(partial(self._files.commit, commit, self._rejected_bytes()))
        if wait:
            self._jobs.join()
            self._raise_failure()

    def finish(self, messages: int = 0, done: Callable[[], None] = lambda: None) -> None:
        """The stream is at its end: commit everything, drop the checkpoint, and take no more."""
        try:
            self.commit(Commit(None, messages, done), wait=True)
        finally:
            self.close()

    def close(self) -> None:
        """Stop the writer thread. What was appended since the last commit never happened. May be called again."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._writer.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._closed:
            self.finish()
        self.close()

    def _append_without_table(self, event: Event) -> None:
        if isinstance(event, PromptRejected):
            with open(self._folder / REJECTED, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(event), ensure_ascii=False) + "\n")
        elif not isinstance(event, PromptReceived):
            raise TypeError(f"the log keeps the events of store/events.py, got {type(event).__name__}")

    def _rejected_bytes(self) -> int:
        path = self._folder / REJECTED
        return path.stat().st_size if path.exists() else 0

    def _hand_over(self, kind: type) -> None:
        """Queue the pending rows of one table; waits while the queue is full, which is what bounds the memory."""
        if rows := self._pending[kind]:
            self._jobs.put(partial(self._files.write, _TABLE_OF[kind], rows))
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
                "committed before is whole. Free the disk, or let the object store answer again, then go on with "
                f"`omnidraft replay --resume {self._mirror.name}`"
            ) from failure


class _Files:
    """The files of one log; used by the writer thread alone once the log is open.

    Attributes:
        committed: commits that stand.
        commit_seconds, all_commit_seconds: of the last one, and of all.
    """

    def __init__(self, run_folder: Path, mirror: Mirror) -> None:
        self._run_folder, self._mirror = run_folder, mirror
        self.committed = 0
        self.commit_seconds = self.all_commit_seconds = 0.0
        try:
            manifest = self._begin()
            mirror.claim(manifest)
        except OSError as error:
            raise RunError(
                f"{run_folder} must be a folder that can be written, got {error}; try another --run"
            ) from error
        self._parts = PartWriter(run_folder, manifest.tables)
        self._number = int(manifest.checkpoint.folder.rpartition("/")[2]) if manifest.checkpoint else 0

    def _begin(self) -> Manifest:
        """A new log, or the unfinished one that is there without what was not committed."""
        if not (self._run_folder / MANIFEST).exists():
            for table in TABLES:
                (self._run_folder / MANIFEST.parent / table).mkdir(parents=True, exist_ok=True)
            manifest = Manifest.empty(self._run_folder.resolve().name)
            write_whole(self._run_folder / MANIFEST, manifest.to_json())
            for folder in (self._run_folder, self._run_folder.resolve().parent):
                sync_folder(folder)
            return manifest
        return edit_manifest(self._run_folder, self._without_uncommitted)

    def _without_uncommitted(self, manifest: Manifest) -> Manifest:
        """Under the manifest's lock: what a compaction has just written is named, or not there yet."""
        if manifest.finished:
            raise RunError(f"{self._run_folder} must not hold a log yet, but it does; name another folder with --run")
        forget_uncommitted(self._run_folder, manifest)
        return manifest

    def write(self, table: str, rows: list[LoggedEvent]) -> None:
        """One part; nobody sees it before the commit."""
        self._parts.write(table, rows)

    def commit(self, commit: Commit, rejected_bytes: int) -> None:
        """Write the checkpoint, then name it and every part written so far in the manifest."""
        started = perf_counter()
        checkpoint: Checkpoint | None = None
        if commit.files is not None:
            self._number += 1
            checkpoint = write_checkpoint(self._run_folder, self._number, commit.files())
        if rejected_bytes:
            sync_file(self._run_folder / REJECTED)
        faults.reach("commit: before the manifest")
        written = self._parts.take()

        def extended(manifest: Manifest) -> Manifest:
            require_open(self._run_folder, manifest)
            tables = {table: (*manifest.tables[table], *written[table]) for table in TABLES}
            return replace(
                manifest,
                tables=MappingProxyType(tables),
                checkpoint=checkpoint,
                finished=commit.files is None,
                messages=commit.messages,
                rejected_bytes=rejected_bytes,
            )

        manifest = edit_manifest(self._run_folder, extended)
        faults.reach("commit: after the manifest")
        self._mirror.push(manifest)
        commit.done()
        remove_others(self._run_folder, checkpoint)
        self.commit_seconds = perf_counter() - started
        self.all_commit_seconds += self.commit_seconds
        self.committed += 1


def forget_uncommitted(run_folder: Path, manifest: Manifest) -> None:
    """Remove parts, checkpoints and rejected rows that no commit names: what a killed run left behind.

    Parts that a compaction replaced are older than some that are named; they stay for readers, until a compaction
    removes them.

    Raises:
        CorruptError: the file of rejected rows is shorter than what was committed of it.
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
    remove_others(run_folder, manifest.checkpoint)
    rejected = run_folder / REJECTED
    if rejected.exists():
        if rejected.stat().st_size < manifest.rejected_bytes:
            raise CorruptError(
                f"{rejected} must have {manifest.rejected_bytes} bytes at least, as committed, but is shorter"
            )
        os.truncate(rejected, manifest.rejected_bytes)
