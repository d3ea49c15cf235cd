"""A server's run in a process of its own, which is started again after a crash.

    this process (HTTP)                             the engine's process
    submit(), encode(), ... ==pipe=> one thread  -> LiveEngine of a ServerRun
    listeners, metrics      <=pipe== one thread  <- chunks, events, status, log records

If the engine's process ends, the listeners of all unfinished requests receive `Finish.FAILED`, and the run is resumed
from its last commit in a new process. Requests that arrive in between are refused with the seconds to wait.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from typing_extensions import override

from pipeline.config.settings import Config, load
from pipeline.run.folder import CONFIG, is_unfinished, open_run
from pipeline.serve.engine import LiveEngine
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
    PlainPrompt,
)
from pipeline.serve.run import ServerRun
from stages.engine.checkpoints.deferred_imports import keep_arrow_alone
from stages.sampling.grammars import GrammarSource
from stages.vocabulary.chat import NO_VALUES
from store.child import Child, ChildError, KeptChild, Parent, RestartBudget, make_picklable
from store.errors import RunError
from store.events import BlockDone, Drifted, Event, Recalled, Updated
from store.log.run_log import Mirror

LOG = logging.getLogger("omnidraft.serve")
ANSWER_SECONDS = 10.0  # for an engine that is alive to take a request


COUNTED = (BlockDone, Updated, Drifted, Recalled)  # events that metrics count; others stay in the engine's process
POLL_SECONDS = 0.25  # between two looks at an engine that may have stopped


@dataclass(frozen=True)
class EngineSetup:
    """What the engine's process needs."""

    config: Config
    run: str  # the name on a command line: the folder, or the URI on an object store
    resume: bool
    restarted: bool = False  # another process has served the run before: resume what it has committed

    def open(self) -> tuple["EngineSetup", Path, Mirror]:
        """Return the setup with what has become of the run, its working folder and its mirror."""
        folder, mirror = open_run(Path(self.run), new=not (self.resume or self.restarted))
        if self.restarted and is_unfinished(folder):
            return replace(self, config=load(folder / CONFIG), resume=True), folder, mirror
        return self, folder, mirror


@dataclass(frozen=True)
class EngineCall:
    """A call of the engine, answered by `EngineAnswer` with the same number."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class EngineAnswer:
    """Result of a call, or the exception that it raised."""

    number: int
    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class EngineReady:
    """The engine's process serves."""

    tokens: tuple[bytes, ...]  # per id of the target's tokenizer its bytes; of a special token none
    names: Mapping[int, bytes]  # of special tokens
    status: EngineStatus


@dataclass(frozen=True)
class RequestPart:
    """A chunk of a request."""

    number: int
    chunk: Chunk


class _Sender:
    """Sends lists of messages on a thread of its own, so that the engine never waits for the pipe."""

    def __init__(self, parent: Parent) -> None:
        self._parent, self._queue = parent, SimpleQueue[object]()
        self._thread = threading.Thread(target=self._run, name="engine-sender", daemon=True)
        self._thread.start()

    def send(self, message: object) -> None:
        self._queue.put(message)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError):  # nobody listens any more
            messages: list[object] = [self._queue.get()]
            while messages[-1] is not None:
                while not self._queue.empty() and messages[-1] is not None:
                    messages.append(self._queue.get())
                self._parent.send([message for message in messages if message is not None])
                messages = messages[-1:] if messages[-1] is None else [self._queue.get()]


