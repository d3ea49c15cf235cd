"""Sends a run to MLflow while it goes on: after each commit, in a process of its own.

To import MLflow takes two seconds of Python code, a new store six, a version some tenths. On a thread of the process
that decodes this would take turns with the code between two forward passes; it doubled the time of a block at the
beginning of a run (benchmarks/notes/store.md). The process computes where the stream leaves a processor idle, until the
stream has ended.
"""

import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from store.child import ChildCalls
from store.log.manifest import read_manifest
from store.registry.mlflow_sync import RunSync, Sent

LOG = logging.getLogger("omnidraft.registry")

ATTEMPTS = 3  # before an outage is reported, or given up when the run ends
MOST_SECONDS = 60.0  # between two attempts while MLflow does not answer
UPDATE_SECONDS = 7200.0  # after which an update is given up
Request = tuple[bool, dict[str, int]]  # `stopped` and `committed` of `RunSync.update`


class Notifier:
    """Sends the commits of a run to MLflow on a background thread. No method but `close` waits for MLflow, none raises.

    If MLflow does not answer, later commits are sent together with earlier ones: nothing is queued, since the log has
    everything.

    Args:
        run_folder: of the run.
        log_folder: of the log whose commits it is notified of: the run's, or that of a partition.
        uri: of the MLflow store.
        name: of the run in messages.
    """

    def __init__(self, run_folder: Path, log_folder: Path, uri: str, name: str) -> None:
        self._log_folder, self._uri, self._name = log_folder, uri, name
        self._key = str(log_folder.relative_to(run_folder))
        place = run_folder.resolve(), uri
        self._here = RunSync(*place) if "mlflow" in sys.modules else None  # it need not be imported again elsewhere
        self._process = ChildCalls(_make_update, *place, name="mlflow")
        self._committed: Mapping[str, int] = {}
        self._wake, self._closing, self._complete = threading.Event(), threading.Event(), False
        self._warned, self._failures, self._after, self._reason = False, 0, 0.0, ""
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Send what was committed, soon. Called after each commit, before the next one begins."""
        tables = read_manifest(self._log_folder).tables
        self._committed = {self._key: sum(part.rows for part in tables["versions"])}
        self._wake.set()

    def close(self, timeout: float) -> bool:
        """Send the last commit, for at most `timeout` seconds. Returns whether MLflow has everything."""
        if pid := self._process.pid:
            _set_priority(pid, idle=False)  # the stream has ended, and this process waits
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._warn(f"it took longer than {timeout:.0f} s")
        self._process.close()  # what it was sending, the next one completes
        return self._complete

    def _work(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            self._wake.clear()
            if self._committed and not self._closing.is_set() and time.monotonic() >= self._after:
                self._try()
        while self._committed and not self._try(stopped=True) and self._failures < ATTEMPTS:
            time.sleep(self._failures)
        if self._reason:
            self._warn(self._reason)

    def _try(self, *, stopped: bool = False) -> bool:
        """Send once; return whether that can be done. An outage is reported, one that ends soon is not."""
        try:
            sent = self._update(stopped)
        except Exception as error:
            self._failures, self._reason = self._failures + 1, str(error) or repr(error)
            self._after = time.monotonic() + min(2.0**self._failures, MOST_SECONDS)
            if self._failures >= ATTEMPTS:
                self._warn(self._reason)
            return False
        self._failures, self._after, self._reason = 0, 0.0, "; ".join(sent.refused)
        self._complete = stopped and not sent.refused
        return True

    def _update(self, stopped: bool) -> Sent:
        if self._here:
            return self._here.update(stopped=stopped, committed=self._committed)
        versions, points, refused, failure = self._process.call((stopped, dict(self._committed)), UPDATE_SECONDS)
        if failure:
            raise RuntimeError(failure)
        return Sent(versions, points, refused)

    def _warn(self, reason: str) -> None:
        if not self._warned:
            LOG.warning(
                "MLflow at %s did not take all of the run: %s. The run's folder has everything, and "
                "`omnidraft versions sync %s` sends what is missing",
                *(self._uri, (reason.strip().splitlines() or ["no reason given"])[0][:400], shlex.quote(self._name)),
            )
        self._warned = True


def _make_update(run_folder: Path, uri: str) -> Callable[[Request], tuple[int, int, tuple[str, ...], str]]:
    """Return what updates MLflow in the process that sends, with what `Sent` has and the reason if it failed."""
    os.dup2(2, 1)  # what a library prints is no output of the command
    sync = RunSync(run_folder, uri)

    def update(request: Request) -> tuple[int, int, tuple[str, ...], str]:
        stopped, committed = request
        _set_priority(0, idle=not stopped)
        try:
            sent = sync.update(stopped=stopped, committed=committed)
        except Exception as error:
            return 0, 0, (), str(error) or repr(error)
        return sent.versions, sent.points, sent.refused, ""

    return update


def _set_priority(pid: int, *, idle: bool) -> None:
    """Let a process compute only where no other wants the processor, or as others do; where the system allows it."""
    with suppress(OSError):
        if hasattr(os, "sched_setscheduler"):
            os.sched_setscheduler(pid, os.SCHED_IDLE if idle else os.SCHED_OTHER, os.sched_param(0))
        elif idle:
            os.setpriority(os.PRIO_PROCESS, pid, 19)
