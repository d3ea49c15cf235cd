"""Which runs there are, and snapshots of their logs that are opened again when a run has committed more."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import TypeVar

from store.errors import CorruptError, OmnidraftError, QueryError, RunError, UsageError
from store.manifest import MANIFEST
from store.partitions import committed_at, log_folders, read_manifests
from store.queries import LogReader, run_folders

KEPT = 4  # snapshots that stay open
MOST_RUNS = 8  # as many as can be told apart
PATIENCE = 30.0  # seconds that a question waits for the one before it; some queries cannot be interrupted

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class RunState:
    """What a list of runs says about one.

    Attributes:
        name: of its folder.
        prompts: completed and committed.
        finished: its whole stream is in the log.
        seconds: since its last commit.
        problem: why it cannot be read; empty for one that can.
    """

    name: str
    prompts: int
    finished: bool
    seconds: float
    problem: str = ""


class Logs:
    """The runs of one folder, or one run. Several threads may use it; they wait for one another.

    Args:
        run: one run's folder.
        runs: a folder of runs, when there is no `run`.
    """

    def __init__(self, run: Path | None, runs: Path) -> None:
        self._run, self._runs = run, runs
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, ...], tuple[str, LogReader]] = OrderedDict()

    def folders(self) -> dict[str, Path]:
        """Runs by name, the last to commit first. Raises `RunError` where there are none."""
        found = [self._run.resolve()] if self._run else run_folders(self._runs)
        return {folder.name: folder for folder in sorted(found, key=committed_at, reverse=True)}

    def states(self, names: Sequence[str] = ()) -> list[RunState]:
        """The named runs, or all, the last to commit first; none where the folder has none yet."""
        try:
            found = self.folders()
        except RunError:
            return []
        return [_state(folder) for name, folder in found.items() if not names or name in names]

    def chosen(self, names: Sequence[str]) -> dict[str, Path]:
        """The named runs, each once; without names the last to commit.

        Raises:
            RunError: there are no runs.
            UsageError: a name is none of them, or there are too many.
        """
        folders = self.folders()
        wanted = list(dict.fromkeys(names)) or list(folders)[:1]
        if unknown := [name for name in wanted if name not in folders]:
            raise UsageError(f"a run must be one of {', '.join(folders)}; got {', '.join(unknown)}")
        if len(wanted) > MOST_RUNS:
            raise UsageError(f"at most {MOST_RUNS} runs can be shown at once, got {len(wanted)}; choose fewer")
        return {name: folders[name] for name in wanted}

    def stamp(self, names: Sequence[str]) -> str:
        """Another text after each commit of one of the named runs. Raises `RunError` for one that is gone."""
        try:
            stats = [
                (log.relative_to(folder.parent), (log / MANIFEST).stat())
                for folder in self.chosen(names).values()
                for log in log_folders(folder)
            ]
        except OSError as error:
            raise RunError(
                f"{error.filename} must be the manifest of a run: {error.strerror}; reload the page"
            ) from error
        return "|".join(f"{name}:{stat.st_ino}:{stat.st_mtime_ns}:{stat.st_size}" for name, stat in stats)

    def read(self, names: Sequence[str], question: Callable[[LogReader], Answer]) -> Answer:
        """What `question` finds in the named runs as they are committed now.

        Parts that a snapshot reads may be replaced by larger ones meanwhile; then it is asked once more.
        Raises `UsageError` when another question is not answered within `PATIENCE`.
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
        """Free all snapshots."""
        with self._lock:
            while self._open:
                self._open.popitem()[1][1].close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=PATIENCE):
            raise UsageError("another question is still being answered; wait, or start the dashboards again")
        try:
            yield
        finally:
            self._lock.release()

    def _reader(self, names: Sequence[str], stamp: str) -> LogReader:
        chosen = self.chosen(names)
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


def _state(folder: Path) -> RunState:
    seconds = max(0.0, time() - committed_at(folder))
    try:
        manifests = read_manifests(folder)
    except OmnidraftError as error:
        return RunState(folder.name, 0, True, seconds, str(error))
    prompts = sum(part.rows for manifest in manifests.values() for part in manifest.tables["prompts"])
    return RunState(folder.name, prompts, manifests[folder].finished, seconds)
