"""A function in a process of its own. All child processes of the project are of this kind.

    this process                                  the child
    Child(run, ...)       --new interpreter-->    run(parent, ...)
    send(), receive()     ====socket pair====     parent.receive(), parent.send()

    Child        one process; messages in both directions
    ChildCalls   answers calls one at a time, each with a time limit; started by the first call and after it has ended
    KeptChild    receives messages on a thread, and starts the process again by a rule

A child is no fork of this process, and no process of `multiprocessing`: daemonic processes, such as vLLM's workers, may
not have those. It ends when this process ends, in whatever way. It ignores the signals of a terminal and of a service
manager, which are meant for this process. Its log records and warnings are handled in this process as if they were its
own.
"""

import io
import logging
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from typing_extensions import override

from store.collection import pause_collection
from store.errors import OmnidraftError
from store.log_records import PROJECT, forward_records, handle_record

LOG = logging.getLogger("omnidraft.child")

START_SECONDS = 60.0  # for a child that answers calls to be ready
EXIT_SECONDS = 5.0  # from the end of the connection to that of the process
SPARE_SECONDS = 2  # after the limit of a call, in which the caller kills the child; then it ends by itself
_PROGRAM = "from store.child import main; main()"
_MESSAGE, _RECORD, _ERROR = "message", "record", "error"


class ChildError(Exception):
    """A child has ended or did not start; the message names its last error."""

    def __init__(self, reason: str, error: BaseException | None = None) -> None:
        super().__init__(reason)
        self.error = error  # that the child raised, if it ended by one that can be pickled


class CallError(Exception):
    """The function that answers a call raised an error; the child continues."""


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, bytes and collections of these alone, so that what it reads cannot run code."""

    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"a plain message must not name {module_name}.{global_name}")


class Child:
    """A process that runs a function, and the connection to it. Any thread may send, one at a time may receive.

    Args:
        run: called there with a `Parent` and `args`; all can be pickled.
        name: of the process, in messages and in its command line.
        niceness: added to its priority number.
        variables: names of the environment variables that it inherits; None for all.
        plain: accept only messages from it that consist of numbers, texts, bytes and collections of these. For a child
            that runs what others wrote.
    """

    def __init__(
        self,
        run: Callable[..., None],
        *args: Any,
        name: str,
        niceness: int = 0,
        variables: Collection[str] | None = None,
        plain: bool = False,
    ) -> None:
        self.name, self._plain = name, plain
        self._unpickler = _PlainUnpickler if plain else pickle.Unpickler
        self._sending, self._last_error = threading.Lock(), ("", b"")
        self._connection, theirs = Pipe()
        environment = {key: value for key, value in os.environ.items() if variables is None or key in variables}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), name]
        with theirs:
            # A process group of its own gets no Ctrl-C of the terminal. A session of its own would also have a full
            # share of the processors, whatever its priority.
            self._process = subprocess.Popen(
                [*command, str(PROJECT.getEffectiveLevel()), str(niceness)],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        weakref.finalize(self, _end_process, self._process, self._connection, os.getpid())
        with suppress(OSError):  # it has ended: `receive` names the error
            self._connection.send_bytes(pickle.dumps((run, args)))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: Any) -> None:
        """Send a message; blocks while the pipe is full. Raises `ChildError` if the process has ended."""
        content = pickle.dumps(message)
        try:
            with self._sending:
                self._connection.send_bytes(content)
        except OSError as error:
            raise ChildError(f"the process '{self.name}' has ended") from error

    def receive(self, seconds: float | None = None) -> Any:
        """Return the next message. Raises `TimeoutError` after `seconds`, and `ChildError` if the process has ended."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        try:
            while self._connection.poll(None if seconds is None else max(0.0, deadline - time.monotonic())):
                kind, value = self._unpickler(io.BytesIO(self._connection.recv_bytes())).load()
                if kind == _MESSAGE:
                    return value
                if kind == _RECORD:
                    handle_record(logging.makeLogRecord(value), self.name)
                else:
                    self._last_error = value
        except (EOFError, OSError):
            raise self._describe_end() from None
        except Exception as error:
            raise ChildError(f"the process '{self.name}' sent what cannot be read: {error!r}") from error
        raise TimeoutError(f"the process '{self.name}' must answer within {seconds:g} s")

    def kill(self) -> None:
        """End the process at once. A thread that waits in `receive` gets a `ChildError`."""
        self._process.kill()

    def close(self) -> None:
        """End the process, if it has not ended, and the connection. Called by the thread that receives."""
        self.kill()
        self._process.wait()
        with self._sending:
            self._connection.close()

    def _describe_end(self) -> ChildError:
        try:
            status = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:  # one of its own children holds the connection
            self.kill()
            status = self._process.wait()
        text, pickled = self._last_error
        if text:
            error = None if self._plain else pickle.loads(pickled)
            return ChildError(f"the process '{self.name}' failed: {text}", error)
        by = f"with exit status {status}" if status >= 0 else f"by signal {-status} ({signal.strsignal(-status)})"
        return ChildError(f"the process '{self.name}' ended {by}")


