"""Uvicorn with bounds on idle time, on the number of connections and on the duration of a shutdown."""

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, ClassVar

import uvicorn
from fastapi import FastAPI
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeline.serve.http.errors import ApiError, encode_json
from pipeline.serve.http.limits import Limits
from store.hosts import BACKLOG, is_loopback
from store.log_records import limit_warnings

if TYPE_CHECKING:
    from pipeline.serve.http.api import ActiveRequests

LOG = logging.getLogger("omnidraft.serve")

SPARE_DESCRIPTORS = 128  # files of the log, models, the event loop
ACCEPTED_AT_ONCE = 16  # connections, before requests are served again: in a flood each takes .4 ms and more
SEND_SECONDS = 5  # for responses to be sent after the last request has finished


class BoundedConnection(H11Protocol):
    """A connection that is closed when it is idle too long, or when its client stops reading.

    Uvicorn alone waits without limit for a first request, for the rest of the headers, and for a reader.
    `make_server` makes one subclass per server, which holds the limits and the idle connections.
    """

    limits: ClassVar[Limits]
    max_connections: ClassVar[int]
    idle: ClassVar[dict["BoundedConnection", asyncio.TimerHandle]]  # connections without a request, longest idle first

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; beyond the limit, the longest idle one is closed."""
        super().connection_made(transport)
        self._unsent: int = 0
        self._reader_timer: asyncio.TimerHandle | None = None
        self._update_idle_timer()
        if len(self.connections) > self.max_connections and self.idle:
            longest = next(iter(self.idle))
            longest._cancel_idle_timer()
            longest.connections.discard(longest)  # `connection_lost` would do it too late for the next connection
            longest.transport.abort()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_idle_timer()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_idle_timer()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_idle_timer()
        self._cancel_reader_timer()
        super().connection_lost(exc)

    @override
    def send_400_response(self, msg: str) -> None:
        error = encode_json(ApiError(400, msg, code="invalid_http").body)
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(error) + error)
        self.transport.close()

    def _update_idle_timer(self) -> None:
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy or self.transport.is_closing():
            self._cancel_idle_timer()
        elif self not in self.idle:
            self.idle[self] = self.loop.call_later(self.limits.idle_seconds, self.transport.abort)

    def _cancel_idle_timer(self) -> None:
        if timer := self.idle.pop(self, None):
            timer.cancel()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_reader_timer()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_reader_timer()

    def _start_reader_timer(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._reader_timer = self.loop.call_later(self.limits.reader_seconds, self._check_reader)

    def _cancel_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _check_reader(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent:
            self._start_reader_timer()
        else:
            self.transport.abort()


class DrainingServer(uvicorn.Server):
    """A server whose shutdown refuses new requests and waits for the running ones, up to the grace time.

    During the shutdown `/health` responds 503, so that a load balancer sends requests elsewhere. A second signal ends
    the server at once. It also shuts down once `failed` returns True.
    """

    def __init__(
        self, config: uvicorn.Config, app: FastAPI, grace_seconds: float, failed: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__(config)
        self._failed = failed
        self._active: ActiveRequests = app.state.active_requests
        self._grace = grace_seconds
        self._grace_end: float | None = None  # by `time.monotonic`

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve. As many connections as `listen` allows wait to be accepted."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. It is not raised again after the server ends, because the run must still be committed."""
        if self._active.shutting_down:
            self.should_exit = self.force_exit = True
        else:
            self.begin_shutdown()

    def begin_shutdown(self) -> None:
        """Refuse new requests and end after the running ones. May be called from any thread."""
        self._grace_end = time.monotonic() + self._grace
        self._active.shutting_down = True

    @override
    async def on_tick(self, counter: int) -> bool:
        if self._grace_end is None and self._failed():
            self.begin_shutdown()
        if self._grace_end is not None and not self.should_exit:
            if time.monotonic() > self._grace_end:
                self._active.interrupt_all()
                self.should_exit = True
            elif not self.server_state.tasks:
                self.should_exit = True
        return await super().on_tick(counter)


def make_server(app: FastAPI, limits: Limits, failed: Callable[[], bool] = lambda: False) -> DrainingServer:
    """Make a server without starting it; its `run(sockets=[...])` serves until a shutdown, or until it `failed`."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = max(1, min(limits.connections, descriptors - SPARE_DESCRIPTORS))
    attributes = {"limits": limits, "max_connections": connections, "idle": {}}
    config = uvicorn.Config(
        app,
        http=type("Connection", (BoundedConnection,), attributes),
        ws="none",
        loop="asyncio",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=ACCEPTED_AT_ONCE,  # asyncio accepts so many before it does anything else
        timeout_keep_alive=max(1, int(limits.idle_seconds)),
        timeout_graceful_shutdown=SEND_SECONDS,
    )
    limit_warnings("uvicorn.error")  # one for each request that is not HTTP
    return DrainingServer(config, app, limits.grace_seconds, failed)


def serve(
    app: FastAPI,
    listener: socket.socket,
    limits: Limits,
    *,
    has_key: bool,
    failed: Callable[[], bool] = lambda: False,
) -> None:
    """Serve until SIGTERM or SIGINT, or until it `failed`; returns after the running requests or the grace time.

    `listener` is a socket from `listen`; it is closed. Without a key, other machines should not reach the server.
    """
    host = listener.getsockname()[0]
    if not has_key and not is_loopback(host):
        message = "warning: listening on %s: anyone who can reach this machine can use the models; set --api-key"
        LOG.warning(message, host)
    make_server(app, limits, failed).run(sockets=[listener])
