"""When a run commits, and what goes into the checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from pipeline.config_sections import CommitSettings
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from store.checkpoint import read_checkpoint
from store.log import Commit, RunLog
from store.manifest import MANIFEST, read_manifest
from store.registry import Registry

PATIENCE = 2.0  # a commit that is due waits for an update under way until this many times its distance


@dataclass(frozen=True)
class CommitCosts:
    """What committing took.

    Attributes:
        seconds: of the run's own thread.
        seconds_beside: of the log's writer thread.
        of: seconds since the run began or went on.
    """

    commits: int
    seconds: float
    seconds_beside: float
    of: float


def last_snapshot(run_folder: Path) -> SnapshotReader | None:
    """What a log's last commit saved; None before the first. Raises as `read_manifest` and `read_checkpoint`."""
    checkpoint = read_manifest(run_folder).checkpoint if (run_folder / MANIFEST).exists() else None
    return SnapshotReader(read_checkpoint(run_folder, checkpoint)) if checkpoint else None


class Committer:
    """Commits the run between two blocks: the log so far, with all that is needed to go on from there.

    A commit is due after so many prompts or seconds, and not before the last one has become a small share of the time:
    so a large drafter, whose weights take long to write, is committed less often. Nothing that is decided depends on
    when commits are made.

    Args:
        settings: how often.
        save: takes the snapshot.
        learning: whether something is being computed beside decoding, which a snapshot would have to wait for.
        log: what is made to count.
        registry: its messages count with the commit.
        clock: monotonic seconds.
        rows: whether rows in flight are kept, so that they go on after a resume.
    """

    def __init__(
        self,
        settings: CommitSettings,
        save: Callable[[SnapshotWriter], Json],
        learning: Callable[[], bool],
        log: RunLog,
        registry: Registry,
        clock: Callable[[], float] = perf_counter,
        *,
        rows: bool = True,
    ) -> None:
        self._settings, self._save, self._learning, self._log = settings, save, learning, log
        self._registry, self._clock, self._rows = registry, clock, rows
        self._began = clock()
        self._last: float | None = None
        self._last_cost = 0.0
        self._prompts = self._commits = 0
        self._seconds = 0.0

    @property
    def costs(self) -> CommitCosts:
        """Of all commits so far."""
        return CommitCosts(self._commits, self._seconds, self._log.all_commit_seconds, self._clock() - self._began)

    def completed(self) -> None:
        """One more prompt."""
        self._prompts += 1

    def is_due(self) -> bool:
        """Whether it is time to commit. Asked between two blocks."""
        if self._log.committing:
            return False
        if self._last is None:
            return True
        settings, passed = self._settings, self._clock() - self._last
        affordable = (self._last_cost + self._log.commit_seconds) / settings.share
        if passed < affordable or (passed < settings.seconds and self._prompts < settings.prompts):
            return False
        return not self._learning() or passed >= PATIENCE * max(settings.seconds, affordable)

    def commit(self, *, wait: bool = False) -> None:
        """Commit now. The writer thread does most of it; with `wait` it stands when this returns.

        Raises:
            OmnidraftError: the log cannot be written.
        """
        started = self._clock()
        keep = SnapshotWriter(rows=self._rows)
        state = self._save(keep)
        mark = self._registry.mark()
        self._log.commit(Commit(lambda: keep.files(state), mark, lambda: self._registry.release(mark)), wait=wait)
        self._last, self._prompts = self._clock(), 0
        self._last_cost = self._last - started
        self._commits += 1
        self._seconds += self._last_cost
