"""Hostile input to `omnidraft serve`: it responds 4xx in OpenAI's form, keeps running, and delays no other client."""

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_doubles import HANG_SECONDS, MODEL, HttpServer, ScriptedEngine, complete, run_http_server, wait_until

from pipeline.serve.http.api import make_app
from pipeline.serve.http.limits import Limits
from pipeline.serve.http.metrics import Metrics
from pipeline.serve.http.openai_requests import ChatRequest, CompletionRequest
from pipeline.serve.http.response_stream import LONG_BYTES, ThreadPools
from pipeline.serve.http.server import ACCEPTED_AT_ONCE, make_server
from store.hosts import BACKLOG, listen

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
ENGINE = ScriptedEngine()
APP = make_app(ENGINE, Limits(), Metrics(MODEL))

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
names = st.sampled_from([*CompletionRequest.model_fields, *ChatRequest.model_fields, "tools", "logit_bias", "suffix"])
likely = st.one_of(values, st.integers(-2, 20), st.floats(-1, 3), st.sampled_from([MODEL, "user", [MODEL], [{}]]))


async def _post(path: str, body: bytes) -> tuple[int, bytes]:
    """Post to the app without a network and return its response."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return parts.pop() if parts else await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    rest = {"http_version": "1.1", "query_string": b"", "root_path": "", "scheme": "http", "raw_path": path.encode()}
    await APP({"type": "http", "method": "POST", "path": path, "headers": headers, **rest}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def post(path: str, body: bytes) -> tuple[int, Any]:
    status, answer = asyncio.run(_post(path, body))
    if status == 200 and answer.startswith(b"data: "):
        assert answer.endswith(b"data: [DONE]\n\n")
        return status, None
    response = json.loads(answer)
    if status != 200:
        assert 400 <= status < 500, response
        assert set(response) == {"error"}
        assert set(response["error"]) == {"message", "type", "param", "code"}
        assert len(response["error"]["message"]) < 500
        assert status != 422
    return status, response


@pytest.mark.parametrize("path", [PLAIN, CHAT])
@given(body=st.one_of(st.binary(), values.map(json.dumps).map(str.encode)))
@settings(max_examples=150)
def test_any_bytes(path: str, body: bytes):
    assert post(path, body)[0] == 400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "rest"), [(PLAIN, {"prompt": "own"}), (CHAT, {"messages": [{"role": "user", "content": "own"}]})]
)
@given(changed=st.dictionaries(names, likely, min_size=1, max_size=3))
@settings(max_examples=400)
def test_any_values(path: str, rest: dict[str, Any], changed: dict[str, Any]):
    before = len(ENGINE.requests)
    status, response = post(path, json.dumps({"model": MODEL, **rest, **changed}).encode())
    requests = ENGINE.requests[before:]
    if status != 200:
        assert requests == []
    elif response is not None and path == PLAIN and not changed.get("echo"):
        assert [choice["text"] for choice in response["choices"]] == [complete(request)[1] for request in requests]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"model": "\xff"}',
        b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf{}",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": -Infinity}',
        b'{"temperature": 1e999}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"prompt": "\\ud800"}',
        b'{"\\uDFFF": 1}',
        b"{'model': 1}",
        b'{"model": 1} {}',
    ],
)
def test_bodies_that_are_no_json_object(body: bytes):
    status, response = post(PLAIN, body)
    assert (status, response["error"]["code"]) == (400, "invalid_json")


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def served(engine: ScriptedEngine) -> Iterator[HttpServer]:
    bounds = Limits(idle_seconds=5, grace_seconds=0.2)
    with run_http_server(engine, bounds) as server:
        yield server


def assert_serves(served: HttpServer) -> None:
    """Require that another client is served."""
    with served.client() as client:
        assert client.completions.create(model=MODEL, prompt="fine").choices[0].text == "fine"


def head(length: int | None, kind: str = "application/json") -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST {PLAIN} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{size}\r\n\r\n".encode()


def read_all(connection: socket.socket) -> bytes:
    """Read until the other side closes."""
    read = b""
    while part := connection.recv(1 << 16):
        read += part
    return read


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_a_prompt_of_ten_megabytes(served: HttpServer):
    with served.client() as client, pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=MODEL, prompt="x" * 10_000_000)
    assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")
    assert_serves(served)


def test_a_slow_sender():
    with (
        run_http_server(ScriptedEngine(), Limits(body_seconds=1, grace_seconds=0.2)) as served,
        served.connect() as connection,
    ):
        connection.sendall(head(100) + b"{")
        answer = b""
        while not answer.endswith(b"}"):
            answer += (part := connection.recv(1 << 16))
            assert part, answer
    assert status_of(answer) == 408
    assert b"request_timeout" in answer


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /v1", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"],
    ids=["none", "some", "second"],
)
def test_an_idle_connection_is_closed(served: HttpServer, sent: bytes):
    with served.connect() as connection:
        connection.sendall(sent)
        try:
            answer = read_all(connection)
        except ConnectionResetError:
            answer = b""
    assert answer.count(b"HTTP/1.1") == sent.count(b"\r\n\r\n")


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00" * 9 + b"\r\n\r\n", b"GET\r\n\r\n", b"x" * 100_000])
def test_invalid_http(served: HttpServer, sent: bytes):
    with served.connect() as connection:
        connection.sendall(sent)
        answer = connection.recv(1 << 16)
    assert status_of(answer) == 400
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    assert_serves(served)


def test_beyond_the_limit_the_connection_idle_longest_is_closed():
    with run_http_server(ScriptedEngine(), Limits(connections=20, grace_seconds=0.2)) as served:
        idle = [served.connect() for _ in range(30)]
        assert_serves(served)
        gone = 0
        for connection in idle[:10]:
            try:
                gone += connection.recv(1) == b""
            except ConnectionResetError:
                gone += 1
        assert gone == 10
        idle[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status_of(idle[-1].recv(1 << 16)) == 200
        for connection in idle:
            connection.close()


@pytest.mark.slow
def test_a_slow_reader_is_disconnected_and_delays_nobody():
    bounds = Limits(reader_seconds=1, grace_seconds=0.2, choices=30, scores=10**7)
    with run_http_server(engine := ScriptedEngine(capacity=5000), bounds) as served, served.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(
            {"model": MODEL, "prompt": "y" * 2000, "max_tokens": 2000, "logprobs": 20, "stream": True, "n": 30}
        )
        connection.sendall(head(len(body)) + body.encode())
        wait_until(lambda: len(engine.pending) == 30)
        assert_serves(served)
        wait_until(lambda: len(served.server.server_state.tasks) == 0)
        wait_until(lambda: len(served.server.server_state.connections) == 0)


def test_long_prompts_wait_for_each_other_not_short_ones_for_them():
    with run_http_server(engine := ScriptedEngine(held_from=100_000)) as served:
        body = json.dumps({"model": MODEL, "prompt": "x" * 500_000}).encode()
        long = [served.connect() for _ in range(8)]
        for connection in long:
            connection.sendall(head(len(body)) + body)
        wait_until(lambda: len(served.server.server_state.tasks) == 8)
        assert_serves(served)
        engine.encoding.set()
        answers = [connection.recv(1 << 16) for connection in long]
    assert [status_of(answer) for answer in answers] == [400] * 8  # longer than the context


def test_a_client_that_sends_many_long_texts_delays_no_other():
    async def run_in_turns(clients: str) -> str:
        pools, go, order = ThreadPools(), threading.Event(), []

        def run(client: str, size: int = LONG_BYTES + 1) -> asyncio.Future[None]:
            return asyncio.ensure_future(pools.run(size, lambda: order.append(client), client))

        first = asyncio.ensure_future(pools.run(LONG_BYTES + 1, go.wait, "a"))
        await asyncio.sleep(0)
        tasks = [run(client) for client in clients]
        await run("a short text", LONG_BYTES)
        go.set()
        await asyncio.gather(first, *tasks)
        pools.close()
        return ", ".join(order)

    assert asyncio.run(run_in_turns("aabac")) == "a short text, b, c, a, a, a"


def test_bodies_hold_no_more_than_is_allowed_together():
    bounds = Limits(body_bytes=1 << 20, bodies_bytes=1 << 20, grace_seconds=0.2)
    with run_http_server(ScriptedEngine(), bounds) as served, served.connect() as first, served.connect() as second:
        first.sendall(head(1_000_000) + b"x" * 900_000)
        wait_until(lambda: len(served.server.server_state.tasks) == 1)
        assert_serves(served)
        second.sendall(head(1_000_000) + b"x" * 900_000)
        answer = second.recv(1 << 16)
        assert status_of(answer) == 429
        assert b"retry-after: 1" in answer.lower()
        first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("path", [PLAIN, "/health"])
def test_two_lengths_of_one_body_close_the_connection(served: HttpServer, path: str):
    """A proxy that goes by the length would take what follows for another client's request."""
    smuggled = b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    both = f"Content-Length: {len(smuggled)}\r\nTransfer-Encoding: chunked"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{both}\r\n\r\n"
    with served.connect() as connection:
        connection.sendall(head.encode() + smuggled)
        answer = read_all(connection)
    assert status_of(answer) == 400
    assert answer.count(b"HTTP/1.1") == 1, "what follows is no request"
    assert b"connection: close" in answer.lower()
    assert_serves(served)