class _RequestHandler:
    """Calls the engine for the other process. Calls that take long run on two threads, as many as may call at once."""

    def __init__(self, engine: LiveEngine, send: Callable[[object], None]) -> None:
        self._engine, self._send = engine, send
        self._threads = ThreadPoolExecutor(2, "engine-encoding")
        self._cancels: dict[int, Callable[[], None]] = {}

    def handle(self, call: EngineCall) -> None:
        if call.method in ("submit", "cancel"):
            self._answer(call, getattr(self, f"_{call.method}"))
        else:
            self._threads.submit(self._answer, call, getattr(self._engine, call.method))

    def _answer(self, call: EngineCall, method: Callable[..., Any]) -> None:
        try:
            self._send(EngineAnswer(call.number, method(*call.arguments)))
        except Exception as error:
            self._send(EngineAnswer(call.number, error=make_picklable(error)))

    def _submit(self, number: int, request: GenerationRequest) -> None:
        def send_chunk(chunk: Chunk) -> None:
            if chunk.finish:
                self._cancels.pop(number, None)
                self._send(self._engine.read_status())  # before the client hears of the end
            self._send(RequestPart(number, chunk))

        self._cancels[number] = lambda: None  # the first chunk may be the last
        cancel = self._engine.submit(request, send_chunk)
        if number in self._cancels:
            self._cancels[number] = cancel

    def _cancel(self, number: int) -> None:
        if cancel := self._cancels.get(number):
            cancel()


def run_engine(parent: Parent, setup: EngineSetup) -> None:
    """Serve a run in the engine's process until a call of `close`. Raises the error that stops the engine."""

    def send_event(event: Event) -> None:
        if isinstance(event, COUNTED):
            sender.send(event)

    keep_arrow_alone()
    with closing(_Sender(parent)) as sender:
        setup, folder, mirror = setup.open()
        server = ServerRun(setup.config, folder, send_event, resume=setup.resume, mirror=mirror)
        with server:
            engine = server.engine
            handler, last = _RequestHandler(engine, sender.send), engine.read_status()
            ids = range(engine.vocabulary_size)
            tokens = tuple(engine.decode_token(token, name=False) for token in ids)
            names = {token: engine.decode_token(token) for token in ids if not tokens[token]}
            sender.send(EngineReady(tokens, names, last))
            while engine.failure is None:
                if parent.poll(POLL_SECONDS):
                    call: EngineCall = parent.receive()
                    if call.method == "close":
                        server.grace_seconds = call.arguments[0]
                        return
                    handler.handle(call)
                if (status := engine.read_status()) != last:
                    sender.send(last := status)
            raise engine.failure


class EngineDownError(BusyError):
    """Raised by all methods while the engine's process is restarted."""

    def __init__(self, retry_after: float) -> None:
        reason = "the engine is restarted after an error; try again"
        super().__init__(reason, math.ceil(retry_after), restarting=True)


