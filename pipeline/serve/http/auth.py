"""Access control: the API key, and on loopback without a key the Host header."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.serve.http.errors import ApiError, body_error
from pipeline.serve.http.metrics import Metrics
from store.bodies import BodyError, check_lengths
from store.hosts import is_loopback, is_own_name

OPEN_PATHS = ("/", "/health", "/docs", "/openapi.json")  # health checks and browsers have no key


class AuthMiddleware:
    """ASGI middleware that refuses requests before their body is read, and counts responses.

    Requests must carry the key, if there is one, except those for `OPEN_PATHS`. `served` is the address of the server.
    """

    def __init__(self, app: ASGIApp, key: str | None, served: str, metrics: Metrics) -> None:
        self._app, self._served, self._metrics = app, served, metrics
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        if scope["method"] == "HEAD":  # as GET; the server sends no body, since it keeps its own scope
            scope = {**scope, "method": "GET"}

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_response(message["status"])
            await send(message)

        refusal = self._check_access(Headers(scope=scope), scope["path"])
        await (refusal.response() if refusal else self._app)(scope, receive, send_and_count)

    def _check_access(self, headers: Headers, path: str) -> ApiError | None:
        try:
            check_lengths(headers)
        except BodyError as error:
            return body_error(error)
        if self._key is not None:
            sent = bearer_of(headers).encode("latin-1")  # the bytes that were sent
            if path in OPEN_PATHS or (sent and hmac.compare_digest(sent, self._key)):
                return None
            message = "the request must bear the key of this server: 'Authorization: Bearer KEY'"
            more = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers=more)
        if is_loopback(self._served) and not is_own_name(headers.get("host", ""), self._served):
            message = "the Host header must name this server; use its address"
            return ApiError(403, message, kind="permission_error", code="foreign_host")
        return None


def bearer_of(headers: Headers) -> str:
    """Return the key that a request carries, required or not: requests with one key share a memory. "" for none."""
    scheme, _, sent = headers.get("authorization", "").partition(" ")
    return sent.strip(" \t") if scheme.lower() == "bearer" else ""
