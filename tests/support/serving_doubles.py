"""A scripted engine, and an HTTP server over it on a real port."""

import asyncio
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from openai import OpenAI
from typing_extensions import override

from pipeline.loop import UnfitPromptError
from pipeline.serve.http.api import DEFAULTS, make_app
from pipeline.serve.http.limits import Limits
from pipeline.serve.http.metrics import Metrics
from pipeline.serve.http.server import DrainingServer, make_server
from pipeline.serve.messages import (
    BusyError,
    Chunk,
    ChunkListener,
    EncodedPrompt,
    Engine,
    EngineStatus,
    Finish,
    GenerationRequest,
    PlainPrompt,
    Usage,
)
from stages.sampling.grammars import GrammarSource
from stages.sampling.logprobs import TokenLogprobs
from stages.sampling.params import SamplingParams
from stages.vocabulary.chat import HERMES, NO_VALUES
from store.errors import ConfigError
from store.events import DraftSource
from store.hosts import listen

MODEL = "family/echo-1"
EOS = 256
CONTEXT = 4000
HANG_SECONDS = 200.0  # seconds after which a server counts as hanging


@dataclass
class PendingRequest:
    """A request that the scripted engine completes."""

    request: GenerationRequest
    listener: ChunkListener
    cancelled: threading.Event = field(default_factory=threading.Event)


