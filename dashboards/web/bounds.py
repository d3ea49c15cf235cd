"""Bounds on the bodies of requests to the dashboards: in size, and in the time that they may take to arrive."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

BODY_BYTES = 512 << 10  # a query of 64 kB, if every character of it is escaped
BODY_SECONDS = 30.0  # as those of `omnidraft serve`


class _BodyError(Exception):
    """A body that is refused. Attributes: `status` of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BodyBounds:
    """ASGI middleware that reads the body of a request before it passes the request on, or refuses it.

    Args:
        app: the application.
        size: in bytes.
        seconds: within which a body must arrive.
    """

    def __init__(self, app: App, size: int = BODY_BYTES, seconds: float | None = None) -> None:
        self._app, self._size = app, size
        self._seconds = BODY_SECONDS if seconds is None else seconds

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on with its whole body, or refuse it and close its connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(dict(scope["headers"]), receive)
        except _BodyError as error:
            await _refuse(error, send)
            return
        if body is None:
            return
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_whole() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, receive_whole, send)

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """Return the body; None if the client disconnects."""
        length = headers.get(b"content-length", b"0")
        if b"transfer-encoding" in headers and b"content-length" in headers:
            raise _BodyError(400, "a request must have Content-Length or Transfer-Encoding, got both")
        self._check_size(int(length[:20]) if length.isdigit() else 0)
        body = bytearray()
        try:
            async with asyncio.timeout(self._seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    self._check_size(len(body))
        except TimeoutError:
            raise _BodyError(408, f"the body must come within {self._seconds:g} seconds, but did not") from None
        return bytes(body)

    def _check_size(self, size: int) -> None:
        if size > self._size:
            raise _BodyError(413, f"the body must have at most {self._size} bytes, got {size}")


async def _refuse(error: _BodyError, send: Send) -> None:
    """Send the error as JSON. The connection is closed, since the rest of the body is not read."""
    content = json.dumps({"error": str(error)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    closing = [*headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": closing})
    await send({"type": "http.response.body", "body": content})
