"""A learner that the replicas of a run share, in a program of its own.

    replica 0: SharedLearner ==socket==+
                                       +== shared_program: LearnerService, MemoryExchange
    replica 1: SharedLearner ==socket==+

    replica -> program   completed prompts, what its memory learned
    program -> replicas  reports with new weights, what the memories of the others learned

The replica that first needs the program starts it; the file ADDRESS in the run's folder names its socket. It ends when
the last replica has closed its connection, in whatever way. If it dies, one of the replicas starts another, which
continues from the last commit. It is no child of `multiprocessing`, which a daemonic worker of vLLM may not have.
"""

import os
import pickle
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock
from typing_extensions import override

from pipeline.learner_service.client import LearnerClient, LearnerHandle
from pipeline.learner_service.service import LearnerConfig
from pipeline.learner_service.shared_program import ADDRESS, READY, Hello, ProgramTask
from pipeline.log_records import PROJECT
from stages.memory.memory_share import LearnedText, MemoryShare
from store.events import Event

PROGRAM = "from pipeline.learner_service.shared_program import main; main()"
LOCK = ".replicas.lock"  # held by a replica while it looks for the program or starts it
START_SECONDS = 60.0  # in which a program that was started listens
LOOK_SECONDS = 0.5  # between two looks for a program
UNSENT_SHARES = 256  # that wait while there is no program; the oldest are dropped for newer ones


class Replica(NamedTuple):
    """One of the engines that share a run.

    Attributes:
        run_folder: of the run.
        number: of the replica, from 0.
    """

    run_folder: Path
    number: int


class SharedLearner(LearnerClient):
    """The connection of a replica to the learner.

    Attributes:
        program: if this replica has started it.

    Args:
        replica: whose connection it is.
        setup: configuration of the learner service; None if nothing but memories is shared.
        starts: whether it starts the program; otherwise it waits until another replica does.
        on_event, published: as of `LearnerClient`. Of several replicas, the first receives the events.
    """

    def __init__(
        self,
        replica: Replica,
        setup: LearnerConfig | None,
        on_event: Callable[[Event], None],
        published: int | None = None,
        *,
        starts: bool = True,
    ) -> None:
        super().__init__(on_event, published)
        self._replica, self._task, self._starts = replica, ProgramTask(setup, PROJECT.getEffectiveLevel()), starts
        self._shares: deque[MemoryShare] = deque(maxlen=UNSENT_SHARES)
        self._texts: deque[LearnedText] = deque()
        self._cells: MemoryShare | None = None  # the newest, without texts
        self.program: subprocess.Popen[bytes] | None = None
        self._start()

    def share_memory(self, share: MemoryShare) -> None:
        """Send what the memory learned to the other replicas. Never blocks."""
        with self._change:
            self._shares.append(share)
            self._change.notify_all()

    def take_memory(self, texts: int) -> MemoryShare | None:
        """Return what the memories of the others learned, with so many texts at most; None if there is nothing."""
        with self._change:
            cells, self._cells = self._cells, None
            found = tuple(self._texts.popleft() for _ in range(min(texts, len(self._texts))))
        return MemoryShare(found, cells.cells if cells else None) if found or cells else None

    @property
    @override
    def _has_messages(self) -> bool:
        return bool(self._shares or self._waiting)

    @override
    def _take_message(self) -> object:
        return self._shares.popleft() if self._shares else self._waiting.popleft()

    @override
    def _handle_report(self, report: object, before: int) -> None:
        if not isinstance(report, MemoryShare):
            super()._handle_report(report, before)
            return
        with self._change:
            self._texts.extend(report.texts)
            self._cells = MemoryShare(cells=report.cells)

    @override
    def _open(self) -> tuple[Connection, LearnerHandle] | None:
        while (connection := self._find_program()) is None:
            if self._ending:
                return None
            time.sleep(LOOK_SECONDS)
        connection.send(Hello(self._replica.number, self._scratch.name))
        return connection, _Link(connection)

    def _find_program(self) -> Connection | None:
        """Return a connection to the program, which is started if it is not there; None if another has to do that."""
        folder = self._replica.run_folder
        if not self._starts:
            return _connect(folder)
        with FileLock(folder / LOCK):
            found = _connect(folder)
            return found or self._start_program()

    def _start_program(self) -> Connection:
        folder = self._replica.run_folder
        (folder / ADDRESS).unlink(missing_ok=True)
        command = [sys.executable, "-c", PROGRAM, str(folder)]
        # In a session of its own: signals to the replica's group are not meant for what others share.
        self.program = program = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert program.stdin is not None
        with program.stdin, suppress(BrokenPipeError):
            pickle.dump(self._task, program.stdin)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and program.poll() is None:
            if found := _connect(folder):
                return found
            time.sleep(0.05)
        raise OSError(f"the learner of {folder} has not started; its messages are on standard error")


class _Link(LearnerHandle):
    """The program as one replica sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @override
    def kill(self) -> None:
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as of_connection:
            of_connection.shutdown(socket.SHUT_RDWR)  # a thread that waits for a message sees the end

    @override
    def join(self) -> None:
        """Wait for nothing: the program serves other replicas."""


def _connect(folder: Path) -> Connection | None:
    """Return a connection to the program of a run; None if none listens.

    The program answers: the socket of one that is being killed may still take a connection.
    """
    with suppress(OSError, EOFError):
        connection = Client((folder / ADDRESS).read_text(encoding="utf-8"), "AF_UNIX")
        if connection.poll(START_SECONDS) and connection.recv_bytes() == READY:
            return connection
        connection.close()
    return None
