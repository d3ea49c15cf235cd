"""How requests end early: the client leaves, or the server does."""

import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import openai
import pytest
from serving_doubles import MODEL, ScriptedEngine, serving, until

from pipeline.serve_limits import Limits
from pipeline.serve_uvicorn import exposure, listen
from store.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import sys
from serving_doubles import MODEL, ScriptedEngine
from pipeline.serve_api import make_app
from pipeline.serve_limits import Limits
from pipeline.serve_metrics import Metrics
from pipeline.serve_uvicorn import listen, serve
limits = Limits(grace_seconds=float(sys.argv[1]))
listener = listen("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
serve(make_app(ScriptedEngine(pause=0.05), limits, Metrics(MODEL)), listener, limits, has_key=False)
print("to be committed", flush=True)
"""


def test_a_client_that_leaves_a_stream_frees_its_places():
    with serving(engine := ScriptedEngine(pause=0.02)) as served, served.client() as client:
        stream = client.completions.create(model=MODEL, prompt="x" * 3000, max_tokens=3000, n=3, stream=True)
        next(iter(stream))
        stream.close()
        until(lambda: len(engine.cancels) == 3)
        until(lambda: engine.running == 0)
        assert b'finished_reason="abort",model_name="family/echo-1"} 3.0' in served.metrics.text(engine.figures())


def test_a_client_that_does_not_wait_frees_its_places():
    with serving(engine := ScriptedEngine(held=True)) as served, served.client() as client:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.5).completions.create(model=MODEL, prompt="x", n=2)
        until(lambda: len(engine.cancels) == 2)
        until(lambda: engine.running == 0)


def test_a_client_that_leaves_before_its_prompt_is_read_never_reaches_the_engine():
    with serving(engine := ScriptedEngine(held_from=2)) as served:
        body = json.dumps({"model": MODEL, "prompt": "long"}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with served.connect() as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: len(served.server.server_state.tasks) == 1)
        until(lambda: len(served.server.server_state.tasks) == 0)
        engine.encoding.set()
        assert served.client().completions.create(model=MODEL, prompt="y").choices[0].text == "y"
        assert [ask.prompt.text for ask in engine.asks] == ["y"]


def test_what_runs_is_finished_before_the_server_ends():
    with serving(engine := ScriptedEngine(held=True), Limits(grace_seconds=30)) as served, served.client() as client:
        texts: list[str] = []
        asking = threading.Thread(
            target=lambda: texts.append(client.completions.create(model=MODEL, prompt="abc").choices[0].text)
        )
        asking.start()
        until(lambda: engine.running == 1)
        served.server.handle_exit(signal.SIGTERM, None)
        health = client._client.get(f"{served.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "leaving")
        with pytest.raises(openai.InternalServerError) as caught, served.client() as other:
            other.completions.create(model=MODEL, prompt="x")
        assert (caught.value.status_code, caught.value.code) == (503, "server_leaving")
        assert int(caught.value.response.headers["retry-after"]) > 0
        engine.go.set()
        asking.join()
        assert texts == ["abc"]
        served.thread.join(30)
        assert not served.thread.is_alive()


def test_what_outlasts_the_grace_time_is_told_so():
    with serving(engine := ScriptedEngine(pause=0.05), Limits(grace_seconds=0.5)) as served, served.client() as client:
        stream = client.completions.create(model=MODEL, prompt="x" * 3000, max_tokens=3000, stream=True)
        next(iter(stream))
        served.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "server_leaving"
        served.thread.join(30)
        assert engine.running == 0


def test_told_twice_it_ends_at_once():
    with serving(engine := ScriptedEngine(held=True), Limits(grace_seconds=1000)) as served, served.client() as client:
        failed: list[Exception] = []

        def ask() -> None:
            try:
                client.completions.create(model=MODEL, prompt="x")
            except openai.APIError as error:
                failed.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: engine.running == 1)
        served.server.handle_exit(signal.SIGINT, None)
        served.server.handle_exit(signal.SIGINT, None)
        served.thread.join(30)
        assert not served.thread.is_alive()
        asking.join()
        assert len(failed) == 1


def test_a_signal_ends_it_in_order():
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'tests/pipeline'){SERVER}", "30"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model=MODEL, prompt="abcdefgh", stream=True)
        texts = [next(iter(stream)).choices[0].text]
        process.terminate()
        texts += [part.choices[0].text for part in stream]
        assert "".join(texts) == "abcdefgh"
        assert process.stdout.read() == "to be committed\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("host", "has_key", "warned"),
    [("127.0.0.1", False, False), ("::1", False, False), ("0.0.0.0", False, True), ("0.0.0.0", True, False)],
)
def test_listening_to_all_without_a_key_is_warned_of(host: str, has_key: bool, warned: bool):
    assert (exposure(host, has_key) is not None) == warned


def test_small_events_are_sent_at_once():
    with serving(ScriptedEngine(held=True)) as served, served.connect():
        until(lambda: len(served.server.server_state.connections) == 1)
        (connection,) = served.server.server_state.connections
        kept = connection.transport.get_extra_info("socket")
        assert kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_that_is_taken():
    with listen("127.0.0.1", 0) as first, pytest.raises(UsageError, match="must be free to listen on"):
        listen("127.0.0.1", first.getsockname()[1])
    with pytest.raises(UsageError, match="got none"):
        listen("", 0)
