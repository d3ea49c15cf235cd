"""The body of a request: read within bounds of size and time, and parsed as strict JSON."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from pipeline.serve_errors import ApiError, BodyError, as_json
from pipeline.serve_limits import Limits

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
LINGER_BYTES, LINGER_SECONDS = 32 << 20, 10.0


class Bodies:
    """Reads bodies, and keeps count of the bytes that all of them hold together."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._most = max(limits.bodies_bytes, limits.body_bytes)
        self._held = 0

    @asynccontextmanager
    async def reading(self, request: Request) -> AsyncIterator[bytes]:
        """A request's body; its bytes count as held until the context ends.

        Raises:
            ApiError: it is no JSON by its header, or too long, or comes too slowly, or others hold all there is.
            ClientDisconnect: the client left.
        """
        check_kind(request)
        self._check_length(request.headers.get("content-length"))
        body = bytearray()
        try:
            await self._read(request, body)
            yield bytes(body)
        finally:
            self._held -= len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.stream():
                    self._held += len(part)
                    body += part
                    self._check(len(body))
        except TimeoutError:
            message = f"the body must come within {self._limits.body_seconds:g} seconds, got {len(body)} bytes by then"
            raise BodyError(408, message, code="request_timeout", headers=_CLOSE) from None

    def _check(self, length: int) -> None:
        self._check_length(str(length))
        if self._held > self._most:
            headers = {**_CLOSE, "Retry-After": "1"}
            message = "too many large requests are being read; try again in a second"
            raise BodyError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)

    def _check_length(self, told: str | None) -> None:
        if told is not None and int(told) > self._limits.body_bytes:
            message = f"the body must have at most {self._limits.body_bytes} bytes, got {told}"
            raise BodyError(413, message, code="request_too_large", headers=_CLOSE)


_CLOSE = {"Connection": "close"}


def check_kind(request: Request) -> None:
    """Refuse what is not sent as plain JSON: a page of another site can send other kinds without asking us first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    coding = request.headers.get("content-encoding", "identity").lower()
    if kind != "application/json" or coding != "identity":
        message = f"the body must be uncompressed application/json, got '{kind[:60]}' coded as '{coding[:60]}'"
        raise BodyError(415, message, code="unsupported_media_type", headers=_CLOSE)


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises `ApiError` for all else, also for what Python's parser takes beyond JSON."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number, parse_float=_finite)
        if SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise _malformed(f"it is not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise _malformed("a text has half of a surrogate pair") from None
    except RecursionError:
        raise _malformed("it is nested too deeply") from None
    except ValueError as error:
        raise _malformed(str(error)) from None
    if not isinstance(value, dict):
        raise _malformed(f"it is a JSON {type(value).__name__}")
    return value


def _malformed(why: str) -> ApiError:
    return ApiError(400, f"the body must be a JSON object in UTF-8, but {why}", code="invalid_json")


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:40]} is too large a number")
    return number


class LastAnswer(Response):
    """An error to a client that may still be sending.

    The connection is closed behind it, but only when the client has had the time to read it: closing at once, with its
    bytes unread, would destroy the answer on its way.
    """

    def __init__(self, error: ApiError) -> None:
        super().__init__(as_json(error.body), error.status, error.headers, "application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, then read and drop what still comes, within bounds."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                await _drop(receive)
        except (TimeoutError, ClientDisconnect):
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop(receive: Receive) -> None:
    dropped = 0
    more = True
    while more and dropped < LINGER_BYTES:
        message: Message = await receive()
        dropped += len(message.get("body", b""))
        more = message.get("more_body", False)
