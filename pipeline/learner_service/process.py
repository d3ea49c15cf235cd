"""A `LearnerService` in its own process, for a server that must not wait for it.

    this process                                       the learner's process
    post() -> bounded queue -> sending thread  ==pipe=>  on_prompt_completed()
    take_new_weights() <- receiving thread      <=pipe==  a report: progress, events, a file of weights

The learner's process has a lower priority and a budget of processor time. If it dies it is restarted from its last
commit.
"""

import logging
import math
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from typing_extensions import override

from pipeline.learner_protocol import CompletedPrompt
from pipeline.learner_service.service import LearnerConfig, LearnerService
from pipeline.learning.remote_learner import LearnerConnection
from pipeline.log_records import PROJECT, forward_records, handle_record
from stages.training.weight_update import Weights, read_weights, write_weights
from store.events import Event as LoggedEvent

LOG = logging.getLogger("omnidraft.learner")

QUEUE_LIMIT = 256  # completed prompts that may wait for the learner; the oldest are dropped for newer ones
EXAMPLE_LIMIT = 16  # waiting prompts from which on no training examples are collected
NICENESS = 10
UNSENT_SECONDS = 10.0  # the learner waits this long for MLflow when it ends
RESTARTS_WITHIN = 60.0  # seconds; a learner that ends twice within them is not restarted
END = b""  # the last message to the learner


class CpuBudget:
    """Limits the processor time of this process to a share of the wall time, by sleeping between steps of work.

    Unused time is not saved up: each `restart` starts a new count.

    Args:
        share: share of one core, above 0; 1 or more never sleeps.
        used: returns the processor time of the process, in seconds.
        now: a monotonic clock, in seconds.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        share: float,
        used: Callable[[], float] = time.process_time,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._share, self._used_now, self._now, self._sleep = share, used, now, sleep
        self.restart()

    def restart(self) -> None:
        """Start a new count, after a time without work."""
        self._used, self._began = self._used_now(), self._now()

    def yield_cpu(self) -> None:
        """Sleep until the processor time is within the share of the wall time. Called between two steps of work."""
        owed = (self._used_now() - self._used) / self._share - (self._now() - self._began)
        if owed > 0:
            self._sleep(owed)
        self.restart()


class LearnerHandle(Protocol):
    """The learner's process, or a part of one."""

    def kill(self) -> None:
        """End it, or the connection to it, at once."""
        ...

    def join(self) -> None:
        """Wait until what has to end with the connection has ended."""
        ...


@dataclass(frozen=True)
class ProcessReport:
    """A report of the learner's process.

    Attributes:
        handled: number of completed prompts that it has processed.
        events: its events since the last report.
        weights: path of a file of new weights.
        published: number of the newest published version.
    """

    handled: int
    events: tuple[LoggedEvent, ...]
    weights: str | None
    published: int | None


