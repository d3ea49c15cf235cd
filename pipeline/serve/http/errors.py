"""Errors of the HTTP side, all in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`.

Messages name what must hold and what was received. Causes inside the server go to its terminal, never to a client.
"""

import asyncio
import json
import math
from contextlib import suppress
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from pipeline.serve.messages import GRAMMAR_LIMIT, BusyError
from store.bodies import BodyError

VALUE_CHARACTERS = 60  # of a wrong value that a message repeats
LINGER_BYTES, LINGER_SECONDS = 32 << 20, 10.0  # that are read of a client that is refused
BODY_CODES = {400: "invalid_http", 408: "request_timeout", 413: "request_too_large", 415: "unsupported_media_type"}
NO_RETRY = {"x-should-retry": "false"}  # otherwise OpenAI's clients repeat after 5xx, and a slow request stays slow

JsonObject = dict[str, object]


class ApiError(Exception):
    """A response other than 200, with OpenAI's error object and headers in addition to those of every response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.body: JsonObject = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


class UnreadBodyError(ApiError):
    """An error found before the body was read to its end, so that the connection must be closed after the response."""

    @override
    def response(self) -> Response:
        headers = {**self.headers, "Connection": "close"}
        return _ErrorResponse(encode_json(self.body), self.status, headers, "application/json")


class _ErrorResponse(Response):
    """A response to a client that may still be sending.

    The connection is closed after the response, but only when the client has had time to read it: closing at once, with
    its bytes unread, would destroy the response on its way.
    """

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(LINGER_SECONDS):
                dropped, more = 0, True
                while more and dropped < LINGER_BYTES:
                    message = await receive()
                    dropped += len(message.get("body", b""))
                    more = message.get("more_body", False)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def body_error(error: BodyError) -> ApiError:
    """Make the error of a body that is refused."""
    return UnreadBodyError(error.status, str(error), code=BODY_CODES[error.status])


def format_value(value: object) -> str:
    """Write a value as JSON, short enough for a message."""
    try:
        text = json.dumps(value)
    except (ValueError, TypeError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= VALUE_CHARACTERS else f"{text[:VALUE_CHARACTERS]}..."


def wrong_value_error(param: str, must: str, got: object) -> ApiError:
    """Make a 400 for a parameter with an invalid value. `must` completes the sentence "the parameter must ..."."""
    return ApiError(400, f"'{param}' must {must}, got {format_value(got)}", param=param, code="invalid_value")


def unsupported_error(param: str, got: object, allowed: str) -> ApiError:
    """Make a 400 for a known parameter that this server supports with its default value alone."""
    message = f"'{param}' is not supported here: leave it out or set it to {allowed}, got {format_value(got)}"
    return ApiError(400, message, param=param, code="unsupported_parameter")


def unknown_model_error(name: str, served: str) -> ApiError:
    """Make a 404 for a model that is not served."""
    message = f"the model {format_value(name)} does not exist here; this server has '{served}'"
    return ApiError(404, message, param="model", code="model_not_found")


def busy_error(error: BusyError) -> ApiError:
    """Make a 429 for a full queue, or a 503 during a shutdown or a restart, all with a Retry-After header."""
    headers = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    if error.shutting_down or error.restarting:
        code = "server_leaving" if error.shutting_down else "engine_restarting"
        return ApiError(503, str(error), kind="server_error", code=code, headers=headers)
    return ApiError(429, str(error), kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def shutdown_error() -> ApiError:
    """Make a 503 for requests during shutdown."""
    return busy_error(BusyError("the server is shutting down; try again when it is back", 5, shutting_down=True))


def deadline_error(seconds: float) -> ApiError:
    """Make a 504 for a response that is incomplete at its deadline, of which no part is sent: it could look whole."""
    message = f"the request must be done within {seconds:g} seconds, but was not; request fewer tokens or a stream"
    return ApiError(504, message, kind="server_error", code="deadline_exceeded", headers=NO_RETRY)


def grammar_error() -> ApiError:
    """Make a 400 for a completion that was ended because its grammar takes too much work."""
    code = "grammar_limit_exceeded"
    return ApiError(400, f"the completion {GRAMMAR_LIMIT}", param="response_format", code=code)


def internal_error() -> ApiError:
    """Make a 500 for an error of the server."""
    message = "the server failed on this request; its terminal shows the details"
    return ApiError(500, message, kind="server_error", code="internal_error", headers=NO_RETRY)


def encode_json(value: object) -> bytes:
    """Write compact JSON in ASCII, which can hold any text."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Make a response with a JSON body."""
    return Response(encode_json(value), status, headers, "application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Report every kind of failure of a request as an error of the same form."""

    @app.exception_handler(ApiError)
    async def handle_api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(BodyError)
    async def handle_body_error(_: Request, error: BodyError) -> Response:
        return body_error(error).response()

    @app.exception_handler(BusyError)
    async def handle_busy(_: Request, error: BusyError) -> Response:
        return busy_error(error).response()

    @app.exception_handler(HTTPException)
    async def handle_routing_error(request: Request, error: HTTPException) -> Response:
        if request.method == "OPTIONS" and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            return Response(status_code=204, headers={"Allow": f"OPTIONS, {(error.headers or {})['Allow']}"})
        where, headers = f"{request.method} {request.url.path[:VALUE_CHARACTERS]}", dict(error.headers or {})
        status, message, code = error.status_code, str(error.detail), None
        if status == HTTPStatus.NOT_FOUND:
            message, code = f"there is nothing at {where}; try /v1/chat/completions", "unknown_url"
        elif status == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = headers.get("allow") or headers.get("Allow", "")
            message, code = f"{where} is not possible; allowed: {allowed}", "method_not_allowed"
        return ApiError(status, message, code=code, headers=headers).response()

    @app.exception_handler(ClientDisconnect)
    async def handle_disconnect(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody receives it, but it is counted

    @app.exception_handler(Exception)
    async def handle_internal_error(_: Request, __: Exception) -> Response:
        return internal_error().response()
