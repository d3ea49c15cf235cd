"""What every request and answer of the dashboards must keep to, so that no other page can use them."""

import ipaddress
from collections.abc import Awaitable, Callable

from fastapi import Request
from fastapi.responses import PlainTextResponse, Response

# Own content only. Plotly sets styles in the page, so these are allowed; scripts in the page are not.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
OWN = ("same-origin", "none")  # where a browser says that a request comes from: this site, or the person
Next = Callable[[Request], Awaitable[Response]]


def is_own_name(host: str, served: str) -> bool:
    """Whether a Host header names this server: by an address, as localhost, or as it was told to listen.

    A page elsewhere can make its own name point here (DNS rebinding), but then the browser sends that name.
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.removeprefix("[").removesuffix("]").lower()
    if name in ("localhost", served.lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def guard(served: str) -> Callable[[Request, Next], Awaitable[Response]]:
    """Middleware that refuses foreign names and questions asked by other sites, and sets the headers."""

    async def guarded(request: Request, call_next: Next) -> Response:
        if not is_own_name(request.headers.get("host", ""), served):
            answer: Response = PlainTextResponse("The Host header must name this server; open it by its address.", 403)
        elif request.url.path.startswith("/api/") and request.headers.get("sec-fetch-site", "none") not in OWN:
            answer = PlainTextResponse("Other sites may not ask the log.", 403)
        else:
            answer = await call_next(request)
        answer.headers.update(HEADERS)
        return answer

    return guarded