class ScriptedEngine(Engine):
    """Completes a prompt with itself, a byte per token, two tokens per block, then the end of the sequence.

    Every token has a log probability of -its place; the alternative is always "?" at -9. The tokens of an echoed prompt
    have -1 each, without alternatives.

    Args:
        pause: seconds between blocks.
        capacity: requests at a time; more are refused.
        finish: finish of all completions; None for the regular one.
        held: whether completions wait until `go` is set.
        held_from: prompts with at least so many characters are not tokenised until `encoding` is set.
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
        self.requests: list[GenerationRequest] = []
        self.sources: list[GrammarSource] = []
        self.tools: list[Mapping[str, Any]] = []  # of the last chat
        self.call_style = HERMES
        self.values: Mapping[str, Any] = {}  # of the last chat
        self.plain: tuple[PlainPrompt, bool, bool] = ("", False, False)  # the last plain prompt, and how it is encoded
        self.pending: list[PendingRequest] = []
        self.cancels: list[str] = []
        self.encoding = threading.Event()
        self.shutting_down = False
        self._lock = threading.Lock()
        self._running = 0

    @property
    @override
    def vocabulary_size(self) -> int:
        return EOS + 1

    @override
    def encode(
        self, prompt: PlainPrompt, controls: bool = False, begin: bool = True, suffix: str = ""
    ) -> EncodedPrompt:
        self.plain = (prompt, controls, begin)
        text = prompt + suffix if isinstance(prompt, str) else bytes(prompt).decode()
        if self._held_from is not None and len(text) >= self._held_from:
            self.encoding.wait(HANG_SECONDS)
        tokens = tuple(text.encode())
        if not 0 < len(tokens) < CONTEXT:
            raise UnfitPromptError(f"a prompt must have 1 to {CONTEXT - 1} tokens, got {len(tokens)}")
        return EncodedPrompt(text, tokens, tokens, ends=(10,) if suffix else ())

    @override
    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        values: Mapping[str, Any] = NO_VALUES,
    ) -> EncodedPrompt:
        if any("refused" in tool["function"]["name"] for tool in tools):
            raise UnfitPromptError("the chat template must show tools, but does not")
        self.tools, self.values = list(tools), dict(values)
        if messages[-1]["role"] == "assistant" and not values:
            raise UnfitPromptError("the last message must not be the assistant's")
        prompt = self.encode("|".join(f"{message['role']}:{message['content']}" for message in messages))
        return replace(prompt, call_style=self.call_style if tools else None)

    @override
    def compile_grammar(self, source: GrammarSource) -> None:
        if "invalid" in source.text:
            raise ConfigError("response_format must have a valid grammar, but: no")
        self.sources.append(source)

    @override
    def decode_token(self, token: int, *, name: bool = True) -> bytes:
        return (b"<eos>" if name else b"") if token == EOS else bytes([token])

    @override
    def submit(self, request: GenerationRequest, listener: ChunkListener) -> Callable[[], None]:
        pending = PendingRequest(request, listener)
        with self._lock:
            if self.shutting_down or self._running >= self._capacity:
                raise BusyError("the queue is full", 7, shutting_down=self.shutting_down)
            self._running += 1
            self.requests.append(request)
            self.pending.append(pending)
        threading.Thread(target=self._run, args=(pending,), daemon=True).start()

        def cancel() -> None:
            self.cancels.append(request.request_id)
            pending.cancelled.set()

        return cancel

    @override
    def read_status(self) -> EngineStatus:
        return EngineStatus(MODEL, not self.shutting_down, self._running, 0, 3, 2, 1, 4, 5, True, CONTEXT)

    @property
    def running(self) -> int:
        return self._running

    def _run(self, pending: PendingRequest) -> None:
        try:
            for chunk in self._chunks(pending):
                pending.listener(chunk)
        finally:
            with self._lock:
                self._running -= 1

    def _chunks(self, pending: PendingRequest) -> Iterator[Chunk]:
        request = pending.request
        while not self.go.wait(0.01):
            if pending.cancelled.is_set():
                break
        whole, text, tokens, finish = complete(request)
        blocks, accepted = math.ceil(len(tokens) / 2), len(tokens) // 2
        more = 1, (0, blocks), {"target": blocks, "memory": len(tokens) - blocks}
        usage = Usage(len(request.prompt.tokens), len(tokens), blocks, 2 * len(tokens), accepted, *more)
        sent, echo, scores = "", "", tuple[TokenLogprobs, ...]()
        if request.echo:
            echo = request.prompt.text
            scored = request.prompt.tokens if request.sampling.logprobs is not None else ()
            scores = tuple(TokenLogprobs(token, -1.0 if place else None) for place, token in enumerate(scored))
        if not tokens:
            yield Chunk(echo, (), scores, Finish.LENGTH, usage)
        for begin in range(0, len(tokens), 2):
            if pending.cancelled.wait(self._pause):
                yield Chunk("", finish=Finish.CANCELLED, usage=usage)
                return
            block = tokens[begin : begin + 2]
            certain = whole[: begin + 2].decode(errors="ignore")[: len(text)]
            last = begin + 2 >= len(tokens)
            shown = text if last else certain[: max(0, len(certain) - max(map(len, request.sampling.stop), default=0))]
            new, sent = shown[len(sent) :], max(sent, shown, key=len)
            ends = (self._finish or finish) if last else None
            found = (*scores, *make_logprobs(request, begin, block))
            yield Chunk(echo + new, block, found, ends, usage if last else None)
            echo, scores = "", ()


def complete(request: GenerationRequest) -> tuple[bytes, str, tuple[int, ...], Finish]:
    """Return all bytes, the shown text, the emitted tokens and the finish of a scripted completion."""
    whole = bytes(request.prompt.tokens)
    tokens = (*whole, EOS)
    finish = Finish.STOP
    if len(tokens) > request.sampling.max_tokens:
        tokens, finish = tokens[: request.sampling.max_tokens], Finish.LENGTH
    text = bytes(token for token in tokens if token != EOS).decode(errors="replace")
    places = [text.find(stop) for stop in request.sampling.stop if stop in text]
    if places:
        return whole, text[: min(places)], tokens, Finish.STOP
    return whole, text, tokens, finish


def make_logprobs(request: GenerationRequest, begin: int, block: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    if request.sampling.logprobs is None:
        return ()
    top = ((ord("?"), -9.0),) if request.sampling.logprobs else ()
    sources = (DraftSource.MEMORY, None)
    return tuple(TokenLogprobs(token, -float(begin + place), top, sources[place]) for place, token in enumerate(block))


@dataclass
class HttpServer:
    """An HTTP server in a thread of its own."""

    port: int
    server: DrainingServer
    metrics: Metrics
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none", **settings: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=HANG_SECONDS, **settings)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=HANG_SECONDS)


@contextmanager
def run_http_server(
    engine: ScriptedEngine,
    limits: Limits | None = None,
    defaults: SamplingParams = DEFAULTS,
    key: str | None = None,
    origins: Sequence[str] = (),
) -> Iterator[HttpServer]:
    """Run a server over the engine until the block ends."""
    limits = limits or Limits(grace_seconds=0.2)
    metrics = Metrics(MODEL)
    listener = listen("127.0.0.1", 0)
    server = make_server(make_app(engine, limits, metrics, defaults=defaults, api_key=key, origins=origins), limits)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield HttpServer(listener.getsockname()[1], server, metrics, thread)
    finally:
        engine.go.set()
        engine.encoding.set()
        server.begin_shutdown()
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another thread fulfils."""
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
