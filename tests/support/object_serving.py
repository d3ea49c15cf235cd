"""A server on loopback that speaks S3's protocol, and a look at what lies on it past omnidraft's own code."""

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest

HOST = "127.0.0.1"
_numbers = itertools.count()


@dataclass(frozen=True)
class ObjectServer:
    """The address of an object server, and access to it."""

    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a process finds it; Amazon's own tools read the same."""
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        return {**keys, "AWS_ENDPOINT_URL": self.endpoint, "AWS_MAX_ATTEMPTS": "2"}

    @cached_property
    def client(self) -> Any:
        """A client of boto3 for the server."""
        import boto3

        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.endpoint, **keys)

    def place(self) -> str:
        """The URI of a run in a new bucket."""
        bucket = f"bucket-{next(_numbers)}"
        self.client.create_bucket(Bucket=bucket)
        return f"s3://{bucket}/some where/run"

    def names(self, uri: str) -> list[str]:
        """The objects below a URI, relative to it."""
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        return [item["Key"].removeprefix(f"{prefix}/") for page in pages for item in page.get("Contents", ())]

    def read(self, uri: str, name: str) -> bytes:
        return self.client.get_object(**_key(uri, name))["Body"].read()

    def write(self, uri: str, name: str, content: bytes | None) -> None:
        """Put something else in an object's place, or nothing at all."""
        if content is None:
            self.client.delete_object(**_key(uri, name))
        else:
            self.client.put_object(**_key(uri, name), Body=content)


def _key(uri: str, name: str) -> dict[str, str]:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return {"Bucket": bucket, "Key": f"{prefix}/{name}"}


class Door:
    """A port that leads to a server. `shut`: takes no connection any more and drops those that are open; `mute`: takes
    them, and nothing ever comes back."""

    def __init__(self, endpoint: str) -> None:
        self._server = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self._open: list[socket.socket] = []
        self._mute = False
        self._listen(0)

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self._port}"

    def open(self) -> None:
        self._mute = False
        self._listen(self._port)

    def mute(self) -> None:
        self._mute = True

    def shut(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _listen(self, port: int) -> None:
        self._listener = socket.create_server((HOST, port))
        self._port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(self._server)
                self._open += [client, server]
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError), one, other:
            while data := one.recv(65536):
                while self._mute:
                    time.sleep(0.05)
                other.sendall(data)


@contextmanager
def serving() -> Iterator[ObjectServer]:
    """Run a server during the block."""
    moto_server = pytest.importorskip("moto.server", reason="needs a server to talk to: pip install 'moto[server]'")
    server = moto_server.ThreadedMotoServer(ip_address=HOST, port=0, verbose=False)
    server.start()
    try:
        yield ObjectServer(f"http://{HOST}:{server.get_host_and_port()[1]}")
    finally:
        server.stop()


@pytest.fixture(scope="session")
def objects() -> Iterator[ObjectServer]:
    with serving() as server, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def place(objects: ObjectServer) -> str:
    """The URI of a run in a new bucket of the server."""
    return objects.place()
