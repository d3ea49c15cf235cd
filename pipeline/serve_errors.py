"""Errors of the HTTP side, all in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`.

Messages say what must hold and what was got. What went wrong inside is for the server's terminal, never for a client.
"""

import json
import math
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

SHOWN = 60  # characters of a wrong value that a message repeats
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients repeat 5xx otherwise, and what took too long takes as long


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        status: of HTTP.
        body: the error object.
        headers: of the answer, beside those of every answer.
    """

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
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class BodyError(ApiError):
    """A body that is not read to its end, so that its connection must be closed behind the answer."""


def shown(value: Any) -> str:
    """A value as JSON, short enough for a message."""
    try:
        text = json.dumps(value)
    except (ValueError, TypeError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def wrong_value(param: str, must: str, got: Any) -> ApiError:
    """400: a parameter has a value that it cannot have. `must` goes on after "must"."""
    return ApiError(400, f"'{param}' must {must}, got {shown(got)}", param=param, code="invalid_value")


def unsupported(param: str, got: Any, allowed: str) -> ApiError:
    """400: a parameter is known, but this server can do only what it does without it."""
    message = f"'{param}' is not supported here: leave it out or set it to {allowed}, got {shown(got)}"
    return ApiError(400, message, param=param, code="unsupported_parameter")


def unknown_model(name: str, served: str) -> ApiError:
    """404: a model that is not served."""
    message = f"the model {shown(name)} does not exist here; this server has '{served}'"
    return ApiError(404, message, param="model", code="model_not_found")


def busy(reason: str, retry_after: float, leaving: bool) -> ApiError:
    """429 for a full queue, 503 when the server is going away; both say when to come again."""
    headers = {"Retry-After": str(max(1, math.ceil(retry_after)))}
    if leaving:
        return ApiError(503, reason, kind="server_error", code="server_leaving", headers=headers)
    return ApiError(429, reason, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def leaving() -> ApiError:
    """503: the server was told to end."""
    return busy("the server is shutting down; try again when it is back", 5, leaving=True)


def too_late(seconds: float) -> ApiError:
    """504: not whole within the deadline. What was completed by then is dropped, for it would pass for the whole."""
    message = f"the request must be done within {seconds:g} seconds, but was not; ask for fewer tokens or stream"
    return ApiError(504, message, kind="server_error", code="deadline_exceeded", headers=NO_RETRY)


def failed() -> ApiError:
    """500: an error of ours."""
    message = "the server failed on this request; its terminal says more"
    return ApiError(500, message, kind="server_error", code="internal_error", headers=NO_RETRY)


def as_json(value: Any) -> bytes:
    """Compact JSON in ASCII, which can say any text."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def answer_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(as_json(value), status, headers, "application/json")


def error_answer(error: ApiError) -> Response:
    """An error as an answer."""
    return answer_json(error.body, error.status, error.headers)


def add_error_answers(app: FastAPI) -> None:
    """Every way in which a request can go wrong ends in an error of the same form."""

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_answer(error)

    async def not_here(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_answer(_routing_error(request, error))

    async def broken(_: Request, __: Exception) -> Response:
        return error_answer(failed())

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(HTTPException, not_here)
    app.add_exception_handler(Exception, broken)


def _routing_error(request: Request, error: HTTPException) -> ApiError:
    where = f"{request.method} {request.url.path[:SHOWN]}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        return ApiError(404, f"there is nothing at {where}; try /v1/chat/completions", code="unknown_url")
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{where} is not possible; allowed: {headers.get('allow') or headers.get('Allow', '')}"
        return ApiError(405, message, code="method_not_allowed", headers=headers)
    return ApiError(error.status_code, str(error.detail), headers=headers)
