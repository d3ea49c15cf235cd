"""MLflow servers on loopback, a PostgreSQL cluster for one of them, and a faulty proxy in front of them."""

import http.client
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import warm_python

POSTGRES = Path("/usr/lib/postgresql/15/bin")
HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@contextmanager
def mlflow_server(folder: Path, store: str | None = None) -> Iterator[str]:
    """Run a server with its artifacts in `folder`, and its database too unless `store` is given; yields its URI."""
    port = free_port()
    store = store or f"sqlite:///{folder}/mlflow.db"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--artifacts-destination"]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("wb") as log:
        process = warm_python.Popen(
            [*command, str(folder / "files"), "--host", HOST, "--port", str(port), "--workers", "1"],
            env=os.environ | quiet,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    uri = f"http://{HOST}:{port}"
    try:
        wait_until_up(f"{uri}/health", process)
        yield uri
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_up(url: str, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert process.poll() is None, f"the server ended with {process.returncode}"
            assert time.monotonic() < end, f"{url} did not answer"
            time.sleep(0.2)


@contextmanager
def postgres() -> Iterator[str]:
    """Run a PostgreSQL cluster as another user than root; yields the URI of an empty database."""
    pytest.importorskip("psycopg2", reason="PostgreSQL needs its driver: pip install psycopg2-binary")
    if not (POSTGRES / "initdb").exists():
        pytest.skip(f"PostgreSQL 15 must be installed below {POSTGRES.parent}")
    owner = "postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
    if owner not in {user.pw_name for user in pwd.getpwall()}:
        pytest.skip(f"PostgreSQL does not run as root, and there is no user {owner!r} to run it as")
    with tempfile.TemporaryDirectory(prefix="omnidraft-postgres-") as folder:
        shutil.chown(folder, owner)
        as_owner = {"user": owner if os.getuid() == 0 else None, "cwd": folder, "stdout": subprocess.DEVNULL}
        create = [POSTGRES / "initdb", "-D", f"{folder}/data", "-U", "mlflow", "--auth=trust", "--no-sync"]
        subprocess.run(create, check=True, **as_owner)
        port = free_port()
        server = [POSTGRES / "postgres", "-D", f"{folder}/data", "-h", HOST, "-p", str(port), "-k", folder, "-F"]
        process = subprocess.Popen(server, stderr=subprocess.DEVNULL, **as_owner)
        try:
            wait_until_listening(port, 60)
            yield f"postgresql+psycopg2://mlflow@{HOST}:{port}/postgres"
        finally:
            process.send_signal(signal.SIGINT)  # a fast shutdown
            process.wait(30)


def wait_until_listening(port: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((HOST, port), 1).close()
            return
        except OSError:
            assert time.monotonic() < end, f"port {port} did not open"
            time.sleep(0.1)


class Proxy:
    """Forwards requests to a server, with the fault that `mood` names.

    "well": none; "broken": responds 500; "mute": forwards the request and does not respond; "slow": responds late;
    "moody": a random one of these, by a seed.
    """

    def __init__(self, server: str) -> None:
        self.mood, self._server, self._random = "well", server.removeprefix("http://"), random.Random(5)
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def __getattr__(self, name: str):
                if name.startswith("do_"):
                    return lambda: proxy.handle(self)
                raise AttributeError(name)

            def log_message(self, *about: object) -> None:
                pass

        self._listener = ThreadingHTTPServer((HOST, 0), Handler)
        self._listener.daemon_threads = True
        self.uri = f"http://{HOST}:{self._listener.server_address[1]}"
        threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        mood = self._random.choice(["well", "well", "broken", "mute", "slow"]) if self.mood == "moody" else self.mood
        if mood == "slow":
            time.sleep(0.2)
        if mood == "broken":
            self._respond(request, 500, {}, b'{"error_code": "INTERNAL_ERROR", "message": "on purpose"}')
            return
        status, headers, answer = self._forward(request, body)
        if mood == "mute":
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)
        else:
            self._respond(request, status, headers, answer)

    def _forward(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self._server, timeout=60)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in ("host", "connection")}
        connection.request(request.command, request.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, {"Content-Type": answer.headers.get("Content-Type", "application/json")}, content

    @staticmethod
    def _respond(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)
