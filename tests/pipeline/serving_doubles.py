"""An engine that completes by a script, and a server over it on a real port."""

import asyncio
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI

from pipeline.loop import UnfitPromptError
from pipeline.serve_api import make_app
from pipeline.serve_limits import Defaults, Limits
from pipeline.serve_metrics import Metrics
from pipeline.serve_requests import Ask, BusyError, Chunk, Encoded, Figures, Finish, Listener, Usage
from pipeline.serve_uvicorn import Server, listen, server_of
from stages.logprobs import TokenLogprobs

MODEL = "family/echo-1"
EOS = 256
CONTEXT = 4000
PATIENCE = 30.0


@dataclass
class Flight:
    """An ask, and what becomes of it."""

    ask: Ask
    listener: Listener
    cancelled: threading.Event = field(default_factory=threading.Event)


class ScriptedEngine:
    """Completes a prompt with itself, a byte per token, two tokens per block, then the end of the sequence.

    Every token has a log probability of -its place; the alternative is always "?" at -9.

    Args:
        pause: seconds between blocks.
        capacity: asks at once; more are refused.
        finish: how completions end; None for as they should.
        held: whether nothing comes until `go` is set.
        held_from: characters of a prompt from which on it is not read until `encoding` is set.
    """

    def __init__(
        self,
        *,
        pause: float = 0.0,
        capacity: int = 1000,
        finish: Finish | None = None,
        held: bool = False,
        held_from: int | None = None,
    ) -> None:
        self._pause, self._capacity, self._finish, self._held_from = pause, capacity, finish, held_from
        self.go = threading.Event()
        if not held:
            self.go.set()
        self.asks: list[Ask] = []
        self.flights: list[Flight] = []
        self.cancels: list[str] = []
        self.encoding = threading.Event()
        self.leaving = False
        self._lock = threading.Lock()
        self._running = 0

    def encode(self, text: str) -> Encoded:
        if self._held_from is not None and len(text) >= self._held_from:
            self.encoding.wait(PATIENCE)
        tokens = tuple(text.encode())
        if not 0 < len(tokens) < CONTEXT:
            raise UnfitPromptError(f"a prompt must have 1 to {CONTEXT - 1} tokens, got {len(tokens)}")
        return Encoded(text, tokens, tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> Encoded:
        if messages[-1]["role"] == "assistant":
            raise UnfitPromptError("the last message must not be the assistant's")
        return self.encode("|".join(f"{message['role']}:{message['content']}" for message in messages))

    def text_of(self, token: int) -> bytes:
        return b"<eos>" if token == EOS else bytes([token])

    def submit(self, ask: Ask, listener: Listener) -> Callable[[], None]:
        flight = Flight(ask, listener)
        with self._lock:
            if self.leaving or self._running >= self._capacity:
                raise BusyError("the queue is full", 7, leaving=self.leaving)
            self._running += 1
            self.asks.append(ask)
            self.flights.append(flight)
        threading.Thread(target=self._play, args=(flight,), daemon=True).start()

        def cancel() -> None:
            self.cancels.append(ask.name)
            flight.cancelled.set()

        return cancel

    def figures(self) -> Figures:
        return Figures(MODEL, not self.leaving, self._running, 0, 3, 2, 1, 4, 5, True, CONTEXT)

    @property
    def running(self) -> int:
        return self._running

    def _play(self, flight: Flight) -> None:
        try:
            for chunk in self._chunks(flight):
                flight.listener(chunk)
        finally:
            with self._lock:
                self._running -= 1

    def _chunks(self, flight: Flight) -> Iterator[Chunk]:
        ask = flight.ask
        while not self.go.wait(0.01):
            if flight.cancelled.is_set():
                break
        whole, text, tokens, finish = completed(ask)
        usage = Usage(
            len(ask.prompt.tokens), len(tokens), math.ceil(len(tokens) / 2), 2 * len(tokens), len(tokens) // 2
        )
        sent = ""
        for begin in range(0, len(tokens), 2):
            if flight.cancelled.wait(self._pause):
                yield Chunk("", finish=Finish.CANCELLED, usage=usage)
                return
            block = tokens[begin : begin + 2]
            certain = whole[: begin + 2].decode(errors="ignore")[: len(text)]
            last = begin + 2 >= len(tokens)
            shown = text if last else certain[: max(0, len(certain) - max(map(len, ask.stop), default=0))]
            new, sent = shown[len(sent) :], max(sent, shown, key=len)
            ends = (self._finish or finish) if last else None
            yield Chunk(new, block, scores(ask, begin, block), ends, usage if last else None)


def completed(ask: Ask) -> tuple[bytes, str, tuple[int, ...], Finish]:
    """All bytes, the text that is shown, the tokens that are emitted, and why it ends."""
    whole = bytes(ask.prompt.tokens)
    tokens = (*whole, EOS)
    finish = Finish.STOP
    if len(tokens) > ask.max_new_tokens:
        tokens, finish = tokens[: ask.max_new_tokens], Finish.LENGTH
    text = bytes(token for token in tokens if token != EOS).decode(errors="replace")
    places = [text.find(stop) for stop in ask.stop if stop in text]
    if places:
        return whole, text[: min(places)], tokens, Finish.STOP
    return whole, text, tokens, finish


def scores(ask: Ask, begin: int, block: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    if ask.logprobs is None:
        return ()
    top = ((ord("?"), -9.0),) if ask.logprobs else ()
    return tuple(TokenLogprobs(token, -float(begin + place), top) for place, token in enumerate(block))


@dataclass
class Serving:
    """A server in a thread of its own."""

    port: int
    server: Server
    metrics: Metrics
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none", **settings: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE, **settings)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)


@contextmanager
def serving(
    engine: ScriptedEngine, limits: Limits | None = None, defaults: Defaults | None = None, key: str | None = None
) -> Iterator[Serving]:
    """A server over the engine until the block ends."""
    limits = limits or Limits(grace_seconds=0.2)
    metrics = Metrics(MODEL)
    listener = listen("127.0.0.1", 0)
    server = server_of(make_app(engine, limits, metrics, defaults=defaults, api_key=key), limits)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield Serving(listener.getsockname()[1], server, metrics, thread)
    finally:
        engine.go.set()
        engine.encoding.set()
        server.leave()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
