"""Distributes the prompts of a run among several workers and collects their reports."""

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from logging import LogRecord
from operator import attrgetter
from pathlib import Path
from time import monotonic

from pipeline.cluster.learner import LearnerReport
from pipeline.cluster.worker import TargetInfo, WorkerReport
from pipeline.cluster.worker_pool import ActorLost, Message, WorkerPool, WorkerReady, WorkerState, WorkReported
from pipeline.learner_service.service import LearnerConfig
from pipeline.reports.progress import Display
from pipeline.run.context import EventSink
from pipeline.sources.position import Prefetcher, SourcePosition
from store.errors import RunError
from store.events import PromptReceived, PromptRejected
from store.log.partitions import LEARNER, close_partition, create_worker_partition, partition_folder
from store.log.parts import completed_prompts
from store.log_records import handle_record

LOG = logging.getLogger("omnidraft.cluster")

WAIT = 0.5  # longest wait for a message, in seconds
IDLE_SECONDS = 2.0  # after which an idle worker is called to commit
HALT_SECONDS = 20.0  # workers have this long to commit when the run is stopped
MAX_CRASHES = 20  # of workers in a row, with no prompt completed between them


class Assignments:
    """The prompts that were read from the sources and are not yet committed, by the worker that holds them."""

    def __init__(self) -> None:
        self._waiting: deque[PromptReceived] = deque()
        self._by_worker: dict[str, dict[int, PromptReceived]] = defaultdict(dict)  # by worker and offset
        self._completed: dict[str, set[int]] = defaultdict(set)  # of those, what is decoded but not committed

    def add_prompt(self, prompt: PromptReceived) -> None:
        self._waiting.append(prompt)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def assign(self, worker: str, limit: int) -> list[PromptReceived]:
        """Give a worker at most `limit` of the waiting prompts, oldest first."""
        given = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        self._by_worker[worker].update((prompt.offset, prompt) for prompt in given)
        return given

    def count_undecoded(self, worker: str) -> int:
        return len(self._by_worker[worker]) - len(self._completed[worker])

    def has_uncommitted(self, worker: str) -> bool:
        return bool(self._by_worker[worker])

    def mark_completed(self, worker: str, offsets: Iterable[int]) -> None:
        self._completed[worker].update(offsets)

    def mark_committed(self, worker: str, offsets: Iterable[int]) -> None:
        """Drop prompts that are committed in a worker's log or were refused."""
        for offset in offsets:
            self._by_worker[worker].pop(offset, None)
            self._completed[worker].discard(offset)

    def release_worker(self, worker: str, committed: Collection[int]) -> int:
        """Requeue the prompts of a lost worker that its log does not hold. Returns their number."""
        held = self._by_worker.pop(worker, {})
        self._completed.pop(worker, None)
        requeued = [prompt for offset, prompt in held.items() if offset not in committed]
        self._waiting = deque(sorted([*requeued, *self._waiting], key=attrgetter("offset")))
        return len(requeued)

    @property
    def undecoded(self) -> int:
        """Number of prompts that wait or are held and not decoded."""
        return len(self._waiting) + sum(map(self.count_undecoded, list(self._by_worker)))

    @property
    def offsets(self) -> list[int]:
        """Offsets of all prompts that are not committed, in stream order."""
        held = [offset for prompts in self._by_worker.values() for offset in prompts]
        return sorted([prompt.offset for prompt in self._waiting] + held)


