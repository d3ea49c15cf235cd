"""Early ends of requests: the client disconnects, or the server shuts down."""

import json
import signal
import subprocess
import sys
import threading

import openai
import pytest
from places import ROOT
from serving_doubles import HANG_SECONDS, MODEL, ScriptedEngine, run_http_server, wait_until

from pipeline.serve.http.limits import Limits

SERVER = """
import sys
from serving_doubles import MODEL, ScriptedEngine
from pipeline.serve.http.api import make_app
from pipeline.serve.http.limits import Limits
from pipeline.serve.http.metrics import Metrics
from pipeline.serve.http.server import serve
from store.hosts import listen
limits = Limits(grace_seconds=float(sys.argv[1]))
listener = listen("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
serve(make_app(ScriptedEngine(pause=0.05), limits, Metrics(MODEL)), listener, limits, has_key=False)
print("to be committed", flush=True)
"""


def test_a_client_that_disconnects_from_a_stream_frees_its_places():
    with run_http_server(engine := ScriptedEngine(pause=0.02)) as served, served.client() as client:
        stream = client.completions.create(model=MODEL, prompt="x" * 3000, max_tokens=3000, n=3, stream=True)
        next(iter(stream))
        stream.close()
        wait_until(lambda: len(engine.cancels) == 3)
        wait_until(lambda: engine.running == 0)
        assert b'finished_reason="abort",model_name="family/echo-1"} 3.0' in served.metrics.render(engine.read_status())


def test_a_client_that_disconnects_during_tokenising_never_reaches_the_engine():
    with run_http_server(engine := ScriptedEngine(held_from=2)) as served:
        body = json.dumps({"model": MODEL, "prompt": "long"}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with served.connect() as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: len(served.server.server_state.tasks) == 1)
        wait_until(lambda: len(served.server.server_state.tasks) == 0)
        engine.encoding.set()
        assert served.client().completions.create(model=MODEL, prompt="y").choices[0].text == "y"
        assert [request.prompt.text for request in engine.requests] == ["y"]


def test_running_requests_finish_before_the_server_ends():
    with (
        run_http_server(engine := ScriptedEngine(held=True), Limits(grace_seconds=30)) as served,
        served.client() as client,
    ):
        texts: list[str] = []
        client_thread = threading.Thread(
            target=lambda: texts.append(client.completions.create(model=MODEL, prompt="abc").choices[0].text)
        )
        client_thread.start()
        wait_until(lambda: engine.running == 1)
        served.server.handle_exit(signal.SIGTERM, None)
        health = client._client.get(f"{served.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "leaving")
        with pytest.raises(openai.InternalServerError) as caught, served.client() as other:
            other.completions.create(model=MODEL, prompt="x")
        assert (caught.value.status_code, caught.value.code) == (503, "server_leaving")
        assert int(caught.value.response.headers["retry-after"]) > 0
        engine.go.set()
        client_thread.join()
        assert texts == ["abc"]
        served.thread.join(HANG_SECONDS)
        assert not served.thread.is_alive()


def test_a_request_beyond_the_grace_time_receives_an_error():
    with (
        run_http_server(engine := ScriptedEngine(pause=0.05), Limits(grace_seconds=0.5)) as served,
        served.client() as client,
    ):
        stream = client.completions.create(model=MODEL, prompt="x" * 3000, max_tokens=3000, stream=True)
        next(iter(stream))
        served.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "server_leaving"
        served.thread.join(HANG_SECONDS)
        assert engine.running == 0


def test_a_second_signal_ends_the_server_at_once():
    with (
        run_http_server(engine := ScriptedEngine(held=True), Limits(grace_seconds=1000)) as served,
        served.client() as client,
    ):
        failed: list[Exception] = []

        def request() -> None:
            try:
                client.completions.create(model=MODEL, prompt="x")
            except openai.APIError as error:
                failed.append(error)

        client_thread = threading.Thread(target=request)
        client_thread.start()
        wait_until(lambda: engine.running == 1)
        served.server.handle_exit(signal.SIGINT, None)
        served.server.handle_exit(signal.SIGINT, None)
        served.thread.join(HANG_SECONDS)
        assert not served.thread.is_alive()
        client_thread.join()
        assert len(failed) == 1


@pytest.mark.slow
def test_a_signal_shuts_the_server_down():
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'tests/support'){SERVER}", "30"]
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
