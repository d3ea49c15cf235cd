"""A `LearnerService` in its own process, for a server that must not wait for it.

The learner's process has a lower priority and a budget of processor time. If it dies it is restarted from its last
commit.
"""

import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

from typing_extensions import override

from pipeline.learner_service.client import LearnerClient, LearnerHandle, ProcessReport, write_weights_file
from pipeline.learner_service.service import LearnerConfig, LearnerService
from pipeline.log_records import PROJECT, forward_records
from store.events import Event as LoggedEvent

LOG = logging.getLogger("omnidraft.learner")

NICENESS = 10
UNSENT_SECONDS = 10.0  # the learner waits this long for MLflow when it ends


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


class LearnerProcess(LearnerClient):
    """A connection to a learner in its own process.

    Args:
        setup: configuration of the learner service.
        share: share of one core that it may use.
        on_event, published: as of `LearnerClient`.
    """

    def __init__(
        self,
        setup: LearnerConfig,
        share: float,
        on_event: Callable[[LoggedEvent], None],
        published: int | None = None,
    ) -> None:
        super().__init__(on_event, published)
        self._setup, self._share, self._context = setup, share, get_context("spawn")
        self._unlimited = self._context.Event()
        self._start()

    @override
    def close(self, timeout: float) -> None:
        """Let the learner process waiting prompts without a budget, commit and end; kill it after `timeout` seconds."""
        self._unlimited.set()
        super().close(timeout)

    @override
    def _open(self) -> tuple[Connection, LearnerHandle] | None:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._setup, self._share, self._scratch.name, self._unlimited, PROJECT.getEffectiveLevel())
        process = self._context.Process(target=_run_learner, args=arguments, name="learner", daemon=True)
        process.start()
        theirs.close()
        return ours, process


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
