"""A learner that runs elsewhere, as the process that decodes sees it.

    this process                                        the learner's process
    post() -> bounded queue -> sending thread   =======>  on_prompt_completed()
    take_new_weights() <- receiving thread      <=======  a report: progress, events, a file of weights

If the learner dies it is opened again; it continues from its last commit.
"""

import logging
import math
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from typing_extensions import override

from pipeline.learner_protocol import CompletedPrompt
from pipeline.learning.remote_learner import LearnerConnection
from pipeline.log_records import handle_record
from stages.learn.training.weight_update import Weights, read_weights, write_weights
from store.events import Event as LoggedEvent

LOG = logging.getLogger("omnidraft.learner")

QUEUE_LIMIT = 256  # completed prompts that may wait for the learner; the oldest are dropped for newer ones
EXAMPLE_LIMIT = 16  # waiting prompts from which on no training examples are collected
RESTARTS_WITHIN = 60.0  # seconds; a learner that ends twice within them is not restarted
END = b""  # the last message to the learner


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


class LearnerClient(LearnerConnection, ABC):
    """Keeps a connection to a learner. A subclass opens it, and calls `_start` when it is ready to.

    Args:
        on_event: called with each event of the learner, on a thread of this object.
        published: number of the newest published version so far.
    """

    def __init__(self, on_event: Callable[[LoggedEvent], None], published: int | None) -> None:
        self._on_event = on_event
        self._scratch = TemporaryDirectory(prefix="omnidraft-weights-")
        self._waiting: deque[CompletedPrompt] = deque()
        self._change = threading.Condition()
        self._ending = False
        self._learner: LearnerHandle | None = None
        self._new_weights: Weights | None = None
        self.posted = self.dropped = self.handled = 0
        self.published = published
        self.alive, self.restarts = True, 0
        self._thread = threading.Thread(target=self._keep_alive, name="learner-connection", daemon=True)

    def _start(self) -> None:
        self._thread.start()

    @abstractmethod
    def _open(self) -> tuple[Connection, LearnerHandle] | None:
        """Return a connection to the learner; None if this object is closed before there is one."""

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
        """Let the learner process waiting prompts and commit; kill it after `timeout` seconds."""
        with self._change:
            self._ending = True
            self._change.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive() and self._learner:
            self._learner.kill()
        self._thread.join()
        self._scratch.cleanup()

    def _keep_alive(self) -> None:
        """Open the connection, receive from it and open it again; runs on a thread of its own."""
        try:
            self._run_until_closed()
        except BaseException as error:  # for example a report that cannot be decoded
            LOG.error("the learner failed: %r; serving continues without learning", error)
            if self._learner:
                self._learner.kill()
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

    def _run_once(self) -> None:
        """Open a connection and receive from it until it ends."""
        opened = self._open()
        if opened is None:
            return
        ours, learner = opened
        self._learner = learner
        over = threading.Event()
        sender = threading.Thread(target=self._send, args=(ours, over), name="learner-sender", daemon=True)
        sender.start()
        handled_before = self.handled
        try:
            while True:
                self._handle_report(pickle.loads(ours.recv_bytes()), handled_before)
        except (EOFError, OSError):
            pass
        learner.join()
        over.set()
        with self._change:
            self._change.notify_all()
        sender.join()
        ours.close()
        with self._change:
            self.dropped = (
                self.posted - self.handled - len(self._waiting)
            )  # including prompts that the learner had received

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
        """Return the next message to send; None when the connection closes. Raises OSError if the learner ended."""
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


def write_weights_file(weights: Weights | None, scratch: str) -> str | None:
    """Write weights for a `ProcessReport` into a folder. Returns the path of the file; None without weights."""
    if weights is None:
        return None
    path = Path(scratch, f"{weights.drafter_version}-{weights.head_version}.safetensors")
    write_weights(weights, path)
    return str(path)