class EngineProcess(Engine):
    """The engine of a server, in its own process. As a context manager it ends the process, which commits.

    `run` is its name on a command line; a resumed one has the settings that it began with. `on_event` is called with
    the events that metrics count, on a thread of this object. Raises as `ServerRun`, which the process makes.
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
        self._setup = EngineSetup(config, run, resume)
        self._on_event, self._budget = on_event, budget or RestartBudget()
        self._numbers = count()
        self._lock = threading.Lock()  # of the four below
        self._serving = False
        self._calls: dict[int, Future[Any]] = {}
        self._listeners: dict[int, ChunkListener] = {}
        self._restart_at = 0.0
        self._closing = False
        self._tokens: tuple[bytes, ...] = ()
        self._names: Mapping[int, bytes] = {}
        self._status: EngineStatus | None = None
        self._started: Future[None] = Future()
        self.failure: BaseException | None = None
        self._process = KeptChild(lambda: Child(run_engine, self._setup, name="engine"), self._handle_all, self._on_end)
        try:
            self._started.result()
        except BaseException:
            self._process.close(0.0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        if self._serving:
            self._process.close(last=self._make_call("close", 0.0 if kind else GRACE_SECONDS))
        else:
            self._process.close(0.0)
        if self.failure and not error:
            raise RunError(f"the engine stopped: {self.failure!r}") from self.failure

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    @override
    def vocabulary_size(self) -> int:
        return len(self._tokens)

    @override
    def encode(
        self, prompt: PlainPrompt, controls: bool = False, begin: bool = True, suffix: str = ""
    ) -> EncodedPrompt:
        found: EncodedPrompt = self._call("encode", prompt, controls, begin, suffix).result()
        return found

    @override
    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        values: Mapping[str, Any] = NO_VALUES,
    ) -> EncodedPrompt:
        prompt: EncodedPrompt = self._call("encode_chat", messages, tools, values).result()
        return prompt

    @override
    def compile_grammar(self, source: GrammarSource) -> None:
        self._call("compile_grammar", source).result()

    @override
    def decode_token(self, token: int, *, name: bool = True) -> bytes:
        data = self._tokens[token] if 0 <= token < len(self._tokens) else b""
        return data or (self._names.get(token, b"") if name else b"")

    @override
    def submit(self, request: GenerationRequest, listener: ChunkListener) -> Callable[[], None]:
        number = next(self._numbers)
        with self._lock:
            self._listeners[number] = listener
        try:
            self._call("submit", number, request).result(ANSWER_SECONDS)
        except BaseException as error:
            with self._lock:
                self._listeners.pop(number, None)
            if isinstance(error, TimeoutError):
                self._cancel(number)
                raise EngineDownError(ANSWER_SECONDS) from error
            raise
        return lambda: self._cancel(number)

    def _cancel(self, number: int) -> None:
        with suppress(ChildError):
            self._process.send(self._make_call("cancel", number))

    @override
    def read_status(self) -> EngineStatus:
        assert self._status is not None  # since the first start
        ready = self._serving and self._status.ready and not self._closing
        return replace(self._status, ready=ready, engine_restarts=self._budget.restarts)

    def _make_call(self, method: str, *arguments: Any) -> EngineCall:
        return EngineCall(next(self._numbers), method, arguments)

    def _call(self, method: str, *arguments: Any) -> "Future[Any]":
        """Send a call and return its future. Raises `EngineDownError`, also through the future."""
        call, future = self._make_call(method, *arguments), Future[Any]()
        with self._lock:
            if not self._serving:
                raise EngineDownError(max(1.0, self._restart_at - time.monotonic()))
            self._calls[call.number] = future
        with suppress(ChildError):  # it has just ended: the future is failed with all others
            self._process.send(call)
        return future

    def _on_end(self, error: BaseException) -> float | None:
        """Fail all unfinished calls and requests, and return the seconds until the next start, if there is one."""
        reported = error.error if isinstance(error, ChildError) else error
        with self._lock:
            self._serving = False
            listeners, self._listeners = self._listeners, {}
            calls, self._calls = self._calls, {}
        for future in calls.values():
            future.set_exception(EngineDownError(1.0))
        for listener in listeners.values():
            listener(Chunk("", finish=Finish.FAILED))
        if self._closing:
            self.failure = reported
            return None
        ended = reported or RunError(str(error))
        if not self._started.done():
            self._started.set_exception(ended)
            return None
        delay = self._budget.next_delay()
        if delay is None:
            LOG.error("the engine stopped again: %r; it is not restarted any more", ended)
            self.failure = ended
            return None
        LOG.error("the engine stopped: %r; it resumes from its last commit in %.1f s", ended, delay)
        self._restart_at = time.monotonic() + delay
        self._setup = replace(self._setup, restarted=True)
        return delay

    def _handle_all(self, messages: list[object]) -> None:
        for message in messages:
            match message:
                case RequestPart(number, chunk):
                    with self._lock:
                        take = self._listeners.pop if chunk.finish else self._listeners.get
                        listener = take(number, None)
                    if listener:
                        listener(chunk)
                case EngineAnswer(number, value, error):
                    with self._lock:
                        future = self._calls.pop(number, None)
                    if future and error:
                        future.set_exception(error)
                    elif future:
                        future.set_result(value)
                case EngineReady():
                    self._begin(message)
                case EngineStatus():
                    self._status = message
                case _:
                    self._on_event(message)  # type: ignore[arg-type]

    def _begin(self, ready: EngineReady) -> None:
        self._tokens, self._names, self._status = ready.tokens, ready.names, ready.status
        self._budget.begin()
        with self._lock:
            self._serving = True
        if self._started.done():
            LOG.warning("the engine serves again")
        else:
            self._started.set_result(None)
