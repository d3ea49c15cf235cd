"""Uvicorn with bounds: on how long a connection may do nothing, on how many there are, and on how long ending takes."""

import asyncio
import socket
import sys
import time
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeline.serve_errors import ApiError, as_json
from pipeline.serve_guard import is_loopback
from pipeline.serve_limits import Limits, connections_allowed
from store.errors import UsageError

BACKLOG = 2048
LAST_SECONDS = 5  # for answers to leave when nothing runs any more


class BoundedConnection(H11Protocol):
    """A connection that is closed when it is idle too long, and cut off when its reader takes nothing.

    Uvicorn alone waits for ever for a first request, for the rest of one's headers, and for a reader. Subclasses,
    made by `bounded`, say what is too long and know each other.
    """

    limits: Limits
    most: int
    idle: dict["BoundedConnection", asyncio.TimerHandle]  # connections without a request, idle longest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection; the one that is idle longest makes room for it."""
        super().connection_made(transport)
        self._unread: int = 0
        self._reader: asyncio.TimerHandle | None = None
        self._watch()
        if len(self.connections) > self.most and self.idle:
            next(iter(self.idle))._make_room()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """A request is answered."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        self._forget()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets an answer in the form of all others."""
        error = as_json(ApiError(400, msg, code="invalid_http").body)
        told = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(told + b"content-length: %d\r\n\r\n" % len(error) + error)
        self.transport.close()

    def _watch(self) -> None:
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy or self.transport.is_closing():
            self._stop_idling()
        elif self not in self.idle:
            self.idle[self] = self.loop.call_later(self.limits.idle_seconds, self.transport.abort)

    def _make_room(self) -> None:
        self._stop_idling()
        self.connections.discard(self)  # which `connection_lost` does too late for the next one that comes
        self.transport.abort()

    def _stop_idling(self) -> None:
        if timer := self.idle.pop(self, None):
            timer.cancel()

    def _forget(self) -> None:
        self._stop_idling()
        if self._reader is not None:
            self._reader.cancel()

    def pause_writing(self) -> None:
        """The reader is behind."""
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None

    def _expect_reader(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._reader = self.loop.call_later(self.limits.reader_seconds, self._cut_off)

    def _cut_off(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread:
            self._expect_reader()
        else:
            self.transport.abort()


def bounded(limits: Limits) -> type[BoundedConnection]:
    """Connections of one server."""
    told: dict[str, Any] = {"limits": limits, "most": connections_allowed(limits), "idle": {}}
    return type("Connection", (BoundedConnection,), told)


class Server(uvicorn.Server):
    """Ends in order: told to end, it refuses new requests and waits for the running ones, up to the grace time.

    Meanwhile `/health` says 503, so that whoever deals out requests looks elsewhere. Told again, it ends at once.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, grace_seconds: float) -> None:
        super().__init__(config)
        self._traffic, self._grace = app.state.traffic, grace_seconds
        self._end: float | None = None  # by `time.monotonic`, of the grace time

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. It is not raised again when the server has ended: the run is still to be committed."""
        if self._traffic.leaving:
            self.should_exit = self.force_exit = True
        else:
            self.leave()

    def leave(self) -> None:
        """Begin to end. May be called from any thread."""
        self._end = time.monotonic() + self._grace
        self._traffic.leaving = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if self._end is not None and not self.should_exit:
            if time.monotonic() > self._end:
                self._traffic.let_go()
                self.should_exit = True
            elif not self.server_state.tasks:
                self.should_exit = True
        return await super().on_tick(counter)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `UsageError` when the port is taken or the name is empty or not of this machine."""
    if not host:  # a socket would take it for every address
        raise UsageError("--host must be an address of this machine, got none; try --host 127.0.0.1")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only with the protocol named does asyncio send small writes at once; else each may wait some 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # so that the address, once printed, can be asked
    except OSError as error:
        listener.close()
        told = error.strerror or error
        near = port % 65535 + 1
        raise UsageError(f"{host} port {port} must be free to listen on, but: {told}; try --port {near}") from error
    return listener


def server_of(app: FastAPI, limits: Limits) -> Server:
    """A server that is not started; its `run(sockets=[...])` serves until it is told to end."""
    config = uvicorn.Config(
        app,
        http=bounded(limits),
        ws="none",
        loop="asyncio",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=max(1, int(limits.idle_seconds)),
        timeout_graceful_shutdown=LAST_SECONDS,
    )
    return Server(config, app, limits.grace_seconds)


def exposure(host: str, has_key: bool) -> str | None:
    """What the user should know who listens on `host`."""
    if has_key or is_loopback(host):
        return None
    return f"listening on {host}: whoever can reach this machine can use the models; set --api-key"


def serve(app: FastAPI, listener: socket.socket, limits: Limits, *, has_key: bool) -> None:
    """Serve until SIGTERM or SIGINT; returns when the running requests are answered, or after the grace time.

    Args:
        app: from `make_app`.
        listener: from `listen`; it is closed.
        has_key: whether a key is asked for, without which other machines should not reach it.
    """
    if warning := exposure(listener.getsockname()[0], has_key):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    server_of(app, limits).run(sockets=[listener])
