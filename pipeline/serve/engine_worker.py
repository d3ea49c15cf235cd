"""The engine's process: serves a run for the process that started it (pipeline/serve/engine_process.py), and what both
send each other.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pipeline.config.settings import Config, load
from pipeline.run.folder import CONFIG, is_unfinished, open_run
from pipeline.serve.engine import LiveEngine
from pipeline.serve.messages import Chunk, EngineStatus, GenerationRequest
from pipeline.serve.run import ServerRun
from store.child import Parent, make_picklable
from store.events import BlockDone, Drifted, Event, Recalled, Updated
from store.log.run_log import Mirror

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

    tokens: tuple[bytes, ...]  # per id of the target's tokenizer its bytes; of a special token its name
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
    with closing(_Sender(parent)) as sender:
        _serve(parent, setup, sender)


def _serve(parent: Parent, setup: EngineSetup, sender: _Sender) -> None:
    def send_event(event: Event) -> None:
        if isinstance(event, COUNTED):
            sender.send(event)

    setup, folder, mirror = setup.open()
    server = ServerRun(setup.config, folder, send_event, resume=setup.resume, mirror=mirror)
    with server:
        engine = server.engine
        handler, last = _RequestHandler(engine, sender.send), engine.read_status()
        tokens = tuple(engine.decode_token(token) for token in range(engine.vocabulary_size))
        sender.send(EngineReady(tokens, last))
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
