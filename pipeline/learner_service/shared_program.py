"""The program of a learner that replicas share; see `shared`.

It listens before anything heavy is loaded. A thread per connection receives; all messages are handled by one thread, in
the order in which they arrive.
"""

import logging
import os
import pickle
import signal
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pipeline.learner_service.service import LearnerConfig, LearnerService
    from stages.training.weight_update import Weights

LOG = logging.getLogger("omnidraft.learner")

ADDRESS = ".replicas"  # file in the run's folder with the path of the socket
READY = b"ready"  # what each connection begins with
NICENESS = 10
BACKLOG = 64  # replicas that may connect at the same time
RECEIVED = 64  # messages that may wait; more stay with the replicas, which drop some
FIRST_SECONDS = 60.0  # for the first replica to connect
LOCK_SECONDS = 30.0  # in which a program that ends has left the run to this one
UNSENT_SECONDS = 10.0  # for MLflow at the end


class ProgramTask(NamedTuple):
    """What the program does.

    Attributes:
        setup: configuration of the learner service; None to learn nothing and pass memories on.
        log_level: lowest level of the log records that it sends to the first replica.
    """

    setup: "LearnerConfig | None"
    log_level: int


class Hello(NamedTuple):
    """The first message of a connection.

    Attributes:
        replica: its number.
        scratch: a folder for files of weights, which the replica removes.
    """

    replica: int
    scratch: str


@dataclass
class _Client:
    """A replica that is connected: its first message, and the number of its prompts that were processed."""

    connection: Connection
    hello: Hello
    handled: int = 0
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: object) -> None:
        """Send a message. A replica that is gone misses it; its end is received."""
        with suppress(OSError), self.sending:
            self.connection.send_bytes(pickle.dumps(message))


class _Change(Enum):
    """Received, in addition to the messages of a replica, when its connection begins and ends."""

    JOINED = auto()
    LEFT = auto()


class _Program:
    """Serves replicas until the last one leaves.

    Args:
        service: learns; None to pass on memories only.
        inbox: clients and their messages.
    """

    def __init__(self, service: "LearnerService | None", inbox: "Queue[tuple[_Client, Any]]") -> None:
        from stages.memory.memory_exchange import MemoryExchange

        self._service, self._inbox, self._memories = service, inbox, MemoryExchange()
        self._clients: list[_Client] = []  # by number of the replica
        self._weights: Weights | None = service.take_new_weights() if service else None

    def run(self) -> None:
        """Handle messages until no replica is connected."""
        with suppress(Empty):
            self._handle(*self._inbox.get(timeout=FIRST_SECONDS))
            while self._clients:
                self._handle(*self._inbox.get())

    def send_record(self, record: logging.LogRecord) -> None:
        """Send a log record to the first replica."""
        for client in self._clients[:1]:
            client.send(record)

    def _handle(self, client: _Client, message: Any) -> None:
        from stages.memory.memory_share import MemoryShare

        if message is _Change.JOINED:
            self._join(client)
            return
        if message is _Change.LEFT:
            self._leave(client)
            return
        # Read here and not by the thread that received it: two threads must not import modules at the same time.
        content = pickle.loads(message)
        if isinstance(content, MemoryShare):
            self._memories.receive(_name(client), content)
            for other in self._clients:
                if other is not client:
                    other.send(self._memories.take(_name(other)))
        else:
            self._learn(client, content)

    def _join(self, client: _Client) -> None:
        self._clients = sorted([*self._clients, client], key=lambda one: one.hello.replica)
        missed = self._memories.take(_name(client))
        if missed.texts or missed.cells:
            client.send(missed)
        self._report(client, self._weights)

    def _learn(self, client: _Client, finished: Any) -> None:
        assert self._service is not None
        self._service.on_prompt_completed(finished)
        client.handled += 1
        weights = self._service.take_new_weights()
        self._weights = weights or self._weights
        for one in self._clients:
            self._report(one, weights)

    def _leave(self, client: _Client) -> None:
        """Forget a replica. Before the last one sees the end of its connection, everything is committed."""
        if self._service and len(self._clients) == 1:
            if unsent := self._service.pause(UNSENT_SECONDS):
                LOG.warning(
                    "MLflow did not take %d messages; they are kept with the run", unsent, extra={"unsent": unsent}
                )
            self._report(client, None)
        self._clients.remove(client)
        client.connection.close()

    def _report(self, client: _Client, weights: "Weights | None") -> None:
        """Report to a replica; the first one receives the events."""
        from pipeline.learner_service.client import ProcessReport, write_weights_file

        if self._service is None:
            return
        events = tuple(self._service.drain_events()) if client is self._clients[0] else ()
        with suppress(OSError):  # the replica is gone, and with it the folder
            path = write_weights_file(weights, client.hello.scratch)
            client.send(ProcessReport(client.handled, events, path, self._service.published))


def _name(client: _Client) -> str:
    return f"{client.hello.replica:09d}"


def _accept(listener: Listener, inbox: "Queue[tuple[_Client, Any]]") -> None:
    """Receive from all that connect, each on a thread of its own."""
    with suppress(OSError):  # the listener is closed
        while True:
            connection = listener.accept()
            threading.Thread(target=_receive, args=(connection, inbox), name="replica", daemon=True).start()


def _receive(connection: Connection, inbox: "Queue[tuple[_Client, Any]]") -> None:
    with suppress(EOFError, OSError):
        connection.send_bytes(READY)
        client = _Client(connection, connection.recv())
        inbox.put((client, _Change.JOINED))
        with suppress(EOFError, OSError):
            while message := connection.recv_bytes():
                inbox.put((client, message))
        inbox.put((client, _Change.LEFT))


def _open_service(setup: "LearnerConfig") -> "LearnerService":
    """Return the service, once a program that ends has left the run."""
    from pipeline.learner_service.service import LearnerService
    from store.errors import RunError

    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return LearnerService(setup)
        except RunError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _serve(inbox: "Queue[tuple[_Client, Any]]", task: ProgramTask) -> None:
    from pipeline.log_records import forward_records

    with ExitStack() as stack:
        service = stack.enter_context(_open_service(task.setup)) if task.setup else None
        program = _Program(service, inbox)
        forward_records(program.send_record, task.log_level)
        program.run()


def main() -> None:
    """Serve the replicas of the run whose folder is the argument; a `ProgramTask` comes on standard input."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the replicas
    with suppress(OSError):
        os.nice(NICENESS)
    address = Path(sys.argv[1], ADDRESS)
    with TemporaryDirectory(prefix="omnidraft-learner-") as folder:
        place = str(Path(folder, "socket"))  # in a folder of this user's; the run's path may be too long for a socket
        with Listener(place, "AF_UNIX", BACKLOG) as listener:
            inbox: Queue[tuple[_Client, Any]] = Queue(RECEIVED)
            threading.Thread(target=_accept, args=(listener, inbox), name="replicas", daemon=True).start()
            partial = address.with_name(f"{ADDRESS}.{os.getpid()}")
            partial.write_text(place, encoding="utf-8")
            partial.replace(address)
            _serve(inbox, pickle.load(sys.stdin.buffer))
            with suppress(OSError):  # the next program has removed it
                if address.read_text(encoding="utf-8") == place:
                    address.unlink()
