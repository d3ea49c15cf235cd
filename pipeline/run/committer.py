"""Commits of a run: when one is due, and the checkpoint that goes with it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from stages.contract.snapshot import Snapshot, State, read_snapshot
from store.log.checkpoint import read_checkpoint
from store.log.manifest import has_manifest, read_manifest
from store.log.run_log import Commit, RunLog

if TYPE_CHECKING:
    from torch import Tensor

# Of one core's time, at most, goes to commits: slow ones become rarer. One of SmolLM2 with `drafter-4m` takes .12 s, of
# which .05 on the run's own thread: with .06 it comes every 2 s, which is what a kill costs.
SHARE = 0.06
CREDIT = 1.0  # seconds more, so that a run's first commits come early
LONGEST_WAIT = 2.0  # a due commit waits for a running update until this many times the interval has passed


@dataclass(frozen=True)
class CommitCosts:
    """Cost of the commits of a run."""

    commits: int
    seconds: float  # on the run's own thread
    seconds_beside: float  # on the log's writer thread
    of: float  # seconds since the run began or was resumed


def last_snapshot(run_folder: Path) -> State | None:
    """Return the state in the checkpoint of a log's last commit; None before the first commit."""
    checkpoint = read_manifest(run_folder).checkpoint if has_manifest(run_folder) else None
    return read_snapshot(read_checkpoint(run_folder, checkpoint)) if checkpoint else None


class Committer:
    """Commits the run between two blocks: the log so far, and a checkpoint to resume from.

    A commit is due after some seconds, but only if the cost of all stays a small share of the run's time: a large
    drafter, whose weights take long to write, is committed less often. No decision depends on when commits are made.
    `seconds` is the interval; `learning` tells whether an update is being computed, which a snapshot would have to wait
    for; `committed` is called by the writer thread after each commit.
    """

    def __init__(
        self,
        seconds: float,
        save: Callable[[], State],
        learning: Callable[[], bool],
        log: RunLog,
        committed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._interval, self._save, self._learning, self._log = seconds, save, learning, log
        self._committed, self._clock = committed, clock
        self._began = clock()
        self._last: float | None = None
        self._last_cost = 0.0
        self._weights: Sequence[Tensor] = ()  # of the last checkpoint
        self._commits = 0
        self._seconds = 0.0

    @property
    def costs(self) -> CommitCosts:
        return CommitCosts(self._commits, self._seconds, self._log.all_commit_seconds, self._clock() - self._began)

    def is_due(self) -> bool:
        """Return whether a commit is due. Called between two blocks."""
        if self._log.committing:
            return False
        if self._last is None:
            return True
        now = self._clock()
        if now - self._last < (LONGEST_WAIT * self._interval if self._learning() else self._interval):
            return False
        spent, expected = self._seconds + self._log.all_commit_seconds, self._last_cost + self._log.commit_seconds
        return spent + expected <= CREDIT + SHARE * (now - self._began)

    def commit(self, *, wait: bool = False) -> None:
        """Commit now. The writer thread does most of the work; with `wait`, return when the commit is complete."""
        started = self._clock()
        snapshot = Snapshot(self._save(), self._weights)
        self._weights = snapshot.weights
        self._log.commit(Commit(snapshot.files, self._committed, snapshot.kept_files), wait=wait)
        self._last = self._clock()
        self._last_cost = self._last - started
        self._commits += 1
        self._seconds += self._last_cost
