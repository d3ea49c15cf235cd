"""A `LearnerService` in its own process, for a process that decodes and must not wait for it.

    this process                                        the learner's process
    post() -> bounded queue -> sending thread   =======>  on_prompt_completed()
    take_new_weights() <- receiving thread      <=======  a report: progress, events, a file of weights

The learner's process has a lower priority and, while requests run, a budget of processor time, which may be none. If it
dies it is started again and continues from its last commit.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from typing_extensions import override

from pipeline.learner_protocol import CompletedPrompt
from pipeline.learner_service.service import LearnerConfig, LearnerService
from pipeline.learner_service.start import FREE, POLL_SECONDS, start_learner
from pipeline.learning.remote_learner import LearnerConnection
from stages.learn.training.update import Pace
from stages.learn.training.weight_update import Weights, read_weights, write_weights
from store.child import Child, ChildError, KeptChild, Parent, RestartBudget
from store.events import Event

LOG = logging.getLogger("omnidraft.learner")

QUEUE_LIMIT = 256  # completed prompts that may wait for the learner; the oldest are dropped for newer ones
EXAMPLE_LIMIT = 16  # waiting prompts from which on no training examples are collected
RESTARTS_WITHIN = 60.0  # seconds; a learner that ends twice within them is not restarted
NICENESS, IDLE_NICENESS = 10, 19  # added to its priority number: with a budget while requests run, and without one
UNSENT_SECONDS = 10.0  # the learner waits this long for MLflow when it ends


@dataclass(frozen=True)
class ProcessReport:
    """A report of the learner's process."""

    handled: int  # completed prompts that it has processed
    events: tuple[Event, ...]  # since the last report
    weights: str | None  # path of a file of new weights
    published: int | None  # number of the newest published version


