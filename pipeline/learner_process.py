"""A `LearnerHost` in a process of its own, beside one that serves and must not wait.

    this process                                       the other
    post() -> bounded queue -> sending thread  ==pipe=>  completed()
    news() <- newest weights <- receiving thread <=pipe==  a report: how far it is, what it tells, a file of weights

The other process has a lower priority and a budget of time. If it dies it is started again, from its last commit.
"""

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
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.budget import Budget
from pipeline.coach import Finished
from pipeline.learner_host import HostSetup, LearnerHost
from stages.weights import Weights, read_weights, write_weights
from store.events import Event as LoggedEvent

WAITING = 256  # completed prompts that may wait for the learner; the oldest are given up for newer ones
SOON = 16  # completed prompts before the learner with which a new one is worth a lesson
NICENESS = 10
UNSENT_SECONDS = 10.0  # that the learner waits for MLflow when it ends
RESTARTS_WITHIN = 60.0  # seconds; a learner that ends twice within them is not started again

_END = b""


@dataclass(frozen=True)
class _Report:
    """What the learner says of itself.

    Attributes:
        handled: completed prompts so far.
        told: events since the last report.
        weights: a file of new weights.
        published: number of the newest version.
    """

    handled: int
    told: tuple[LoggedEvent, ...]
    weights: str | None
    published: int | None


class LearnerProcess:
    """A `Link` to a learner in a process of its own.

    Args:
        setup: of the host.
        share: of one core that it may use.
        told: is given its events; called on a thread of this object.
        notice: is told what the user should know.
        published: number of the newest version so far.
    """

    def __init__(
        self,
        setup: HostSetup,
        share: float,
        told: Callable[[LoggedEvent], None],
        notice: Callable[[str], None],
        published: int | None = None,
    ) -> None:
        self._setup, self._share, self._told, self._notice = setup, share, told, notice
        self._scratch = TemporaryDirectory(prefix="omnidraft-weights-")
        self._waiting: deque[Finished] = deque()
        self._change = threading.Condition()
        self._ending = False
        self._context = get_context("spawn")
        self._hurry = self._context.Event()
        self._process: BaseProcess | None = None
        self._news: Weights | None = None
        self.posted = self.dropped = self.handled = 0
        self.published = published
        self.alive = True
        self._thread = threading.Thread(target=self._keep_alive, name="learner-link", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether a lesson would be looked at soon. One that would only wait need not be written."""
        return self.alive and self.lag < SOON

    @property
    def lag(self) -> int:
        """Completed prompts that it has not looked at yet."""
        return self.posted - self.dropped - self.handled

    def post(self, finished: Finished) -> None:
        """See `Link`."""
        with self._change:
            self.posted += 1
            self._waiting.append(finished)
            if len(self._waiting) > (WAITING if self.alive else 0):
                self._waiting.popleft()
                self.dropped += 1
            self._change.notify_all()

    def news(self) -> Weights | None:
        """See `Link`."""
        with self._change:
            found, self._news = self._news, None
        return found

    def close(self, timeout: float) -> None:
        """Let it finish what waits, without a budget now, commit and end; after `timeout` seconds it is killed."""
        self._hurry.set()
        with self._change:
            self._ending = True
            self._change.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive() and self._process:
            self._process.kill()
        self._thread.join()
        self._scratch.cleanup()

    def _keep_alive(self) -> None:
        """The thread that belongs to the process: starts it, receives from it, starts it again."""
        try:
            self._live()
        except BaseException as error:  # such as a report that cannot be read
            self._notice(f"the learner is given up: {error!r}; serving goes on without learning")
            if self._process:
                self._process.kill()
            self._give_up()

    def _live(self) -> None:
        ended = -math.inf
        while True:
            self._run_once()
            with self._change:
                if self._ending:
                    return
            before, ended = ended, time.monotonic()
            if ended - before < RESTARTS_WITHIN:
                self._give_up()
                self._notice("the learner ended twice within a minute and stays away; serving goes on without learning")
                return
            self._notice("the learner ended; it is started again from its last commit")

    def _give_up(self) -> None:
        with self._change:
            self.alive = False
            self.dropped += len(self._waiting)
            self._waiting.clear()

    def _run_once(self) -> None:
        """One life of the process."""
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._setup, self._share, self._scratch.name, self._hurry)
        self._process = process = self._context.Process(target=_learn, args=arguments, name="learner", daemon=True)
        process.start()
        theirs.close()
        over = threading.Event()
        sender = threading.Thread(target=self._send, args=(ours, over), name="learner-sender", daemon=True)
        sender.start()
        handled_before = self.handled
        try:
            while True:
                self._hear(pickle.loads(ours.recv_bytes()), handled_before)
        except (EOFError, OSError):
            pass
        process.join()
        over.set()
        with self._change:
            self._change.notify_all()
        sender.join()
        ours.close()
        with self._change:
            self.dropped = self.posted - self.handled - len(self._waiting)  # with what it held, which is lost

    def _hear(self, report: _Report, before: int) -> None:
        self.handled, self.published = before + report.handled, report.published
        for event in report.told:
            self._told(event)
        if report.weights:
            path = Path(report.weights)
            weights = read_weights(path)
            path.unlink()  # what is mapped stays readable
            with self._change:
                self._news = weights

    def _send(self, connection: Connection, over: threading.Event) -> None:
        """The thread that sends, so that nobody else waits for a full pipe."""
        with suppress(OSError):
            while (finished := self._next(over)) is not None:
                connection.send_bytes(pickle.dumps(finished))
            connection.send_bytes(_END)

    def _next(self, over: threading.Event) -> Finished | None:
        """The next to be sent; None when nothing will come any more. Raises OSError if nobody is there."""
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._ending or over.is_set())
            if over.is_set():
                raise OSError("the learner ended")
            return self._waiting.popleft() if self._waiting else None


def _learn(connection: Connection, setup: HostSetup, share: float, scratch: str, hurry: Event) -> None:
    """The other process. `hurry`: the server has ended, and nobody need be spared any more."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the server, which then lets us finish
    threading.Thread(target=_end_with_the_server, name="server-watch", daemon=True).start()
    with suppress(OSError):
        os.nice(NICENESS)
    budget, handled = Budget(share), 0

    def breathe() -> None:
        if not hurry.is_set():
            budget.breathe()

    with LearnerHost(setup, breathe=breathe) as host:
        connection.send_bytes(_report(host, handled, scratch))
        while message := connection.recv_bytes():
            budget.begin()
            host.completed(pickle.loads(message))
            handled += 1
            connection.send_bytes(_report(host, handled, scratch))
            breathe()
        host.pause(UNSENT_SECONDS)
        connection.send_bytes(_report(host, handled, scratch))


def _end_with_the_server() -> None:
    """At once, so that a server that goes on with the run finds it free. What was committed stands."""
    if server := parent_process():
        server.join()
        os._exit(1)


def _report(host: LearnerHost, handled: int, scratch: str) -> bytes:
    weights, path = host.news(), None
    if weights:
        path = str(Path(scratch, f"{weights.drafter_version}-{weights.head_version}.safetensors"))
        write_weights(weights, Path(path))
    return pickle.dumps(_Report(handled, tuple(host.told()), path, host.published))