class Dispatcher:
    """Gives prompts to workers, completed prompts to the learner, and events to the display. Used by one thread.

    Args:
        batch: prompts that a worker decodes at the same time.
        assignments: prompts to decode before any new one.
        done: offsets in the logs of earlier workers.
        events: takes and shows the source rows that are no prompts; `display` shows all other events.
        model_fingerprints: of the models that every worker must have; None before the first worker is ready.
    """

    def __init__(
        self,
        pool: WorkerPool,
        run_folder: Path,
        batch: int,
        assignments: Assignments,
        done: set[int],
        position: SourcePosition,
        events: EventSink,
        make_learner_config: Callable[[TargetInfo], LearnerConfig],
        display: Display,
        model_fingerprints: tuple[str, str, str] | None,
    ) -> None:
        self.pool, self.model_fingerprints = pool, model_fingerprints
        self._run_folder, self._batch, self._assignments, self._done = run_folder, batch, assignments, done
        self._work_item_size = 2 * batch
        self._position, self._events, self._display = position, events, display
        self._make_learner_config = make_learner_config
        self._draining: set[str] = set()
        self._shown: set[int] = set()  # completed prompts that are not in a log yet and may be decoded again
        self._info_worker: str | None = None  # the worker that describes the target for the learner
        self._crashes = 0

    def run(
        self,
        events: Prefetcher[PromptReceived | PromptRejected],
        count_wanted_workers: Callable[[], int],
        should_pause: Callable[[], bool],
    ) -> None:
        """Decode the rest of the stream. When it returns at its end, all workers have committed and ended.
        `should_pause` is called at least every `WAIT` seconds; if it returns true, the stream is left as it is. Raises
        `SourceError` if a source broke off, and `RunError` if too many workers crash in a row or have different models.
        """
        while not should_pause():
            self._read_prompts(events)
            over = events.ended and not self._assignments.undecoded
            wanted = 0 if over and self.pool.has_learner else count_wanted_workers()
            staying = [worker for worker in self.pool.workers if worker not in self._draining]
            self._draining.update(staying[wanted:])
            for _ in range(len(staying), wanted):
                self.pool.add(create_worker_partition(self._run_folder))
            for worker in self.pool.workers:
                self._feed_worker(worker)
            if over and not self.pool.workers and not self.pool.is_learning:
                return
            for message in self.pool.wait(WAIT):
                self._handle_message(message)

    def halt(self) -> None:
        """Stop the stream: every worker commits its completed prompts and ends."""
        end = monotonic() + HALT_SECONDS
        for worker in self.pool.workers:
            if self.pool.get_state(worker) is WorkerState.READY:
                self.pool.drain(worker)
            else:
                self._remove_worker(worker)
        while self.pool.workers and monotonic() < end:
            for message in self.pool.wait(WAIT):
                self._handle_message(message)
        for worker in self.pool.workers:
            self._remove_worker(worker)

    def _read_prompts(self, events: Prefetcher[PromptReceived | PromptRejected]) -> None:
        while self._assignments.waiting < self._work_item_size * (len(self.pool.workers) + 1):
            event = events.take()
            if event is None:
                return
            self._position.count(event)
            if isinstance(event, PromptRejected):
                self._events.take([event])
            elif event.offset not in self._done:
                self._assignments.add_prompt(event)

    def _feed_worker(self, worker: str) -> None:
        """Keep a worker busy, or drain it if it is to end."""
        draining = worker in self._draining
        if draining and self.pool.get_state(worker) is WorkerState.STARTING:
            self._remove_worker(worker)
            return
        while self.pool.accepts_work(worker):
            prompts = [] if draining else self._assignments.assign(worker, self._size_work_item(worker))
            if draining and not self._assignments.count_undecoded(worker):
                self.pool.drain(worker)
                return
            if not prompts and not self._has_unfinished_work(worker):
                return
            self.pool.submit(worker, prompts, more=not draining and self._assignments.waiting > 0)

    def _size_work_item(self, worker: str) -> int:
        """Return how many prompts to give a worker: enough until its next call, fewer when few are left for all."""
        staying = len(self.pool.workers) - len(self._draining)
        fair = -(-self._assignments.waiting // (2 * staying))
        most = self._batch + 2 * self._work_item_size - self._assignments.count_undecoded(worker)
        return max(0, min(self._work_item_size, fair, most))

    def _has_unfinished_work(self, worker: str) -> bool:
        """Whether a worker without new prompts still has prompts to decode or to commit."""
        since = self.pool.idle_since(worker)
        if since is None:
            return False
        return bool(self._assignments.count_undecoded(worker)) or (
            self._assignments.has_uncommitted(worker) and monotonic() - since > IDLE_SECONDS
        )

    def _handle_message(self, message: Message) -> None:
        match message:
            case WorkerReady():
                self._on_worker_ready(message)
            case TargetInfo():
                self.pool.start_learner(self._make_learner_config(message))
            case WorkReported():
                _log_records(message.report.records, message.worker)
                self._on_report(message.worker, message.report)
                if message.final:
                    self._remove_worker(message.worker)
            case ActorLost(name=name) if name == LEARNER:
                LOG.warning("the learner is lost (%s); it restarts from its last commit", message.reason)
            case ActorLost():
                self._on_worker_lost(message)
            case LearnerReport():
                _log_records(message.records, LEARNER)
                for event in message.events:
                    self._display.show(event)

    def _on_worker_ready(self, ready: WorkerReady) -> None:
        if self.model_fingerprints is None:
            self.model_fingerprints = ready.model_fingerprints
        if ready.model_fingerprints != self.model_fingerprints:
            raise RunError(
                f"every worker must have the models that the run began with, but {ready.worker} loaded other weights "
                "or another vocabulary under the same names; put the same files on every machine"
            )
        if self._info_worker is None:
            self._info_worker = ready.worker
            self.pool.request_target_info(ready.worker)

    def _on_report(self, worker: str, report: WorkerReport) -> None:
        self.pool.share_memory(worker, report.memory)
        self._assignments.mark_completed(worker, (prompt.offset for prompt in report.completed))
        self._assignments.mark_committed(worker, [*report.committed, *(offset for offset, _ in report.refused)])
        self._shown.difference_update(report.committed)
        self._events.take(refused for _, refused in report.refused)
        committed = set(report.committed)
        for prompt in report.completed:
            if prompt.offset not in self._shown:
                self._display.show(prompt)
            if prompt.offset not in committed:
                self._shown.add(prompt.offset)
        if report.completed:
            self._crashes = 0

    def _on_worker_lost(self, lost: ActorLost) -> None:
        self._crashes += 1
        if self._crashes >= MAX_CRASHES:
            raise RunError(
                f"workers crashed {MAX_CRASHES} times in a row without completing a prompt; "
                f"their last error was: {lost.reason}"
            )
        if self._info_worker == lost.name and not self.pool.has_learner:
            self._info_worker = None
        requeued = self._release_worker(lost.name)
        LOG.warning("%s is lost (%s); %d of its prompts are decoded again", lost.name, lost.reason, requeued)

    def _remove_worker(self, worker: str) -> None:
        self.pool.remove(worker)
        self._release_worker(worker)

    def _release_worker(self, worker: str) -> int:
        folder = partition_folder(self._run_folder, worker)
        close_partition(folder)
        self._draining.discard(worker)
        return self._assignments.release_worker(worker, {prompt.offset for prompt in completed_prompts(folder)})


def _log_records(records: Iterable[LogRecord], process: str) -> None:
    for record in records:
        handle_record(record, process)
