"""The workers and the learner of a run, and the pending calls to them.

Their results are passed by reference: completed prompts from a worker to the learner, weights from the learner to every
worker. Backpressure is a limit on pending calls: a few per worker, and a few for the learner.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from pipeline.cluster.learner import LearnerActor, LearnerReport
from pipeline.cluster.worker import DecodeWorker, TargetInfo, WorkerReport, WorkerSetup
from pipeline.learner_service.service import LearnerConfig
from stages.memory.memory_share import MemoryExchange, MemoryShare
from store.errors import RunError
from store.events import PromptReceived
from store.log.manifest import read_manifest
from store.log.partitions import LEARNER, open_partition

if TYPE_CHECKING:
    from pipeline.cluster.ray_backend import RayActors

MAX_CALLS = 2  # pending work items of a worker: one that it decodes, one that is queued
MAX_QUEUED_WORK_ITEMS = 16  # per worker, for the learner; with more, no prompts are given out
RESTART_BUDGET = 8  # starts of the learner in a row that may fail
RESTART_SECONDS = 1.0  # seconds before it is started again

Ref = object  # reference to an object that is or will be in the cluster; only the backend knows its type


class GoneError(Exception):
    """An object was lost with its process or machine."""


class DeadError(GoneError):
    """The actor that was to make the object is dead."""


@dataclass(frozen=True)
class WorkerReady:
    """A worker has loaded its models."""

    worker: str
    model_fingerprints: tuple[str, str, str]


@dataclass(frozen=True)
class WorkReported:
    """A worker's report on its prompts. In the `final` one all of them are committed, and the worker has ended."""

    worker: str
    report: WorkerReport
    final: bool


@dataclass(frozen=True)
class ActorLost:
    """A worker or the learner is lost, with all calls to it that were pending."""

    name: str
    reason: str


Message = WorkerReady | WorkReported | ActorLost | TargetInfo | LearnerReport


class WorkerState(Enum):
    """What a worker does."""

    STARTING = "starting"
    READY = "up"
    DRAINING = "draining"


@dataclass
class WorkerHandle:
    """The pool's record of a worker."""

    actor: object
    calls: int = 0
    state: WorkerState = WorkerState.STARTING
    weights: Ref = None  # the weights that it received last
    called_at: float = 0.0  # time of the last call


@dataclass(frozen=True)
class _Call:
    """A pending call. `make_message` converts its result, or with `by_reference` the reference, to a message."""

    name: str
    make_message: Callable[[Any], Message | None]
    by_reference: bool = False
    work_item: Ref = None  # argument of a call of the learner


