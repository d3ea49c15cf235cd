"""Finds runs and holds snapshots of their logs, which are reopened after a run has committed more."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from time import time
from typing import TypeVar

from store.errors import CorruptError, OmnidraftError, QueryError, RunError, UsageError
from store.log.lock import is_being_written
from store.log.manifest import newest_manifest, part_path, read_manifest
from store.log.partitions import committed_at, log_folders, read_manifests
from store.query.log_reader import LogReader, run_folders

KEPT = 4  # open snapshots
MOST_RUNS = 8  # runs that a chart can show distinguishably
MOST_WAITING = 16  # queries that wait for their turn; each takes a thread that pages need, too
RECENT_SECONDS = 60.0  # a copy of a run has no lock: it counts as running for so long after a commit
TURN_TIMEOUT = 30.0  # seconds that a query waits for the one before it; some queries cannot be interrupted

Answer = TypeVar("Answer")


class BusyError(UsageError):
    """Raised when too many queries wait already."""


@dataclass(frozen=True)
class RunState:
    """State of a run in a list."""

    name: str  # of its folder
    prompts: int  # completed and committed
    activity: str  # `finished` if its whole stream is in the log, `running` while a process writes it, or `stopped`
    seconds: float  # since its last commit
    problem: str = ""  # error that prevents reading it


class Logs:
    """One run, or all in a folder of runs, with snapshots of their logs. Thread-safe; queries run one at a time."""

    def __init__(self, run: Path | None, runs: Path) -> None:
        self._run, self._runs = run, runs
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(MOST_WAITING + 1)  # one query runs
        self._open: OrderedDict[tuple[str, ...], tuple[str, LogReader]] = OrderedDict()

    def folders(self) -> dict[str, Path]:
        """Folders of runs by name, the newest commit first. Raises RunError if there are no runs."""
        found = [self._run.resolve()] if self._run else run_folders(self._runs)
        return {folder.name: folder for folder in sorted(found, key=committed_at, reverse=True)}

    def states(self, names: Sequence[str] = ()) -> list[RunState]:
        """States of the named runs, or of all, the newest commit first; empty if there are no runs."""
        try:
            found = self.folders()
        except RunError:
            return []
        return [_state(folder) for name, folder in found.items() if not names or name in names]

    def choose_runs(self, names: Sequence[str]) -> dict[str, Path]:
        """Folders of the named runs, each once; without names the newest run with a completed prompt."""
        folders = self.folders()
        wanted = list(dict.fromkeys(names)) or default_runs(self.states())
        if unknown := [name for name in wanted if name not in folders]:
            raise UsageError(f"a run must be one of {', '.join(folders)}; got {', '.join(unknown)}")
        if len(wanted) > MOST_RUNS:
            raise UsageError(f"at most {MOST_RUNS} runs can be shown at once, got {len(wanted)}; choose fewer")
        return {name: folders[name] for name in wanted}

    def stamp(self, names: Sequence[str]) -> str:
        """A string that changes with each commit of the named runs, and when a committed part is changed.

        Raises RunError if a manifest is gone.
        """
        try:
            return "|".join(
                f"{log.relative_to(folder.parent)}:{_stamp_log(log)}"
                for folder in self.choose_runs(names).values()
                for log in log_folders(folder)
            )
        except OSError as error:
            raise RunError(
                f"{error.filename} must be the manifest of a run: {error.strerror}; reload the page"
            ) from error

    def read(self, names: Sequence[str], question: Callable[[LogReader], Answer]) -> Answer:
        """Result of `question` on a snapshot of the last commits of the named runs.

        If compaction replaces parts during the query, it runs once more on a new snapshot. Raises `BusyError` if
        `MOST_WAITING` queries wait already, and `UsageError` if an earlier query did not end within `TURN_TIMEOUT`.
        """
        with self._turn():
            stamp = self.stamp(names)
            try:
                return question(self._reader(names, stamp))
            except (CorruptError, QueryError):
                if (now := self.stamp(names)) == stamp:
                    raise
                return question(self._reader(names, now))

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1][1].close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._places.acquire(blocking=False):
            raise BusyError(f"{MOST_WAITING} queries wait already; try again when one is done")
        try:
            if not self._lock.acquire(timeout=TURN_TIMEOUT):
                raise UsageError("another query is still running; wait, or restart the dashboards")
            try:
                yield
            finally:
                self._lock.release()
        finally:
            self._places.release()

    def _reader(self, names: Sequence[str], stamp: str) -> LogReader:
        chosen = self.choose_runs(names)
        key = tuple(chosen)
        kept = self._open.pop(key, None)
        if kept and kept[0] != stamp:
            kept[1].close()
            kept = None
        reader = kept[1] if kept else LogReader(list(chosen.values()))
        self._open[key] = stamp, reader
        while len(self._open) > KEPT:
            self._open.popitem(last=False)[1][1].close()
        return reader


def _stamp_log(folder: Path) -> str:
    stat = newest_manifest(folder).stat()
    stamp = f"{stat.st_ino}:{stat.st_mtime_ns}:{stat.st_size}"
    return f"{stamp}:{hash(tuple(map(_stamp_part, _list_parts(folder, stamp))))}"


@lru_cache(maxsize=256)
def _list_parts(folder: Path, stamp: str) -> list[Path]:
    """The files of a log whose manifest has this stamp; none if it cannot be read, which the reader then says."""
    with suppress(OmnidraftError):
        return [part_path(folder, part) for parts in read_manifest(folder).tables.values() for part in parts]
    return []


def _stamp_part(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        stat = path.stat()
        return stat.st_size, stat.st_mtime_ns
    return None


def _state(folder: Path) -> RunState:
    seconds = max(0.0, time() - committed_at(folder))
    try:
        manifests = read_manifests(folder)
    except OmnidraftError as error:
        return RunState(folder.name, 0, "stopped", seconds, str(error))
    prompts = sum(part.rows for manifest in manifests.values() for part in manifest.tables["prompts"])
    written = is_being_written(folder)
    running = seconds < RECENT_SECONDS if written is None else written
    activity = "finished" if manifests[folder].finished else "running" if running else "stopped"
    return RunState(folder.name, prompts, activity, seconds)


def default_runs(states: Sequence[RunState]) -> list[str]:
    """Name of the run to show if none is named: the newest one with a completed prompt. None without runs."""
    with_prompts = [state.name for state in states if state.prompts]
    return (with_prompts or [state.name for state in states])[:1]
