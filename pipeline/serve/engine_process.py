"""A server's run in a process of its own, which is started again after a crash.

    this process (HTTP)                             the engine's process
    submit(), encode(), ... ==pipe=> one thread  -> LiveEngine of a ServerRun
    listeners, metrics      <=pipe== one thread  <- chunks, events, status, log records

If the engine's process ends, the listeners of all unfinished requests receive `Finish.FAILED`, and the run is resumed
from its last commit in a new process. Requests that arrive in between are refused with the seconds to wait.
"""

import logging
import math
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from typing_extensions import override

from pipeline.config.settings import Config
from pipeline.log_records import PROJECT, handle_record
from pipeline.serve.engine_worker import (
    EngineAnswer,
    EngineCall,
    EngineEnded,
    EngineReady,
    EngineSetup,
    GrammarHandle,
    RequestPart,
    run_engine,
)
from pipeline.serve.messages import (
    GRACE_SECONDS,
    BusyError,
    Chunk,
    ChunkListener,
    EncodedPrompt,
    Engine,
    EngineStatus,
    Finish,
    GenerationRequest,
)
from stages.sampling.grammars import Grammar, GrammarSource
from store.errors import RunError
from store.events import Event

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

LOG = logging.getLogger("omnidraft.serve")

ANSWER_SECONDS = 10.0  # for an engine that is alive to take a request


class RestartBudget:
    """Decides whether and when something that ended is started again.

    Args:
        most: restarts within `window` seconds.
        window: in seconds.
        first_delay: seconds before the first restart; doubled with each one within the window.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        most: int = 5,
        window: float = 600.0,
        first_delay: float = 0.5,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._window, self._first_delay, self._now = most, window, first_delay, now
        self._times: deque[float] = deque()
        self.restarts = 0

    def next_delay(self) -> float | None:
        """Count a restart and return the seconds to wait before it; None if there were too many.

        >>> budget = RestartBudget(most=2, window=60, first_delay=1, now=lambda: 0.0)
        >>> [budget.next_delay() for _ in range(3)]
        [1.0, 2.0, None]
        """
        now = self._now()
        while self._times and now - self._times[0] >= self._window:
            self._times.popleft()
        if len(self._times) >= self._most:
            return None
        delay = self._first_delay * 2.0 ** len(self._times)
        self._times.append(now)
        self.restarts += 1
        return delay


class EngineDownError(BusyError):
    """Raised by all methods while the engine's process is restarted."""

    def __init__(self, retry_after: float) -> None:
        reason = "the engine is restarted after an error; try again"
        super().__init__(reason, math.ceil(retry_after), restarting=True)