class CpuBudget(Pace):
    """Limits the processor time of this process to a share of the wall time, by sleeping between steps of work, while
    it is not free.

    Unused time is not saved up: each `restart` starts a new count. The share is that of one core; with 0 it sleeps
    until it is free, with 1 or more it never sleeps. `used` returns the processor time of the process, in seconds.
    """

    def __init__(
        self,
        share: float,
        free: Callable[[], bool] = lambda: False,
        used: Callable[[], float] = time.process_time,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._share, self._free, self._used_now, self._now, self._sleep = share, free, used, now, sleep
        self.restart()

    @property
    @override
    def is_free(self) -> bool:
        return self._free()

    def restart(self) -> None:
        """Start a new count, after a time without work."""
        self._used, self._began = self._used_now(), self._now()

    @override
    def yield_cpu(self) -> None:
        """Sleep until the processor time is within the share of the wall time, or it is free."""
        began = self._now()
        end = self._began + (self._used_now() - self._used) / self._share if self._share else math.inf
        while (owed := end - self._now()) > 0 and not self._free():
            self._sleep(min(owed, POLL_SECONDS))
        self.slept += self._now() - began
        self.restart()


class LearnerProcess(LearnerConnection):
    """A connection to a learner in its own process. It may use this share of one core, and more while it is free; with
    a share of 0 it computes only then. `on_event` is called with each event of the learner, on a thread of this object;
    `published` is the number of the newest published version so far.
    """

    def __init__(
        self, setup: LearnerConfig, share: float, on_event: Callable[[Event], None], published: int | None = None
    ) -> None:
        self._setup, self._share, self._on_event = setup, share, on_event
        self._scratch = TemporaryDirectory(prefix="omnidraft-weights-")
        self._waiting: deque[CompletedPrompt] = deque()
        self._change = threading.Condition()
        self._closing = self._is_free = False
        self._new_weights: Weights | None = None
        self.posted = self.dropped = self.handled = 0
        self._handled_before = 0  # by the processes before this one
        self.published = published
        self.alive = True
        self._budget = RestartBudget(1, RESTARTS_WITHIN, first_delay=0.0)
        self._sender = threading.Thread()
        self._process = KeptChild(self._start, self._handle_report, self._on_end)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def restarts(self) -> int:
        return self._budget.restarts

    @property
    def accepts_examples(self) -> bool:
        """Whether training examples should be collected: not where so many prompts wait that some will be dropped."""
        return self.alive and self.lag < (EXAMPLE_LIMIT if self._share else QUEUE_LIMIT)

    @property
    def waits(self) -> bool:
        """Whether prompts wait until the learner's time is free."""
        return self.alive and self.lag > 0 and not self._share and not self._is_free

    def set_free(self, free: bool) -> None:
        """Tell the learner whether nothing else needs the processor, from its next step on. At first it is not so."""
        if free != self._is_free:
            self._is_free, file = free, Path(self._scratch.name, FREE)
            file.touch() if free else file.unlink(missing_ok=True)

    @property
    def lag(self) -> int:
        """Number of completed prompts that the learner has not processed yet."""
        return self.posted - self.dropped - self.handled

    @override
    def post(self, finished: CompletedPrompt) -> None:
        with self._change:
            self.posted += 1
            self._waiting.append(finished)
            if len(self._waiting) > (QUEUE_LIMIT if self.alive else 0):
                self._waiting.popleft()
                self.dropped += 1
            self._change.notify_all()

    @override
    def take_new_weights(self) -> Weights | None:
        with self._change:
            weights, self._new_weights = self._new_weights, None
        return weights

    def close(self, timeout: float) -> None:
        """Let the learner process waiting prompts without a budget, commit and end; kill it after `timeout` seconds."""
        self.set_free(True)
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._process.close(timeout)
        self._scratch.cleanup()

    def _start(self) -> Child:
        self._handled_before = self.handled
        niceness = NICENESS if self._share else IDLE_NICENESS
        child = Child(start_learner, self._share, self._scratch.name, name="learner", niceness=niceness)
        self._sender = threading.Thread(target=self._send_prompts, args=(child,), name="learner-sender", daemon=True)
        self._sender.start()
        return child

    def _send_prompts(self, child: Child) -> None:
        """Send the setup, then prompts; runs on a thread of its own, so that no other thread waits for a full pipe."""
        with suppress(ChildError):
            child.send(self._setup)
            while (finished := self._take_next(child)) is not None:
                child.send(finished)
            child.send(None)

    def _take_next(self, child: Child) -> CompletedPrompt | None:
        """Return the next prompt to send; None when this object is closed. Raises `ChildError` if the child ended."""
        with self._change:
            self._change.wait_for(lambda: self._closing or self._waiting or not child.alive)
            if not child.alive:
                raise ChildError("the learner has ended")
            return self._waiting.popleft() if self._waiting else None

    def _handle_report(self, report: ProcessReport) -> None:
        self.handled, self.published = self._handled_before + report.handled, report.published
        for event in report.events:
            self._on_event(event)
        if report.weights:
            path = Path(report.weights)
            weights = read_weights(path)
            path.unlink()  # mapped memory stays readable
            with self._change:
                self._new_weights = weights

    def _on_end(self, error: BaseException) -> float | None:
        """Count the prompts that are lost, and return the seconds until the next start, if there is one."""
        with self._change:
            self._change.notify_all()
        self._sender.join()
        delay = None if self._closing else self._budget.next_delay()
        with self._change:
            if delay is None:
                self.alive = self._closing
                self._waiting.clear()
            self.dropped = self.posted - self.handled - len(self._waiting)  # those that it had received, too
        if delay is not None:
            LOG.warning("the learner ended (%s); it is restarted from its last commit", error)
        elif not self._closing:
            LOG.error(
                "the learner ended twice within a minute (%s) and is not restarted; serving continues without learning",
                error,
            )
        return delay


def run_learner(parent: Parent, setup: LearnerConfig, share: float, scratch: str) -> None:
    """Learn what is sent, and report. Runs in the learner's process."""
    free = Path(scratch, FREE)
    budget, handled, caught_up = CpuBudget(share, free.exists), 0, False
    budget.yield_cpu()  # it loads models and publishes the baseline, with no budget
    with LearnerService(setup, budget) as service:
        parent.send(_make_report(service, handled, scratch))
        while True:
            if parent.poll(POLL_SECONDS):
                if (finished := parent.receive()) is None:
                    break
                budget.restart()
                budget.yield_cpu()
                service.on_prompt_completed(finished)
                handled, caught_up = handled + 1, False
            elif budget.is_free and not caught_up:
                service.update_if_due()
                caught_up = True
            else:
                continue
            parent.send(_make_report(service, handled, scratch))
            budget.yield_cpu()
        service.pause(UNSENT_SECONDS)
        parent.send(_make_report(service, handled, scratch))


def _make_report(service: LearnerService, handled: int, scratch: str) -> ProcessReport:
    path: str | None = None
    if weights := service.take_new_weights():
        path = f"{scratch}/{weights.drafter_version}-{weights.head_version}.safetensors"
        write_weights(weights, Path(path))
    return ProcessReport(handled, tuple(service.drain_events()), path, service.published)
