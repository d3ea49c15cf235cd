"""Everything that a process opens on a run's folder, in one order for every kind of run:

    lock -> folder -> checkpoint -> (models) -> log -> MLflow -> committer -> events

A run in several processes has one context for its own log and one for each partition.
"""

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.config.settings import Config
from pipeline.recorder import without_text
from pipeline.run.committer import Committer, last_snapshot
from pipeline.run.folder import CONFIG, is_unfinished, require_new
from pipeline.run.mlflow_run import describe_run
from stages.contract.snapshot import State
from store.errors import RunError
from store.events import BlockDone, Event, PromptCompleted, PromptRejected, TokenDecision
from store.files import write_whole
from store.log.lock import RunLock
from store.log.manifest import RunKind, has_manifest, read_manifest
from store.log.partitions import PARTITIONS
from store.log.run_log import Mirror, RunLog
from store.registry.notifier import Notifier

# By kind of run: its name in messages, and the command that resumes it.
_RESUMED_BY = {
    RunKind.REPLAY: ("a replay", "omnidraft replay --resume {name}"),
    RunKind.CLUSTER: ("a replay that was begun with --ray", "omnidraft replay --resume {name} --ray local"),
    RunKind.SERVE: ("the run of a server", "omnidraft serve --resume {name}"),
    RunKind.ENGINE: ("the run of a vLLM server", "OMNIDRAFT_VLLM_RUN={name} vllm serve ..."),
}


class EventSink:
    """Receives every event of a run, in order. Used by one thread.

    Args:
        text: whether the log may quote rejected source rows.
        whole: whether the log receives the events of a prompt's blocks only when it is completed. So it holds whole
            prompts only, whenever it is committed: if sequences in flight are not in the checkpoint, such a prompt is
            decoded again after a resume, and nothing of its first attempt is in the log.
    """

    def __init__(
        self,
        log: RunLog,
        show: Callable[[Event], None] = lambda event: None,
        *,
        text: bool = True,
        whole: bool = False,
    ) -> None:
        self._log, self._show, self._text, self._whole = log, show, text, whole
        self._held: dict[int, list[Event]] = defaultdict(list)  # by offset, of prompts in flight
        self.dirty = False  # whether anything was logged since the caller set it to False

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, PromptRejected) and not self._text:
                event = without_text(event)
            if self._whole and isinstance(event, TokenDecision | BlockDone):
                self._held[event.offset].append(event)
            else:
                held = self._held.pop(event.offset, []) if isinstance(event, PromptCompleted) else []
                for due in (*held, event):
                    self._log.append(due)
                self.dirty = True
            self._show(event)

    def close(self) -> None:
        """Close the log at its last commit; later events are discarded."""
        self._log.close()


class RunContext:
    """The resources that a process holds on a run."""

    # log, committer, events: available after `open` and `commit_by`
    log: RunLog
    committer: Committer
    events: EventSink

    def __init__(self, folder: Path, kind: RunKind, mirror: Mirror | None = None) -> None:
        self.folder, self.kind, self.mirror = folder, kind, mirror or Mirror(folder)
        self.name = self.mirror.name  # the run's name on a command line
        self.snapshot: State | None = None  # state of the last commit, until the run is resumed from it
        self._notifier: Notifier | None = None
        self._lock, self._resume = RunLock(folder), False

    @contextmanager
    def acquire(self, *, resume: bool) -> Iterator[None]:
        """Hold the run while models are loaded: a run to resume is locked and its checkpoint read; of a new run nothing
        is written yet.
        """
        self._resume = resume
        try:
            if is_unfinished(self.folder):
                self._lock.take()  # before anything is read; the error names the process that holds it
            if resume:
                self.snapshot = last_snapshot(self.folder)
                self._require_kind()
            else:
                require_new(self.folder, self.name)
            yield
        except BaseException:
            self._lock.release()
            raise

    def _require_kind(self) -> None:
        found = read_manifest(self.folder).kind if has_manifest(self.folder) else None
        if found is RunKind.TRAINING:
            raise RunError(f"{self.name} holds a training, which cannot be resumed; begin it again: omnidraft train")
        if found not in (None, self.kind):
            what, command = _RESUMED_BY[found]
            raise RunError(f"{self.name} holds {what}; resume it with `{command.format(name=shlex.quote(self.name))}`")

    @contextmanager
    def open(self, settings: str | None = None) -> Iterator[None]:
        """Hold the lock and an open log. On exit a log that is still open is closed at its last commit. The settings,
        as JSON, are written to the run's folder; None for a partition, which has none of its own.
        """
        with self._lock:
            if settings is None:
                self.mirror.pull()
            else:
                if not self._resume:
                    require_new(self.folder, self.name)  # again: another process may have created it since
                write_whole(self.folder / CONFIG, settings.encode())
            self.log = RunLog(self.folder, mirror=self.mirror, kind=self.kind)
            try:
                if settings is None:
                    self.snapshot = last_snapshot(self.folder)
                yield
            finally:
                self.log.close()

    def connect(self, config: Config, uri: str, datasets: Sequence[tuple[str, str]]) -> None:
        """Send versions and curves to MLflow after each commit from now on, unless nothing is published."""
        if config.publish.enabled:
            run_folder = self.folder.parents[1] if self.folder.parent.name == PARTITIONS else self.folder
            describe_run(config, run_folder, datasets, read_manifest(self.folder))
            name = self.name if run_folder == self.folder else str(run_folder)
            self._notifier = Notifier(run_folder, self.folder, uri, name)

    def commit_by(
        self,
        seconds: float,
        save: Callable[[], State],
        show: Callable[[Event], None] = lambda event: None,
        learning: Callable[[], bool] = lambda: False,
        *,
        text: bool,
        rows: bool = False,
    ) -> None:
        """Make the committer and the event sink.

        Args:
            seconds, save, learning: as of `Committer`.
            show: called with every event.
            text: whether text may be logged.
            rows: whether the state has sequences in flight; without them the log holds whole prompts only.
        """
        self.committer = Committer(seconds, save, learning, self.log, self._notify)
        self.events = EventSink(self.log, show, text=text, whole=not rows)

    def commit(self, *, wait: bool = False) -> None:
        self.committer.commit(wait=wait)

    def finish(self) -> None:
        """Finish the log. A run that is killed in this method resumes from its last commit and calls it again."""
        self.log.finish(self._notify)

    def disconnect(self, timeout: float) -> bool:
        """Close the log after its last commit, and wait until MLflow has it. Returns whether it does, after at most
        `timeout` seconds.
        """
        self.log.close()
        return self._notifier is None or self._notifier.close(timeout)

    def _notify(self) -> None:
        if self._notifier:
            self._notifier.notify()