class LearnerProcess(LearnerConnection):
    """A connection to a learner in its own process.

    Args:
        setup: configuration of the learner service; None only where `_open` is another.
        share: share of one core that it may use.
        on_event: called with each of its events, on a thread of this object.
        published: number of the newest published version so far.
    """

    def __init__(
        self,
        setup: LearnerConfig | None,
        share: float,
        on_event: Callable[[LoggedEvent], None],
        published: int | None = None,
    ) -> None:
        self._setup, self._share, self._on_event = setup, share, on_event
        self._scratch = TemporaryDirectory(prefix="omnidraft-weights-")
        self._waiting: deque[CompletedPrompt] = deque()
        self._change = threading.Condition()
        self._ending = False
        self._context = get_context("spawn")
        self._unlimited = self._make_flag()
        self._process: LearnerHandle | None = None
        self._new_weights: Weights | None = None
        self.posted = self.dropped = self.handled = 0
        self.published = published
        self.alive, self.restarts = True, 0
        self._thread = threading.Thread(target=self._keep_alive, name="learner-connection", daemon=True)
        self._thread.start()

    @property
    def accepts_examples(self) -> bool:
        """Whether training examples should be collected: fewer than `EXAMPLE_LIMIT` prompts wait."""
        return self.alive and self.lag < EXAMPLE_LIMIT

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
            found, self._new_weights = self._new_weights, None
        return found

    def close(self, timeout: float) -> None:
        """Let the learner process waiting prompts without a budget, commit and end; kill it after `timeout` seconds."""
        self._unlimited.set()
        with self._change:
            self._ending = True
            self._change.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive() and self._process:
            self._process.kill()
        self._thread.join()
        self._scratch.cleanup()

    def _keep_alive(self) -> None:
        """Start the process, receive from it and restart it; runs on a thread of its own."""
        try:
            self._run_until_closed()
        except BaseException as error:  # for example a report that cannot be decoded
            LOG.error("the learner failed: %r; serving continues without learning", error)
            if self._process:
                self._process.kill()
            self._give_up()

    def _run_until_closed(self) -> None:
        ended = -math.inf
        while True:
            self._run_once()
            with self._change:
                if self._ending:
                    return
            before, ended = ended, time.monotonic()
            if ended - before < RESTARTS_WITHIN:
                self._give_up()
                LOG.error(
                    "the learner ended twice within a minute and is not restarted; serving continues without learning"
                )
                return
            self.restarts += 1
            LOG.warning("the learner ended; it is restarted from its last commit")

    def _give_up(self) -> None:
        with self._change:
            self.alive = False
            self.dropped += len(self._waiting)
            self._waiting.clear()

    def _make_flag(self) -> Any:
        return self._context.Event()

    def _open(self) -> "tuple[Connection, LearnerHandle] | None":
        """Start the process. Returns the connection to it; None if this object is closed first."""
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._setup, self._share, self._scratch.name, self._unlimited, PROJECT.getEffectiveLevel())
        process = self._context.Process(target=_run_learner, args=arguments, name="learner", daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def _run_once(self) -> None:
        """Open a connection and receive from it until it ends."""
        opened = self._open()
        if opened is None:
            return
        ours, process = opened
        self._process = process
        over = threading.Event()
        sender = threading.Thread(target=self._send, args=(ours, over), name="learner-sender", daemon=True)
        sender.start()
        handled_before = self.handled
        try:
            while True:
                self._handle_report(pickle.loads(ours.recv_bytes()), handled_before)
        except (EOFError, OSError):
            pass
        process.join()
        over.set()
        with self._change:
            self._change.notify_all()
        sender.join()
        ours.close()
        with self._change:
            self.dropped = (
                self.posted - self.handled - len(self._waiting)
            )  # including prompts that the process had received

    def _handle_report(self, report: Any, before: int) -> None:
        if isinstance(report, logging.LogRecord):
            handle_record(report, "learner")
            return
        self.handled, self.published = before + report.handled, report.published
        for event in report.events:
            self._on_event(event)
        if report.weights:
            path = Path(report.weights)
            weights = read_weights(path)
            path.unlink()  # mapped memory stays readable
            with self._change:
                self._new_weights = weights

    def _send(self, connection: Connection, over: threading.Event) -> None:
        """Send prompts; runs on a thread of its own, so that no other thread waits for a full pipe."""
        with suppress(OSError):
            while (message := self._take_next(over)) is not None:
                connection.send_bytes(pickle.dumps(message))
            connection.send_bytes(END)

    def _take_next(self, over: threading.Event) -> object:
        """Return the next message to send; None when the connection closes. Raises OSError if the process ended."""
        with self._change:
            self._change.wait_for(lambda: self._ending or over.is_set() or self._has_messages)
            if over.is_set():
                raise OSError("the learner ended")
            return self._take_message() if self._has_messages else None

    @property
    def _has_messages(self) -> bool:
        return bool(self._waiting)

    def _take_message(self) -> object:
        return self._waiting.popleft()


def _run_learner(
    connection: Connection, setup: LearnerConfig, share: float, scratch: str, unlimited: Event, level: int
) -> None:
    """Run the learner, in its process. `unlimited` is set when the server ends and the share no longer holds; `level`
    is that of the log.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the server, which then ends the learner
    threading.Thread(target=_exit_with_server, name="server-monitor", daemon=True).start()
    with suppress(OSError):
        os.nice(NICENESS)
    budget, handled, sending = CpuBudget(share), 0, threading.Lock()

    def send(message: ProcessReport | logging.LogRecord) -> None:
        with sending:
            connection.send_bytes(pickle.dumps(message))

    forward_records(send, level)

    def yield_cpu() -> None:
        if not unlimited.is_set():
            budget.yield_cpu()

    with LearnerService(setup, yield_cpu=yield_cpu) as service:
        send(_make_report(service, handled, scratch))
        while message := connection.recv_bytes():
            budget.restart()
            service.on_prompt_completed(pickle.loads(message))
            handled += 1
            send(_make_report(service, handled, scratch))
            yield_cpu()
        if unsent := service.pause(UNSENT_SECONDS):
            LOG.warning("MLflow did not take %d messages; they are kept with the run", unsent, extra={"unsent": unsent})
        send(_make_report(service, handled, scratch))


def _exit_with_server() -> None:
    """Exit as soon as the server ends, so that a server that resumes the run finds it free. Commits remain."""
    if server := parent_process():
        server.join()
        os._exit(1)


def _make_report(service: LearnerService, handled: int, scratch: str) -> ProcessReport:
    path = write_weights_file(service.take_new_weights(), scratch)
    return ProcessReport(handled, tuple(service.drain_events()), path, service.published)


def write_weights_file(weights: Weights | None, scratch: str) -> str | None:
    """Write weights for a `ProcessReport` into a folder. Returns the path of the file; None without weights."""
    if weights is None:
        return None
    path = Path(scratch, f"{weights.drafter_version}-{weights.head_version}.safetensors")
    write_weights(weights, path)
    return str(path)
