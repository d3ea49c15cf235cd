"""Sends a run to MLflow while it goes on: after each commit, in a process of its own.

To import MLflow takes two seconds of Python code, a new store six, a version some tenths. On a thread of the process
that decodes this would take turns with the code between two forward passes; it doubled the time of a block at the
beginning of a run (benchmarks/notes/store.md). The process computes where the stream leaves a processor idle, until the
stream has ended.
"""

import json
import logging
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from store.log.manifest import read_manifest
from store.registry.mlflow_sync import RunSync, Sent

LOG = logging.getLogger("omnidraft.registry")

ATTEMPTS = 3  # before an outage is reported, or given up when the run ends
MOST_SECONDS = 60.0  # between two attempts while MLflow does not answer
_PROGRAM = "from store.registry.notifier import main; main()"


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
        self._sender = _Sender(run_folder.resolve(), uri)
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
        self._sender.hurry()
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._warn(f"it took longer than {timeout:.0f} s")
        self._sender.end()
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
            sent = self._sender.update(stopped=stopped, committed=self._committed)
        except Exception as error:
            self._failures, self._reason = self._failures + 1, str(error) or repr(error)
            self._after = time.monotonic() + min(2.0**self._failures, MOST_SECONDS)
            if self._failures >= ATTEMPTS:
                self._warn(self._reason)
            return False
        self._failures, self._after, self._reason = 0, 0.0, "; ".join(sent.refused)
        self._complete = stopped and not sent.refused
        return True

    def _warn(self, reason: str) -> None:
        if not self._warned:
            LOG.warning(
                "MLflow at %s did not take all of the run: %s. The run's folder has everything, and "
                "`omnidraft versions sync %s` sends what is missing",
                *(self._uri, (reason.strip().splitlines() or ["no reason given"])[0][:400], shlex.quote(self._name)),
            )
        self._warned = True


class _Sender:
    """Updates MLflow in a process of its own, or, where MLflow has been imported already, in this one."""

    def __init__(self, run_folder: Path, uri: str) -> None:
        self._run_folder, self._uri = run_folder, uri
        self._here = RunSync(run_folder, uri) if "mlflow" in sys.modules else None
        self._lock, self._hurried = threading.Lock(), False  # the lock guards the start of the process
        self._process: subprocess.Popen[str] | None = None

    def update(self, *, stopped: bool, committed: Mapping[str, int]) -> Sent:
        """Call `RunSync.update`. Raises what it raises, from another process as RuntimeError."""
        if self._here:
            return self._here.update(stopped=stopped, committed=committed)
        try:
            answer = self._ask({"stopped": stopped, "committed": committed})
        except (OSError, ValueError) as error:
            self.end()
            raise RuntimeError("the process that sends has ended, perhaps for its memory") from error
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return Sent(answer["versions"], answer["points"], tuple(answer["refused"]))

    def hurry(self) -> None:
        """Give the process the usual priority: the stream has ended, and this process waits."""
        with self._lock:
            self._hurried = True
            if self._process:
                _set_priority(self._process.pid, idle=False)

    def end(self) -> None:
        """End the process. What it was sending, the next one completes."""
        with self._lock:
            if self._process:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer

    def _start(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, str(self._run_folder), self._uri],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                    # An interrupt of the terminal ends the stream, not what it still sends. In a session of its own
                    # the process would have a full share of the processors, whatever its priority.
                    process_group=0,
                )
                _set_priority(self._process.pid, idle=not self._hurried)
            return self._process


def _set_priority(pid: int, *, idle: bool) -> None:
    """Let a process compute only where no other wants the processor, or as others do; where the system allows it."""
    with suppress(OSError):
        if hasattr(os, "sched_setscheduler"):
            os.sched_setscheduler(pid, os.SCHED_IDLE if idle else os.SCHED_OTHER, os.sched_param(0))
        elif idle:
            os.setpriority(os.PRIO_PROCESS, pid, 19)


def main() -> None:
    """Answer requests until the process that sends them ends; the program of the process."""
    answers: IO[str] = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    sync = RunSync(Path(sys.argv[1]), sys.argv[2])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = vars(sync.update(stopped=request["stopped"], committed=request["committed"]))
        except Exception as error:
            answer = {"error": str(error) or repr(error)}
        with suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)
