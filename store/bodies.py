"""Bodies of HTTP requests, read within bounds: in size, and in the time that they may take to arrive."""

import asyncio
from collections.abc import AsyncIterable, Callable, Mapping

MEDIA_TYPE = "application/json"


class BodyError(Exception):
    """A body that is refused, with a status of HTTP. The connection must be closed, since the rest is not read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_lengths(headers: Mapping[str, str]) -> None:
    """Refuse two lengths: a proxy that goes by the first would take the rest for another request (RFC 9112, 6.1)."""
    if "content-length" in headers and "transfer-encoding" in headers:
        raise BodyError(400, "a request must have Content-Length or Transfer-Encoding, got both")


async def read_json_body(
    headers: Mapping[str, str],
    parts: AsyncIterable[bytes],
    most: int,
    seconds: float,
    on_part: Callable[[int], None] = lambda size: None,
) -> bytes:
    """Read the parts of a JSON body of at most so many bytes; `on_part` is called with the size of each. Raises
    `BodyError` if its header names no JSON, or it is too long or too slow.
    """
    # A page of another site can send all types but JSON without a preflight request.
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    coding = headers.get("content-encoding", "identity").lower()
    if kind != MEDIA_TYPE or coding != "identity":
        raise BodyError(415, f"the body must be uncompressed {MEDIA_TYPE}, got '{kind[:60]}' coded as '{coding[:60]}'")
    _check_size(int(headers.get("content-length", 0)), most)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in parts:
                on_part(len(part))
                body += part
                _check_size(len(body), most)
    except TimeoutError:
        message = f"the body must come within {seconds:g} seconds, got {len(body)} bytes by then"
        raise BodyError(408, message) from None
    return bytes(body)


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise BodyError(413, f"the body must have at most {most} bytes, got {size}")
