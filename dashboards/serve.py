"""Serve the dashboards: `python -m dashboards.serve [--run DIR | --runs DIR]`; `omnidraft dashboard` starts this."""

import argparse
import ipaddress
import socket
import sys
from pathlib import Path

from store.errors import OmnidraftError, UsageError
from store.manifest import read_manifest

HOST, PORT = "127.0.0.1", 8050  # the pages have no password, so no other machine may see them


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(host: str, port: int) -> str:
    """Where a person on this machine opens the pages."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `UsageError` when the port is taken or the name is empty or not of this machine."""
    if not host:  # a socket would take it for every address
        raise UsageError(f"--host must be an address of this machine, got none; try --host {HOST}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # without the last asyncio delays answers
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # so that the address, once printed, can be opened
    except OSError as error:
        listener.close()
        raise UsageError(
            f"{host} port {port} must be free to listen on, but: {error.strerror or error}; "
            f"try --port {port % 65535 + 1}"
        ) from error
    return listener


def serve(run: Path | None, runs: Path, host: str, port: int) -> None:
    """Serve until Ctrl-C. Raises `OmnidraftError` when that cannot begin."""
    try:
        import uvicorn

        from dashboards.app import create_app
    except ImportError as error:
        message = f"the dashboards need {error.name}, which is not installed; install omnidraft again"
        raise UsageError(message) from error
    folder = run or runs
    if not folder.is_dir():
        raise UsageError(f"{'--run' if run else '--runs'} must name a folder that exists, got '{folder}'")
    if run:
        read_manifest(run)
    listener = listen(host, port)
    port = listener.getsockname()[1]
    if not is_loopback(host):
        warning = "whoever can reach this machine can read all prompts and texts; no password is asked"
        print(f"warning: listening on {host}: {warning}", file=sys.stderr, flush=True)
    print(f"dashboards over {folder}: {url_of(host, port)} (Ctrl-C ends them)", flush=True)
    config = uvicorn.Config(create_app(run, runs, host), log_level="warning", server_header=False)
    uvicorn.Server(config).run(sockets=[listener])


def main() -> None:
    """Read the arguments and serve."""
    parser = argparse.ArgumentParser(description="Serve the dashboards.")
    parser.add_argument("--run", type=Path, help="one run's folder")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="a folder of runs (default %(default)s)")
    parser.add_argument("--host", default=HOST, help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="0 takes any that is free (default %(default)s)")
    arguments = parser.parse_args()
    try:
        serve(arguments.run, arguments.runs, arguments.host, arguments.port)
    except OmnidraftError as error:
        print(f"omnidraft: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
