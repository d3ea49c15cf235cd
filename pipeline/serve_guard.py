"""Who may ask at all: whoever has the key, and on loopback without one, whoever means this server by its name."""

import hmac
import ipaddress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.serve_errors import ApiError, error_answer
from pipeline.serve_metrics import Metrics

OPEN_PATHS = ("/health",)  # what asks whether a server lives has no key


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_name(host: str, served: str) -> bool:
    """Whether a Host header names this server: by an address, as localhost, or as it was told to listen.

    A page elsewhere can make its own name point here (DNS rebinding), but then the browser sends that name.
    """
    name, _, port = host.rpartition(":")
    name = (name if port.isdigit() else host).removeprefix("[").removesuffix("]").lower()
    if name in ("localhost", served.lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guard:
    """Middleware that refuses before anything is read, and counts answers.

    Args:
        key: that requests must bear, except those for `/health`; None for none.
        served: the address that is listened on.
    """

    def __init__(self, app: ASGIApp, key: str | None, served: str, metrics: Metrics) -> None:
        self._app, self._served, self._metrics = app, served, metrics
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(message["status"])
            await send(message)

        refusal = self._refusal(Headers(scope=scope), scope["path"])
        await (error_answer(refusal) if refusal else self._app)(scope, receive, counted)

    def _refusal(self, headers: Headers, path: str) -> ApiError | None:
        if self._key is not None:
            return None if path in OPEN_PATHS or self._bears_key(headers) else _no_key()
        if is_loopback(self._served) and not is_own_name(headers.get("host", ""), self._served):
            message = "the Host header must name this server; use its address"
            return ApiError(403, message, kind="permission_error", code="foreign_host")
        return None

    def _bears_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").encode("latin-1").partition(b" ")  # the bytes that were sent
        assert self._key is not None
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"


def _no_key() -> ApiError:
    message = "the request must bear the key of this server: 'Authorization: Bearer KEY'"
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)
