"""Bounds of `omnidraft serve` on a request, a connection and all of them together, and reading bodies within them.

Bodies are parsed as strict JSON.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import Request
from pydantic_core import from_json

from pipeline.serve.http.errors import ApiError, JsonObject, UnreadBodyError
from pipeline.serve.messages import GRACE_SECONDS
from store.bodies import read_json_body

MiB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Bounds on requests. Requests beyond them are refused with an error that names the bound."""

    body_bytes: int = MiB  # of one request's body
    bodies_bytes: int = 64 * MiB  # of all bodies together that are being read or tokenised
    body_seconds: float = 30.0  # within which a body must arrive completely
    idle_seconds: float = 30.0  # within which a connection must begin a request, the first one or the next
    reader_seconds: float = 60.0  # a client that reads nothing of its response for so long is disconnected
    connections: int = 4096  # open at once; beyond them the one that is idle longest is closed
    choices: int = 128  # completions of one request: its prompts times `n`
    # log probabilities of one request: those of each token of its completions and of prompts that are repeated; enough
    # for the prompts of a body, as ids, with one alternative each
    scores: int = 400_000
    max_tokens: int = 1 << 20  # of one completion, also the default of a chat; that of a server is the target's context
    deadline_seconds: float = 300.0  # for a whole request, including the time in the queue
    grace_seconds: float = GRACE_SECONDS  # for which running requests may continue after the start of a shutdown


class BodyReader:
    """Reads request bodies and counts the bytes that all of them hold together."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._max_held = max(limits.bodies_bytes, limits.body_bytes)
        self._held = 0

    @asynccontextmanager
    async def read_body(self, request: Request) -> AsyncIterator[bytes]:
        """Read a request's body; its bytes count as held until the context ends. Raises `ApiError` if other bodies hold
        all the bytes, `ClientDisconnect` if the client disconnected, and `BodyError` as `read_json_body`.
        """
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            held += size
            self._held += size
            if self._held > self._max_held:
                message = "too many large requests are being read; try again in a second"
                kind, code = "rate_limit_error", "rate_limit_exceeded"
                raise UnreadBodyError(429, message, kind=kind, code=code, headers={"Retry-After": "1"})

        most, seconds = self._limits.body_bytes, self._limits.body_seconds
        try:
            yield await read_json_body(request.headers, request.stream(), most, seconds, hold)
        finally:
            self._held -= held


def parse_json_object(body: bytes) -> JsonObject:
    """Parse a body as a JSON object. Raises `ApiError` for anything else."""
    try:
        value = from_json(body, allow_inf_nan=False)
        json.dumps(value, allow_nan=False)  # a number beyond the range of a float is infinite by now
    except ValueError as error:
        raise _malformed_body_error(str(error)) from None
    if not isinstance(value, dict):
        raise _malformed_body_error(f"it is a JSON {type(value).__name__}")
    return value


def _malformed_body_error(why: str) -> ApiError:
    return ApiError(400, f"the body must be a JSON object in UTF-8, but {why}", code="invalid_json")