class EngineProcess(Engine):
    """The engine of a server, in its own process. As a context manager it ends the process, which commits.

    Args:
        config: all settings; of a resumed run those that it began with.
        run: the run's name on a command line.
        on_event: called with the events that metrics count, on a thread of this object.
        resume: resume the run.
        budget: of restarts.

    Raises:
        OmnidraftError: as `ServerRun`, which the process makes.
    """

    def __init__(
        self,
        config: Config,
        run: str,
        on_event: Callable[[Event], None],
        *,
        resume: bool = False,
        budget: RestartBudget | None = None,
    ) -> None:
        self._setup = EngineSetup(config, run, resume, PROJECT.getEffectiveLevel())
        self._on_event, self._budget = on_event, budget or RestartBudget()
        self._context = get_context("spawn")
        self._numbers = count()
        self._lock = threading.Lock()  # of the four below
        self._connection: Connection | None = None
        self._calls: dict[int, Future[Any]] = {}
        self._listeners: dict[int, ChunkListener] = {}
        self._restart_at = 0.0
        self._sending, self._closing = threading.Lock(), threading.Event()
        self._tokens: tuple[bytes, ...] = ()
        self._status: EngineStatus | None = None
        self._first: Future[None] = Future()
        self.failure: BaseException | None = None
        self._process: BaseProcess | None = None
        self._thread = threading.Thread(target=self._keep_alive, name="engine-connection", daemon=True)
        self._thread.start()
        try:
            self._first.result()
        except BaseException:
            self._closing.set()
            if self._process:
                self._process.kill()
            self._thread.join()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._close(0.0 if kind else GRACE_SECONDS)
        self._thread.join()
        if self.failure and not error:
            raise RunError(f"the engine stopped: {self.failure!r}") from self.failure

    @property
    def pid(self) -> int | None:
        """Number of the engine's process; None while there is none."""
        return self._process.pid if self._process else None

    @property
    @override
    def vocabulary_size(self) -> int:
        return len(self._tokens)

    @override
    def encode(self, text: str) -> EncodedPrompt:
        prompt: EncodedPrompt = self._call("encode", text).result()
        return prompt

    @override
    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> EncodedPrompt:
        prompt: EncodedPrompt = self._call("encode_chat", messages, tools).result()
        return prompt

    @override
    def compile_grammar(self, source: GrammarSource) -> Grammar:
        self._call("compile_grammar", source).result()
        return GrammarHandle(source)

    @override
    def decode_token(self, token: int) -> bytes:
        return self._tokens[token] if 0 <= token < len(self._tokens) else b""

    @override
    def submit(self, request: GenerationRequest, listener: ChunkListener) -> Callable[[], None]:
        grammar = request.grammar.source if isinstance(request.grammar, GrammarHandle) else None
        number = next(self._numbers)
        with self._lock:
            self._listeners[number] = listener
        try:
            self._call("submit", number, replace(request, grammar=None), grammar).result(ANSWER_SECONDS)
        except BaseException as error:
            with self._lock:
                self._listeners.pop(number, None)
            if isinstance(error, TimeoutError):
                self._cancel(number)
                raise EngineDownError(ANSWER_SECONDS) from error
            raise
        return lambda: self._cancel(number)

    def _cancel(self, number: int) -> None:
        with suppress(OSError):
            self._send(EngineCall(next(self._numbers), "cancel", (number,)))

    @override
    def read_status(self) -> EngineStatus:
        assert self._status is not None  # since the first start
        ready = self._connection is not None and self._status.ready and not self._closing.is_set()
        return replace(self._status, ready=ready, engine_restarts=self._budget.restarts)

    def _call(self, method: str, *arguments: Any) -> "Future[Any]":
        """Send a call and return its future. Raises `EngineDownError`, also through the future."""
        number, future = next(self._numbers), Future[Any]()
        with self._lock:
            if self._connection is None:
                raise EngineDownError(max(1.0, self._restart_at - time.monotonic()))
            self._calls[number] = future
        with suppress(OSError):  # it has just ended: the future is failed with all others
            self._send(EngineCall(number, method, arguments))
        return future

    def _send(self, message: EngineCall) -> None:
        connection = self._connection
        if connection is None:
            raise OSError("the engine's process has ended")
        content = pickle.dumps(message)
        with self._sending:
            connection.send_bytes(content)

    def _keep_alive(self) -> None:
        """Start the process, receive from it and start it again; runs on a thread of its own."""
        try:
            self.failure = self._run_until_closed()
        except BaseException as error:  # for example no process can be started
            self.failure = error
            self._fail_all()
        if not self._first.done():
            self._first.set_exception(self.failure or RunError("the engine's process ended while it loaded the models"))

    def _run_until_closed(self) -> BaseException | None:
        """Return the error after which the process is not started again; None after a close."""
        while True:
            ended = self._run_once()
            self._fail_all()
            if self._closing.is_set() or not self._first.done():
                return ended
            ended = ended or RunError("its process was ended")
            delay = self._budget.next_delay()
            if delay is None:
                LOG.error("the engine stopped again: %r; it is not restarted any more", ended)
                return ended
            LOG.error("the engine stopped: %r; it resumes from its last commit in %.1f s", ended, delay)
            self._restart_at = time.monotonic() + delay
            if self._closing.wait(delay):
                return None
            self._setup = replace(self._setup, restarted=True)

    def _run_once(self) -> BaseException | None:
        """Start the process and receive from it until it ends. Returns the error that it reported."""
        ours, theirs = self._context.Pipe()
        self._process = process = self._context.Process(target=run_engine, args=(theirs, self._setup), name="engine")
        process.start()
        theirs.close()
        reported: list[BaseException | None] = [None]
        try:
            while True:
                for message in pickle.loads(ours.recv_bytes()):
                    self._handle(message, ours, reported)
        except (EOFError, OSError):
            pass
        except BaseException as error:  # for example a message that cannot be decoded
            reported[0] = error
            process.kill()
        with self._lock:
            self._connection = None
        process.join()
        ours.close()
        return reported[0]

    def _handle(self, message: object, connection: Connection, reported: list[BaseException | None]) -> None:
        match message:
            case RequestPart():
                self._deliver(message)
            case EngineAnswer():
                self._resolve(message)
            case EngineReady():
                self._begin(message, connection)
            case EngineStatus():
                self._status = message
            case EngineEnded():
                reported[0] = message.error
            case logging.LogRecord():
                handle_record(message, message.processName or "engine")
            case _:
                self._on_event(message)  # type: ignore[arg-type]

    def _deliver(self, part: RequestPart) -> None:
        with self._lock:
            found = self._listeners.pop if part.chunk.finish else self._listeners.get
            listener = found(part.number, None)
        if listener:
            listener(part.chunk)

    def _resolve(self, answer: EngineAnswer) -> None:
        with self._lock:
            future = self._calls.pop(answer.number, None)
        if future and answer.error:
            future.set_exception(answer.error)
        elif future:
            future.set_result(answer.value)

    def _begin(self, ready: EngineReady, connection: Connection) -> None:
        self._tokens, self._status = ready.tokens, ready.status
        with self._lock:
            self._connection = connection
        if not self._first.done():
            self._first.set_result(None)
        elif self._closing.is_set():
            self._close(0.0)
        else:
            LOG.warning("the engine serves again")

    def _close(self, grace_seconds: float) -> None:
        """Let the process end; one that does not serve is killed."""
        try:
            self._send(EngineCall(next(self._numbers), "close", (grace_seconds,)))
        except OSError:
            if self._process:
                self._process.kill()

    def _fail_all(self) -> None:
        """Fail all unfinished calls and requests, because the engine ended."""
        with self._lock:
            listeners, self._listeners = self._listeners, {}
            calls, self._calls = self._calls, {}
        for future in calls.values():
            future.set_exception(EngineDownError(1.0))
        for listener in listeners.values():
            listener(Chunk("", finish=Finish.FAILED))