class WorkerPool:
    """The actors of one run. Used by one thread. `options` are the resources that every actor takes of a machine."""

    def __init__(self, actors: "RayActors", setup: WorkerSetup, run_folder: Path, options: Mapping[str, float]) -> None:
        self._actors, self._setup, self._run_folder, self._options = actors, setup, run_folder, dict(options)
        self._handles: dict[str, WorkerHandle] = {}
        self._calls: dict[Ref, _Call] = {}
        self._memories = MemoryExchange()
        self._weights: Ref = None
        self._learner_config: LearnerConfig | None = None
        self._learner: object | None = None
        self._work_items: list[Ref] = []  # references to completed prompts, oldest first, not yet given to the learner
        self._learner_starts, self._start_at = 0, 0.0

    @property
    def workers(self) -> list[str]:
        """All that were added and not removed, oldest first."""
        return list(self._handles)

    def add(self, folder: Path) -> None:
        """Add a worker for this partition. It starts when the cluster has the resources."""
        actor = self._actors.start(DecodeWorker, self._options, self._setup, folder)
        self._handles[folder.name] = WorkerHandle(actor, calls=1)
        (ref,) = self._actors.call(actor, "start")
        self._calls[ref] = _Call(folder.name, partial(self._on_worker_ready, folder.name))

    def accepts_work(self, worker: str) -> bool:
        """Return whether a worker takes another work item now."""
        waiting = len(self._work_items) + sum(call.name == LEARNER for call in self._calls.values())
        handle = self._handles[worker]
        return (
            handle.state is WorkerState.READY
            and handle.calls < MAX_CALLS
            and waiting <= MAX_QUEUED_WORK_ITEMS * len(self._handles)
        )

    def get_state(self, worker: str) -> WorkerState:
        return self._handles[worker].state

    def idle_since(self, worker: str) -> float | None:
        """Return when an idle worker was called last, in seconds of `monotonic`; None if it is not idle."""
        handle = self._handles[worker]
        return None if handle.calls or handle.state is not WorkerState.READY else handle.called_at

    def submit(self, worker: str, prompts: Sequence[PromptReceived], *, more: bool) -> None:
        """Give a worker a work item, with the newest weights and what the memories of other workers learned.

        The arguments are those of `DecodeWorker.work`.
        """
        handle = self._handles[worker]
        weights = None if handle.weights is self._weights else self._weights
        handle.weights, handle.calls, handle.called_at = self._weights, handle.calls + 1, monotonic()
        memory = self._memories.take(worker)
        report, finished = self._actors.call(handle.actor, "work", prompts, weights, memory, more=more, returns=2)
        self._calls[report] = _Call(worker, lambda found: self._on_work_reported(worker, found, finished))

    def share_memory(self, worker: str, share: MemoryShare) -> None:
        """Keep what the memory of a worker learned, for the next work item of every other worker."""
        self._memories.receive(worker, share)

    def request_target_info(self, worker: str) -> None:
        handle = self._handles[worker]
        handle.calls += 1
        (ref,) = self._actors.call(handle.actor, "describe_target")
        self._calls[ref] = _Call(worker, lambda found: found)

    def drain(self, worker: str) -> None:
        """Let a worker finish its pending calls, commit and end."""
        handle = self._handles[worker]
        handle.state, handle.calls = WorkerState.DRAINING, handle.calls + 1
        (ref,) = self._actors.call(handle.actor, "finish")
        self._calls[ref] = _Call(worker, lambda report: WorkReported(worker, report, final=True))

    def remove(self, worker: str) -> None:
        """Kill a worker and forget its pending calls."""
        self._actors.kill(self._handles.pop(worker).actor)
        self._memories.remove(worker)
        self._calls = {ref: call for ref, call in self._calls.items() if call.name != worker}

    def wait(self, seconds: float) -> list[Message]:
        """Wait for messages, at most `seconds`. Raises what a worker or the learner raised."""
        self._feed_learner()
        refs = list(self._calls)
        if not refs:
            sleep(seconds)
            return []
        found = [self._receive(ref) for ref in self._actors.wait(refs, seconds)]
        return [message for message in found if message]

    def _receive(self, ref: Ref) -> Message | None:
        call = self._calls.pop(ref, None)
        if call is None:  # of an actor that was just lost
            return None
        try:
            result = ref if call.by_reference else self._actors.get(ref)
        except GoneError as error:
            return self._on_actor_lost(call, error)
        except RunError as error:
            if call.name != LEARNER or call.work_item is not None or self._learner_starts >= RESTART_BUDGET:
                raise
            self._reset_learner(error)  # it could not start: its predecessor may still be ending
            return ActorLost(LEARNER, str(error))
        if handle := self._handles.get(call.name):
            handle.calls -= 1
        return call.make_message(result)

    def _on_worker_ready(self, worker: str, model_fingerprints: tuple[str, str, str]) -> Message:
        self._handles[worker].state = WorkerState.READY
        return WorkerReady(worker, model_fingerprints)

    def _on_work_reported(self, worker: str, report: WorkerReport, finished: Ref) -> Message:
        if report.completed:
            self._work_items.append(finished)
        return WorkReported(worker, report, final=False)

    def _on_actor_lost(self, call: _Call, error: GoneError) -> Message | None:
        if call.name != LEARNER:
            self.remove(call.name)
            return ActorLost(call.name, str(error))
        if not isinstance(error, DeadError):  # the work item is lost, not the learner
            return None
        self._reset_learner(error, call)
        return ActorLost(LEARNER, str(error))

    @property
    def has_learner(self) -> bool:
        return self._learner_config is not None

    def start_learner(self, config: LearnerConfig) -> None:
        self._learner_config = config
        open_partition(self._run_folder, LEARNER)

    @property
    def is_learning(self) -> bool:
        """Whether the learner has pending work or is not started yet."""
        busy = any(call.name == LEARNER for call in self._calls.values())
        return busy or self._learner is None or bool(self._work_items)

    def _feed_learner(self) -> None:
        if self._learner is None and self._learner_config and monotonic() >= self._start_at:
            arguments = self._learner_config, self._setup.working_folder, self._setup.log_level
            options = self._options | {"num_cpus": 0}  # so that it starts even while workers wait for CPUs
            self._learner = self._actors.start(LearnerActor, options, *arguments)
            self._learner_starts += 1
            self._call_learner("start")
        while self._learner and self._work_items:
            self._call_learner("learn", self._work_items.pop(0))

    def _call_learner(self, method: str, *arguments: Ref) -> None:
        report, weights = self._actors.call(self._learner, method, *arguments, returns=2)
        work_item = arguments[0] if arguments else None
        self._calls[report] = _Call(
            LEARNER, lambda found: self._on_learner_report(found, weights, work_item), work_item=work_item
        )

    def _on_learner_report(self, report: LearnerReport, weights: Ref, work_item: Ref) -> Message:
        if work_item is not None:  # it completed a work item, so it works
            self._learner_starts = 0
        if report.has_weights:  # given out after they are copied here, so that they survive the learner's machine
            self._calls[weights] = _Call(LEARNER, self._set_weights, by_reference=True)
        return report

    def _set_weights(self, weights: Ref) -> None:
        self._weights = weights

    def _reset_learner(self, error: Exception, *received: _Call) -> None:
        calls = [*received, *(call for call in self._calls.values() if call.name == LEARNER)]
        if self._learner_starts >= RESTART_BUDGET:
            raise RunError(
                f"the learner crashed {RESTART_BUDGET} times in a row without completing an update; "
                f"its last error was: {error}"
            ) from error
        self._actors.kill(self._learner)
        self._learner, self._start_at = None, monotonic() + RESTART_SECONDS
        unprocessed = [call.work_item for call in calls if call.work_item is not None]
        self._work_items = unprocessed + self._work_items
        self._calls = {ref: call for ref, call in self._calls.items() if call.name != LEARNER}

    def end_learner(self, method: str, timeout: float) -> bool:
        """End the learner by one of its methods. Returns whether MLflow has everything after `timeout` seconds."""
        while self._learner_config and not read_manifest(open_partition(self._run_folder, LEARNER)).finished:
            while self.is_learning:
                self.wait(RESTART_SECONDS)
            (ref,) = self._actors.call(self._learner, method, timeout)
            try:
                return bool(self._actors.get(ref))
            except GoneError as error:
                self._reset_learner(error)
        return True  # it never started, or died after its last commit