class CountingListener(socket.socket):
    """Counts the connections that are accepted in one turn of the event loop."""

    count = most = total = 0

    def accept(self) -> tuple[socket.socket, Any]:
        accepted = super().accept()
        if not self.count:
            asyncio.get_running_loop().call_soon(setattr, self, "count", 0)
        self.count, self.total = self.count + 1, self.total + 1
        self.most = max(self.most, self.count)
        return accepted


def test_a_flood_of_connections_is_accepted_in_small_parts():
    """Requests are served between them; those that are not accepted yet wait."""
    opened, limits = listen("127.0.0.1", 0), Limits(grace_seconds=0.0)
    listener = CountingListener(fileno=opened.detach())
    clients = [socket.create_connection(listener.getsockname()) for _ in range(200)]
    server = make_server(make_app(ScriptedEngine(), limits, Metrics(MODEL)), limits)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    wait_until(lambda: listener.total == len(clients))
    most = min(BACKLOG, int(Path("/proc/sys/net/core/somaxconn").read_text()))  # that may wait
    wait_until(lambda: struct.unpack("8x6I", listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32))[-1] == most)
    server.begin_shutdown()
    thread.join(HANG_SECONDS)
    for client in clients:
        client.close()
    assert 1 < listener.most <= ACCEPTED_AT_ONCE
