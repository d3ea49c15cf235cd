"""Host names and addresses of the project's servers, and a socket that listens on one."""

import ipaddress
import socket

from store.errors import UsageError

BACKLOG = 2048


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_name(host: str, served: str) -> bool:
    """Return True if a Host header names this server: by an address, as localhost, or as `served`.

    A page of another site can make its own name resolve to this server (DNS rebinding), but then the browser sends
    that name.
    """
    name, _, port = host.rpartition(":")
    name = (name if port.isdecimal() else host).lower()
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    if name in ("localhost", served.lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises `UsageError` if the port is taken, or the name is empty or not of this machine.
    """
    if not host:  # for a socket this means every address
        raise UsageError("--host must be an address of this machine, got none; try --host 127.0.0.1")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small writes at once only if the protocol is named; otherwise each may wait some 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # so that the address accepts connections once it is printed
    except OSError as error:
        listener.close()
        reason, near = error.strerror or error, port % 65535 + 1
        raise UsageError(f"{host} port {port} must be free to listen on, but: {reason}; try --port {near}") from error
    return listener
