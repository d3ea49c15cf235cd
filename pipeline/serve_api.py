"""The endpoints of `omnidraft serve`: OpenAI's interface over an engine, with its health and its figures."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from pipeline.serve_body import Bodies, LastAnswer, parse
from pipeline.serve_bridge import Asked, Pools, asks_of, encode, while_connected
from pipeline.serve_errors import (
    ApiError,
    BodyError,
    add_error_answers,
    answer_json,
    leaving,
    too_late,
    unknown_model,
)
from pipeline.serve_guard import Guard
from pipeline.serve_limits import Defaults, Limits
from pipeline.serve_metrics import CONTENT_TYPE, Metrics
from pipeline.serve_openai import Wanted, read_chat, read_completion
from pipeline.serve_openai_answers import Answer, ChatForm, PlainForm, event
from pipeline.serve_requests import Encoded, Engine

Read = Callable[[Mapping[str, Any], Limits, Defaults], Wanted]
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Traffic:
    """Requests in the engine's hands, and whether new ones are still taken."""

    def __init__(self) -> None:
        self.leaving = False
        self._running: set[Asked] = set()

    def add(self, asked: Asked) -> None:
        """A request was handed to the engine."""
        self._running.add(asked)

    def done(self, asked: Asked) -> None:
        """Its answer is sent, or nobody wants it any more."""
        asked.cancel()
        self._running.discard(asked)

    def let_go(self) -> None:
        """End what runs; its clients are told that the server is leaving."""
        for asked in list(self._running):
            asked.let_go()


def make_app(
    engine: Engine,
    limits: Limits,
    metrics: Metrics,
    *,
    defaults: Defaults | None = None,
    api_key: str | None = None,
    host: str = "127.0.0.1",
) -> FastAPI:
    """The application; its `state.traffic` is for whoever serves it.

    Args:
        defaults: what a request gets that does not say otherwise.
        api_key: that every request must bear but those for `/health`; None for none.
        host: the address that it will be served on.
    """
    traffic = Traffic()
    completions = _Completions(engine, limits, metrics, defaults or Defaults(), traffic)

    @asynccontextmanager
    async def closing(_: FastAPI) -> AsyncIterator[None]:
        yield
        completions.close()

    app = FastAPI(title="omnidraft", openapi_url=None, lifespan=closing, redirect_slashes=False)
    app.state.traffic = traffic
    app.add_middleware(Guard, key=api_key, served=host, metrics=metrics)
    add_error_answers(app)
    app.add_exception_handler(BodyError, _last_answer)
    app.add_exception_handler(ClientDisconnect, _nobody)
    _add_models(app, engine)
    _add_state(app, engine, metrics)
    _add_completions(app, completions)
    return app


async def _last_answer(_: Request, error: Exception) -> Response:
    assert isinstance(error, BodyError)
    return LastAnswer(error)


async def _nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # which goes nowhere, but is counted


def _add_models(app: FastAPI, engine: Engine) -> None:
    started = int(time.time())

    def model() -> dict[str, Any]:
        figures = engine.figures()
        told = {"object": "model", "created": started, "owned_by": "omnidraft"}
        return {"id": figures.model, **told, "max_model_len": figures.max_length}

    @app.get("/v1/models")
    async def models() -> Response:
        return answer_json({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        told = model()
        if name != told["id"]:
            raise unknown_model(name, told["id"])
        return answer_json(told)


def _add_state(app: FastAPI, engine: Engine, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> Response:
        figures = engine.figures()
        status = "leaving" if app.state.traffic.leaving else "ok" if figures.ready else "not ready"
        return answer_json({"status": status, **asdict(figures)}, 200 if status == "ok" else 503)

    @app.get("/metrics")
    async def figures_of_now() -> Response:
        return Response(metrics.text(engine.figures()), media_type=CONTENT_TYPE)


def _add_completions(app: FastAPI, completions: "_Completions") -> None:
    @app.post("/v1/completions")
    async def plain(request: Request) -> Response:
        return await completions.answer(request, read_completion)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await completions.answer(request, read_chat)


class _Completions:
    """Answers requests for completions."""

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics, defaults: Defaults, traffic: Traffic):
        self._engine, self._limits, self._metrics = engine, limits, metrics
        self._defaults, self._traffic = defaults, traffic
        self._pools, self._bodies = Pools(), Bodies(limits)

    def close(self) -> None:
        """Begin nothing any more."""
        self._pools.close()

    async def answer(self, request: Request, read: Read) -> Response:
        """Read a request, hand it to the engine, and answer with what comes back."""
        arrived = time.perf_counter()
        if self._traffic.leaving:
            raise leaving()
        async with self._bodies.reading(request) as body:
            wanted = await self._pools.run_if_long(len(body), lambda: self._read(body, read))
            prompts = await while_connected(request.receive, self._encode(wanted, len(body)))
        asked = Asked(self._metrics, arrived)
        answer = self._submit(asked, wanted, prompts, arrived)
        self._traffic.add(asked)
        if wanted.stream:
            return _Streamed(asked, answer, self._traffic)
        try:
            return await while_connected(request.receive, self._whole(asked, answer))
        finally:
            self._traffic.done(asked)

    async def _whole(self, asked: Asked, answer: Answer) -> Response:
        async for news in asked.news():
            answer.take(news)
        return await self._pools.run_if_long(answer.size(), lambda: answer_json(answer.whole()))

    def _read(self, body: bytes, read: Read) -> Wanted:
        wanted = read(parse(body), self._limits, self._defaults)
        if wanted.model != (served := self._engine.figures().model):
            raise unknown_model(wanted.model, served)
        return wanted

    async def _encode(self, wanted: Wanted, size: int) -> list[Encoded]:
        return await self._pools.run(size, lambda: encode(self._engine, wanted))

    def _submit(self, asked: Asked, wanted: Wanted, prompts: list[Encoded], arrived: float) -> Answer:
        form = (ChatForm if wanted.is_chat else PlainForm)(self._engine.text_of)
        name = form.prefix + uuid.uuid4().hex
        left = self._limits.deadline_seconds - (time.perf_counter() - arrived)
        if left <= 0:
            raise too_late(self._limits.deadline_seconds)
        if self._traffic.leaving:
            raise leaving()
        asks = asks_of(wanted, prompts, name, left)
        asked.submit(self._engine, asks)
        echoes = [ask.prompt.text if wanted.echo else "" for ask in asks]
        return Answer(name, form, wanted, echoes, self._engine.text_of, self._limits.deadline_seconds)


class _Streamed(Response):
    """An answer as a stream of events."""

    media_type = "text/event-stream"

    def __init__(self, asked: Asked, answer: Answer, traffic: Traffic) -> None:
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._asked, self._answer, self._traffic = asked, answer, traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events as the chunks come. When the client leaves, its place in the engine is freed."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await while_connected(receive, self._send_events(send))
        except ClientDisconnect:
            pass
        finally:
            self._traffic.done(self._asked)

    async def _send_events(self, send: Send) -> None:
        await _send(send, self._answer.opening_events())
        try:
            async for news in self._asked.news():
                for data in self._answer.events(news):
                    await _send(send, data)
                    await asyncio.sleep(0)  # a stream that has much to say at once lets the others in between
            await _send(send, self._answer.closing_events())
        except ApiError as error:  # too late for another status: the client is told in the stream
            await _send(send, event(error.body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})