def _end_process(process: "subprocess.Popen[bytes]", connection: Connection, owner: int) -> None:
    """End what a `Child` that is no longer used has started; a fork of its process leaves it alone."""
    if os.getpid() == owner and process.poll() is None:
        process.kill()
        process.wait()
    connection.close()


class ChildCalls:
    """Calls of a function in a child, one at a time. Any thread may call; a fork of this process has its own child.
    `make` is called in the child with `args` and returns the function that answers calls; both raise only in the child.
    The options are as of `Child`. Answers consist of numbers, texts, bytes and collections of these.
    """

    def __init__(self, make: Callable[..., Callable[[Any], Any]], *args: Any, name: str, **options: Any) -> None:
        self._arguments, self._options = (make, args), {"name": name, "plain": True, **options}
        self._lock = threading.Lock()  # held during a call
        self._child: Child | None = None
        self._owner = 0  # the process that started the child
        self._ready = self._closed = False

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    def start(self) -> None:
        """Start the child before the first call, which waits until it is ready."""
        with self._lock:
            self._start()

    def call(self, request: Any, seconds: float) -> Any:
        """Return the answer to a request.

        Raises `TimeoutError` after `seconds`, when the child was ended; `ChildError` if it ended during the call or did
        not start; `CallError` if the function raised an error.
        """
        with self._lock:
            try:
                child = self._connect()
                with suppress(ChildError):  # `receive` names the error
                    child.send((request, seconds))
                failure, answer = child.receive(seconds)
            except BaseException:  # also an interrupt: the answer that follows is not that of the next call
                self._end()
                raise
        if failure:
            raise CallError(failure)
        return answer

    def close(self) -> None:
        """End the child; the call that runs and later ones raise `ChildError`."""
        self._closed = True
        if child := self._child:
            child.kill()
        with self._lock:
            self._end()

    def _start(self) -> Child:
        if self._owner != os.getpid():
            self._child = None  # that of the process that this one was forked from
        if self._child and self._child.alive:
            return self._child
        self._end()
        if self._closed:
            raise ChildError(f"the process '{self._options['name']}' was closed")
        self._owner = os.getpid()
        self._ready = False
        self._child = Child(_answer_calls, *self._arguments, **self._options)
        return self._child

    def _connect(self) -> Child:
        child = self._start()
        try:
            if not self._ready:
                child.receive(START_SECONDS)
                self._ready = True
        except TimeoutError:
            raise ChildError(f"the process '{self._options['name']}' must start in {START_SECONDS:g} s") from None
        return child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child:
            child.close()


