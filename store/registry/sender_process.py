"""A `Sender` in a process of its own, which computes where the stream leaves a processor idle.

To import MLflow takes two seconds, a new store six, a version some tenths. On a thread of the process that decodes this
doubled the time of a block (benchmarks/notes/store.md), at the beginning of a run, where its reader waits for text.
"""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from store.outbox import Body, OutageError
from store.registry.mlflow_sender import Sender

_PROGRAM = "from store.registry.sender_process import main; main()"


class SenderProcess:
    """Delivers as a `Sender` does. The process is started by the first delivery, and again if it has ended.

    Args:
        uri, experiment, model, known, run_folder: those of the `Sender`.
    """

    def __init__(self, uri: str, experiment: str, model: str | None, known: Body, run_folder: Path) -> None:
        self._uri, self._experiment, self._model = uri, experiment, model
        self._known, self._run_folder = dict(known), run_folder
        self._lock = threading.Lock()  # guards the start of the process
        self._waited_for = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def deliver(self, kind: str, bodies: list[Body]) -> Body:
        """Deliver messages of one kind; the `deliver` of `Outbox`.

        Raises:
            OutageError: MLflow does not answer, or the process has ended.
            RuntimeError: what else the `Sender` raised, as text.
        """
        try:
            connection = self._connect()
            _send(connection, [kind, bodies])
            answer = json.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.end()
            raise OutageError("the process that sends to MLflow has ended, perhaps for its memory") from error
        if "outage" in answer:
            raise OutageError(answer["outage"])
        if "error" in answer:
            raise RuntimeError(answer["error"])
        result: Body = answer["result"]
        self._known.update(result)
        return result

    def wait_for(self) -> None:
        """Give the process the usual priority from now on, because the stream has ended and this process waits."""
        with self._lock:
            self._waited_for = True
            if self._process:
                _set_priority(self._process.pid, idle=False)

    def end(self) -> None:
        """End the process. What it was delivering is delivered again by the next one."""
        with self._lock:
            if self._process:
                self._process.kill()
                self._process.wait()
            if self._connection:
                self._connection.close()
            self._process = self._connection = None

    def _connect(self) -> Connection:
        with self._lock:
            if self._connection is not None:
                return self._connection
            ours, theirs = Pipe()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=[theirs.fileno()],
                # An interrupt of the terminal ends the stream, not what it still sends. In a session of its own the
                # process would have a full share of the processors, whatever its priority.
                process_group=0,
            )
            theirs.close()
            _set_priority(self._process.pid, idle=not self._waited_for)
            self._connection = ours
        _send(ours, [self._uri, self._experiment, self._model, self._known, str(self._run_folder)])
        return ours


def _set_priority(pid: int, *, idle: bool) -> None:
    """Let a process compute only where no other wants the processor, or as others do; where the system allows it."""
    with suppress(OSError):
        if hasattr(os, "sched_setscheduler"):
            os.sched_setscheduler(pid, os.SCHED_IDLE if idle else os.SCHED_OTHER, os.sched_param(0))
        elif idle:
            os.setpriority(os.PRIO_PROCESS, pid, 19)


def main() -> None:
    """Deliver until the other end of the pipe closes; the program of the process."""
    connection = Connection(int(sys.argv[1]))
    try:
        uri, experiment, model, known, run_folder = json.loads(connection.recv_bytes())
        sender = Sender(uri, experiment, model, known, Path(run_folder))
        while True:
            _send(connection, _deliver(sender, *json.loads(connection.recv_bytes())))
    except (EOFError, OSError):  # the process that posts has ended
        return


def _deliver(sender: Sender, kind: str, bodies: list[Body]) -> Body:
    try:
        return {"result": sender.deliver(kind, bodies)}
    except OutageError as outage:
        return {"outage": str(outage)}
    except Exception as error:
        return {"error": str(error)}


def _send(connection: Connection, value: Any) -> None:
    connection.send_bytes(json.dumps(value).encode())
