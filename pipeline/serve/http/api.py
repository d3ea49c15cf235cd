"""Endpoints of `omnidraft serve`: OpenAI's interface over an engine, with health and metrics."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from pipeline.config.defaults import TEMPERATURE
from pipeline.loop import UnfitPromptError
from pipeline.reports.machine import find_own_version
from pipeline.serve.http.auth import AuthMiddleware, bearer_of
from pipeline.serve.http.errors import (
    ApiError,
    JsonObject,
    add_error_handlers,
    deadline_error,
    json_response,
    shutdown_error,
    unknown_model_error,
    wrong_value_error,
)
from pipeline.serve.http.limits import BodyReader, Limits, parse_json_object
from pipeline.serve.http.metrics import CONTENT_TYPE, Metrics
from pipeline.serve.http.openai_requests import (
    ChatRequest,
    CompletionRequest,
    ParsedRequest,
    check_scores,
    parse_chat,
    parse_completion,
    read_tokens,
)
from pipeline.serve.http.openai_responses import CompletionResponse, encode_event
from pipeline.serve.http.response_stream import (
    LONG_BYTES,
    ResponseStream,
    ThreadPools,
    run_while_connected,
)
from pipeline.serve.http.responses_api import ResponseObject, ResponseRequest, parse_response
from pipeline.serve.messages import EncodedPrompt, Engine, GenerationRequest
from stages.sampling.params import SamplingParams
from store.errors import ConfigError

Parser = Callable[[Mapping[str, object], Limits, SamplingParams], ParsedRequest]
DEFAULTS = SamplingParams(temperature=TEMPERATURE)
EVEN_SECONDS, EVEN_BYTES = 0.1, 2048  # of a stream that tells a listener on the network nothing of the blocks
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
CHAT = Path(__file__).with_name("chat.html").read_text(encoding="utf-8")
REFERENCE = "#/components/schemas/{model}"


class ActiveRequests:
    """Requests that the engine decodes, and whether the server is shutting down."""

    def __init__(self) -> None:
        self.shutting_down = False
        self._streams: set[ResponseStream] = set()

    def add(self, stream: ResponseStream) -> None:
        self._streams.add(stream)

    def remove(self, stream: ResponseStream) -> None:
        """Remove a request whose response is sent or whose client disconnected."""
        stream.cancel()
        self._streams.discard(stream)

    def interrupt_all(self) -> None:
        """End all requests; their clients receive the error of a shutdown."""
        for stream in list(self._streams):
            stream.interrupt()


def make_app(
    engine: Engine,
    limits: Limits,
    metrics: Metrics,
    *,
    defaults: SamplingParams = DEFAULTS,
    api_key: str | None = None,
    host: str = "127.0.0.1",
    origins: Sequence[str] = (),
) -> FastAPI:
    """Make the application. The server that runs it uses its `state.active_requests`. Requests take what they leave out
    from `defaults`, but `max_tokens` from OpenAI's interface. With a key every request must carry it, except those for
    `/health`. `host` is the address that it will be served on. Pages of the sites `origins` may send requests.
    """
    active, limits = ActiveRequests(), replace(limits, max_tokens=engine.read_status().max_length)
    completions = _Completions(engine, limits, metrics, defaults, active)

    @asynccontextmanager
    async def close_after_serving(_: FastAPI) -> AsyncIterator[None]:
        yield
        completions.close()

    app = FastAPI(
        title="omnidraft",
        version=find_own_version(),
        lifespan=close_after_serving,
        docs_url=None,  # FastAPI's own page loads its scripts from a public host
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.active_requests = active
    app.add_middleware(AuthMiddleware, key=api_key, served=host, metrics=metrics)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    add_error_handlers(app)
    _add_status_endpoints(app, engine, metrics, active)
    _add_token_endpoints(app, completions)
    _add_pages(app)

    # They read the bodies themselves: FastAPI would parse and validate a long one on the event loop.
    @app.post("/v1/completions", openapi_extra=_body_of(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Complete a prompt, or several."""
        return await completions.respond(request, parse_completion)

    @app.post("/v1/chat/completions", openapi_extra=_body_of(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Complete a conversation with the next message."""
        return await completions.respond(request, parse_chat)

    @app.post("/v1/responses", openapi_extra=_body_of(ResponseRequest))
    async def create_response(request: Request) -> Response:
        """Complete a conversation, as `/v1/chat/completions`, in the form of OpenAI's newer interface."""
        return await completions.respond(request, parse_response)

    app.openapi = cache(lambda: _describe(app))  # type: ignore[method-assign]
    return app


def _add_pages(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def show_chat() -> Response:
        return HTMLResponse(CHAT)

    @app.get("/docs", include_in_schema=False)
    async def show_operations() -> Response:
        return HTMLResponse(_format_operations(app))


def _add_token_endpoints(app: FastAPI, completions: "_Completions") -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Show the tokens of a `prompt` or of `messages`, which are encoded as in a completion or a chat."""
        return await completions.tokenize(request)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Show the text of `tokens`."""
        return await completions.detokenize(request)


def _body_of(kind: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe(app: FastAPI) -> dict[str, Any]:
    described = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for operation in (operation for path in described["paths"].values() for operation in path.values()):
        operation["responses"].pop("422", None)  # FastAPI's own; errors here have OpenAI's form
    kinds: list[Any] = [(kind, "validation") for kind in (CompletionRequest, ChatRequest, ResponseRequest)]
    described["components"] = {"schemas": models_json_schema(kinds, ref_template=REFERENCE)[1]["$defs"]}
    return described


def _format_operations(app: FastAPI) -> str:
    rows = "".join(
        f"<tr><td>{method.upper()}<td><code>{escape(path)}</code><td>{escape(operation.get('description', ''))}"
        for path, operations in app.openapi()["paths"].items()
        for method, operation in operations.items()
    )
    title = f"{app.title} {escape(app.version)}"
    parameters = 'All parameters: <a href="/openapi.json">/openapi.json</a>'
    return f'<!doctype html><html lang="en"><title>{title}</title><h1>{title}</h1><table>{rows}</table><p>{parameters}'


def _add_status_endpoints(app: FastAPI, engine: Engine, metrics: Metrics, active: ActiveRequests) -> None:
    started = int(time.time())

    def model_entry() -> JsonObject:
        status = engine.read_status()
        owned = {"object": "model", "created": started, "owned_by": "omnidraft"}
        return {"id": status.model, **owned, "max_model_len": status.max_length}

    @app.get("/v1/models")
    async def list_models() -> Response:
        """List the model that is served."""
        return json_response({"object": "list", "data": [model_entry()]})

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> Response:
        """Describe a model."""
        entry = model_entry()
        if name != entry["id"]:
            raise unknown_model_error(name, str(entry["id"]))
        return json_response(entry)

    @app.get("/health")
    async def check_health() -> Response:
        """Show whether requests are accepted, and the state of the engine."""
        status = engine.read_status()
        health = "leaving" if active.shutting_down else "ok" if status.ready else "not ready"
        return json_response({"status": health, **asdict(status)}, 200 if health == "ok" else 503)

    @app.get("/version")
    async def show_version() -> Response:
        """Show the version of omnidraft."""
        return json_response({"version": app.version})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        """Show metrics in Prometheus's text format."""
        return Response(metrics.render(engine.read_status()), media_type=CONTENT_TYPE)


class _Completions:
    def __init__(
        self, engine: Engine, limits: Limits, metrics: Metrics, defaults: SamplingParams, active: ActiveRequests
    ) -> None:
        self._engine, self._limits, self._metrics = engine, limits, metrics
        self._defaults, self._active = defaults, active
        self._pools, self._bodies = ThreadPools(), BodyReader(limits)

    def close(self) -> None:
        self._pools.close()

    async def respond(self, request: Request, parse: Parser) -> Response:
        arrived = time.perf_counter()
        if self._active.shutting_down:
            raise shutdown_error()
        tenant = bearer_of(request.headers)
        client = tenant or (request.client.host if request.client else "")
        async with self._bodies.read_body(request) as body:
            parsed = await self._pools.run_if_long(len(body), lambda: self._parse(body, parse), client)
            size = LONG_BYTES + 1 if parsed.grammar else len(body)  # compiling takes as long as a long text
            encoding = self._pools.run(size, lambda: self._prepare(parsed), client)
            prompts, prediction = await run_while_connected(request.receive, encoding)
        parsed = replace(parsed, tool_use=parsed.tool_use.adopt_style(prompts[0].call_style))
        check_scores(parsed, [len(prompt.tokens) for prompt in prompts], self._limits)
        stream = ResponseStream(self._metrics, arrived)
        kind = ("resp_" if parsed.shown is not None else "chatcmpl-") if parsed.is_chat else "cmpl-"
        request_id = kind + uuid.uuid4().hex
        remaining_seconds = self._limits.deadline_seconds - (time.perf_counter() - arrived)
        if remaining_seconds <= 0:
            raise deadline_error(self._limits.deadline_seconds)
        if self._active.shutting_down:
            raise shutdown_error()
        style = parsed.tool_use.style
        requests = [
            GenerationRequest(
                request_id=request_id,
                prompt=prompt,
                sampling=replace(parsed.sampling, stop_token_ids=(*parsed.sampling.stop_token_ids, *prompt.ends)),
                grammar=parsed.grammar,
                prediction=prediction,
                markers=style.markers if style else (),
                store=parsed.body.store,
                timeout_seconds=remaining_seconds,
                choice=place * parsed.body.n + number,
                tenant=tenant,
                echo=parsed.echo,
            )
            for place, prompt in enumerate(prompts)
            for number in range(parsed.body.n)
        ]
        stream.submit(self._engine, requests)
        decode_token, seconds = self._engine.decode_token, self._limits.deadline_seconds
        make = CompletionResponse if parsed.shown is None else ResponseObject
        completion = make(request_id, decode_token, parsed, len(requests), seconds)
        self._active.add(stream)
        if parsed.body.stream:
            return _EventStreamResponse(stream, completion, self._active, even=parsed.is_even)
        try:
            return await run_while_connected(request.receive, self._collect(stream, completion, client))
        finally:
            self._active.remove(stream)

    async def tokenize(self, request: Request) -> Response:
        status = self._engine.read_status()

        def encode() -> list[EncodedPrompt]:
            given = {"model": status.model, **parse_json_object(body)}
            parse = parse_chat if "messages" in given else parse_completion
            return self._prepare(self._check_ids(parse(given, self._limits, self._defaults)))[0]

        client = request.client.host if request.client else ""
        async with self._bodies.read_body(request) as body:
            encoding = self._pools.run(len(body), encode, client)
            prompts = await run_while_connected(request.receive, encoding)
        if len(prompts) > 1:
            raise wrong_value_error("prompt", "be one prompt", f"{len(prompts)} prompts")
        tokens = prompts[0].tokens
        return json_response({"count": len(tokens), "max_model_len": status.max_length, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        async with self._bodies.read_body(request) as body:
            tokens = read_tokens(parse_json_object(body))
        text = b"".join(map(self._engine.decode_token, tokens)).decode(errors="replace")
        return json_response({"prompt": text})

    async def _collect(self, stream: ResponseStream, completion: CompletionResponse, client: str) -> Response:
        async for chunks in stream.read_chunks():
            for index, chunk in chunks:
                completion.add_chunk(index, chunk)
        return await self._pools.run_if_long(
            completion.estimate_bytes(), lambda: json_response(completion.format_whole()), client
        )

    def _parse(self, body: bytes, parse: Parser) -> ParsedRequest:
        return self._check_ids(parse(parse_json_object(body), self._limits, self._defaults))

    def _check_ids(self, parsed: ParsedRequest) -> ParsedRequest:
        """Check the names and ids in a request against the engine's. Raises `ApiError`."""
        if parsed.body.model != (served := self._engine.read_status().model):
            raise unknown_model_error(parsed.body.model, served)
        if unknown := parsed.sampling.find_unknown_id(size := self._engine.vocabulary_size):
            raise wrong_value_error(unknown[0], f"have token ids from 0 to {size - 1}", unknown[1])
        return parsed

    def _prepare(self, parsed: ParsedRequest) -> tuple[list[EncodedPrompt], tuple[int, ...]]:
        """Encode the prompts and the prediction, and compile the grammar. Raises `ApiError`."""
        param = ("messages" if parsed.shown is None else "input") if parsed.is_chat else "prompt"
        prediction: tuple[int, ...] = ()
        try:
            if parsed.is_chat:
                prompts = [self._engine.encode_chat(parsed.messages, parsed.tool_use.tools, parsed.values)]
            else:
                param = "suffix" if parsed.suffix else param
                how = (parsed.controls, parsed.begin, parsed.suffix)
                prompts = [self._engine.encode(one, *how) for one in parsed.prompts]
            if parsed.prediction:
                param = "prediction"
                prediction = self._engine.encode(parsed.prediction, begin=False).tokens
            param = "tools" if parsed.tool_use.demanded else "response_format"
            if parsed.grammar:
                self._engine.compile_grammar(parsed.grammar)
        except (ConfigError, UnfitPromptError) as error:
            code = "invalid_prompt" if isinstance(error, UnfitPromptError) else "invalid_value"
            raise ApiError(400, str(error), param=param, code=code) from None
        return prompts, prediction


class _EventStreamResponse(StreamingResponse):
    def __init__(
        self, stream: ResponseStream, completion: CompletionResponse, active: ActiveRequests, *, even: bool
    ) -> None:
        events = self._encode_events(stream, completion, EVEN_SECONDS if even else 0.0)
        super().__init__(events, headers=STREAM_HEADERS, media_type="text/event-stream")
        self._stream, self._active = stream, active

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events as the chunks arrive. When the client disconnects, its place in the engine is freed."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._active.remove(self._stream)

    async def _encode_events(
        self, stream: ResponseStream, completion: CompletionResponse, interval: float
    ) -> AsyncIterator[bytes]:
        yield completion.encode_opening()
        try:
            async for chunks in stream.read_chunks(interval):
                if interval:
                    data = b"".join(completion.encode_chunks(chunks))
                    yield data + b":" + b" " * (-(len(data) + 3) % EVEN_BYTES) + b"\n\n"  # clients skip comments
                    continue
                for data in completion.encode_chunks(chunks):
                    yield data
                    await asyncio.sleep(0)  # lets other streams send between the events of a long one
            yield completion.encode_closing()
        except ApiError as error:  # the status is sent already: the error follows in the stream
            yield encode_event(error.body)