def limit_memory(more: int) -> None:
    """Limit the address space of this process to its size and `more` bytes, if the system reports the size."""
    sizes = Path("/proc/self/statm")
    if not sizes.exists():
        return
    import resource

    now = int(sizes.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


class RestartBudget:
    """Decides whether and when a child that ended is started again: at most so often within `window` seconds, and
    after a delay in seconds that doubles with each restart within them. Restarts before a child that worked for
    `proven` seconds do not count: it did not fail in a loop.
    """

    def __init__(
        self,
        most: int = 5,
        window: float = 600.0,
        first_delay: float = 0.5,
        proven: float = 30.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._window, self._first_delay, self._proven = most, window, first_delay, proven
        self._now, self._times = now, deque[float]()
        self._began: float | None = None  # when the present child began to work
        self.restarts = 0

    def begin(self) -> None:
        """Note that a child works from now on."""
        self._began = self._now()

    def next_delay(self) -> float | None:
        """Count a restart and return the seconds to wait before it; None if there were too many.

        >>> budget = RestartBudget(most=2, window=60, first_delay=1, now=lambda: 0.0)
        >>> [budget.next_delay() for _ in range(3)]
        [1.0, 2.0, None]
        """
        now = self._now()
        if self._began is not None and now - self._began >= self._proven:
            self._times.clear()
        self._began = None
        while self._times and now - self._times[0] >= self._window:
            self._times.popleft()
        if len(self._times) >= self._most:
            return None
        delay = self._first_delay * 2.0 ** len(self._times)
        self._times.append(now)
        self.restarts += 1
        return delay


class KeptChild:
    """A child that is started again after it ended. `start` starts a child: the first at once, the others on a thread
    of this object, which calls `on_message` with each message and `on_end` after each end, with a `ChildError` or what
    `start` or `on_message` raised. That returns the seconds before the next start; None to start no other.
    """

    def __init__(
        self,
        start: Callable[[], Child],
        on_message: Callable[[Any], None],
        on_end: Callable[[BaseException], float | None],
    ) -> None:
        self._start, self._on_message, self._on_end = start, on_message, on_end
        self._closing = threading.Event()
        self._child: Child | None = start()
        self._thread = threading.Thread(target=self._run, name="child-connection", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    def send(self, message: Any) -> None:
        """Send a message. Raises `ChildError` while there is no process."""
        child = self._child
        if child is None:
            raise ChildError("no process runs")
        child.send(message)

    def close(self, seconds: float | None = None, last: Any = None) -> None:
        """Send a last message, if there is one, wait until the process has ended, and kill it after `seconds`."""
        self._closing.set()
        if last is not None:
            try:
                self.send(last)
            except ChildError:
                self.kill()
        self._thread.join(seconds)
        while self._thread.is_alive():
            self.kill()
            self._thread.join(1.0)

    def kill(self) -> None:
        if child := self._child:
            child.kill()

    def _run(self) -> None:
        while True:
            try:
                if self._child is None:
                    self._child = self._start()
                    if self._closing.is_set():  # `close` may have found no process to kill
                        self._child.kill()
                while True:
                    self._on_message(self._child.receive())
            except BaseException as caught:
                error = caught
            ended, self._child = self._child, None
            if ended:
                ended.close()
            delay = self._on_end(error)
            if delay is None or self._closing.wait(delay):
                return


class Parent:
    """The connection of a child to the process that started it. Any thread may send, one at a time may receive."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, threading.Lock()

    def send(self, message: Any, kind: str = _MESSAGE) -> None:
        content = pickle.dumps((kind, message))
        with self._sending:
            self._connection.send_bytes(content)

    def poll(self, seconds: float) -> bool:
        return self._connection.poll(seconds)

    def receive(self) -> Any:
        return pickle.loads(self._connection.recv_bytes())


def make_picklable(error: BaseException) -> BaseException:
    """Return the error, or one with its text if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return OmnidraftError(repr(error))
    return error


def main() -> None:
    """Run a function for the process that started this one; the program of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the other process, which then ends this one
    connection, level, niceness = Connection(int(sys.argv[1])), int(sys.argv[3]), int(sys.argv[4])

    def exit_with_parent() -> None:
        """Exit as soon as the other end of the connection is closed, also during work."""
        ended = select.poll()
        ended.register(connection.fileno(), 0)  # the end is always reported
        ended.poll()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    with suppress(OSError):
        os.nice(niceness)
    parent, status = Parent(connection), 0

    def send_record(record: logging.LogRecord) -> None:
        plain = (int, float, str, type(None))
        values = {key: value if isinstance(value, plain) else str(value) for key, value in vars(record).items()}
        parent.send(values, _RECORD)

    forward_records(send_record, level)
    logging.captureWarnings(True)
    warned = logging.getLogger("py.warnings")
    warned.handlers, warned.propagate = PROJECT.handlers, False
    try:
        with pause_collection():
            run, args = parent.receive()  # imports what runs
        run(parent, *args)
    except BaseException as error:
        status = 1
        if not isinstance(error, OmnidraftError | EOFError):
            LOG.error("an error ended the process '%s'", sys.argv[2], exc_info=error)
        with suppress(OSError):  # the other process has ended
            parent.send((repr(error), pickle.dumps(make_picklable(error))), _ERROR)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)  # threads of libraries may still run


def _answer_calls(parent: Parent, make: Callable[..., Callable[[Any], Any]], args: tuple[Any, ...]) -> None:
    with pause_collection():
        answer = make(*args)
    parent.send(None)
    while True:
        request, seconds = parent.receive()
        # Ends this process where no thread of it can run and the caller is no longer there to end it.
        signal.alarm(math.ceil(seconds) + SPARE_SECONDS)
        try:
            parent.send(("", answer(request)))
        except MemoryError:
            parent.send(("it takes too much memory", None))
        except Exception as error:
            LOG.exception("a call of '%s' failed", sys.argv[2])
            parent.send((repr(error), None))
        signal.alarm(0)
