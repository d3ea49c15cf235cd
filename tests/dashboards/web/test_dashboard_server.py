"""The responses of the server, and the requests that it refuses."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import warm_python
from object_serving import objects, place  # noqa: F401  (fixtures)
from places import ROOT
from serving_runs import Serve, serve_dashboards
from stream_making import append, prompt, stream, write

from store.log.manifest import MANIFEST, PREVIOUS, part_path, read_manifest
from store.log.run_log import RunLog
from store.object_store.mirror import ObjectMirror


def get(url: str, headers: Mapping[str, str] = {}, body: Any = None) -> tuple[int, str, Mapping[str, str]]:
    """Send a request. Returns the status, text and headers of the response."""
    content = None if body is None else json.dumps(body).encode()
    more = {"Content-Type": "application/json"} if content else {}
    request = urllib.request.Request(url, content, {**headers, **more})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    runs = tmp_path_factory.mktemp("served") / "runs"
    write(runs / "a", stream())
    with serve_dashboards(runs) as address:
        yield address


@pytest.mark.parametrize(("host", "status"), [("localhost:8000", 200), ("evil.example", 403)])
def test_only_requests_to_its_own_names_are_answered(address: str, host: str, status: int):
    assert get(f"{address}/api/states", {"Host": host})[0] == status


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_other_sites_may_not_query_the_log(address: str, site: str, status: int):
    assert get(f"{address}/api/states", {"Sec-Fetch-Site": site})[0] == status


@pytest.mark.parametrize("header", ["Origin", "Referer"])
@pytest.mark.parametrize(
    ("page", "status"), [("http://evil.example", 403), ("null", 403), ("http://localhost:1", 403), ("{}", 200)]
)
def test_other_sites_may_not_query_the_log_over_plain_http(address: str, header: str, page: str, status: int):
    """A browser sends `Sec-Fetch-Site` to this machine and over TLS only."""
    assert get(f"{address}/api/states", {header: page.format(address)})[0] == status


@pytest.mark.parametrize(
    ("path", "status"),
    [("/stream", 200), ("/api/states", 200), ("/static/page.css", 200), ("/nothing", 404), ("/api/prompts", 500)],
)
def test_every_response_forbids_foreign_content(address: str, monkeypatch: pytest.MonkeyPatch, path: str, status: int):
    monkeypatch.setattr("dashboards.web.app.read_prompts", None)  # a bug, which gives status 500
    found, _, headers = get(address + path)
    assert found == status
    assert "default-src 'none'; script-src 'self';" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_no_file_of_the_pages_names_another_host():
    ours = [path for folder in ("static", "templates") for path in (ROOT / "dashboards" / "web" / folder).iterdir()]
    assert len(ours) > 10
    foreign = {name for path in ours for name in re.findall(r"https?://[^\s\"'<]+", path.read_text())}
    assert foreign == {"http://www.w3.org/2000/svg"}, "a name, which no browser requests"


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/api/stream?run=nothing", 400, "a run must be one of a; got nothing"),
        ("/api/stream?run=../a", 400, "a run must be one of a"),
        ("/api/stream?split=colour", 400, "curves can be split by"),
        ("/api/stream?window=-1", 400, "prompts per point must be positive"),
        ("/api/stream?window=x", 422, "window"),
        ("/api/prompts?order=%22offset%22;drop", 400, "prompts can be ordered by"),
        ("/api/completion?offset=999", 400, "the offset must be that of a completed prompt, got 999"),
        ("/api/completion", 422, "offset"),
        ("/static/../app.py", 404, "Not Found"),
        ("/docs", 404, "Not Found"),
        ("/openapi.json", 404, "Not Found"),
    ],
)
def test_an_invalid_request_gets_a_clear_error(address: str, path: str, status: int, message: str):
    found, text, _ = get(address + path)
    assert (found, message in text) == (status, True), text
    assert "Traceback" not in text


def test_the_name_of_a_dataset_cannot_inject_sql(address: str):
    name = urllib.request.quote("docs' OR true --")
    assert json.loads(get(f"{address}/api/prompts?dataset={name}")[1])["prompts"] == []


def test_rows_are_sent_again_only_after_a_commit(serve: Serve, tmp_path: Path):
    with RunLog(tmp_path / "runs" / "a") as log:
        append(log, stream(20), commit=True)
        address = serve(tmp_path / "runs")
        status, text, headers = get(f"{address}/api/stream")
        assert json.loads(text)["totals"][0]["prompts"] == 20
        assert get(f"{address}/api/stream", {"If-None-Match": headers["ETag"]})[0] == 304
        append(log, stream(30, first=20), commit=True)
        status, text, _ = get(f"{address}/api/stream", {"If-None-Match": headers["ETag"]})
    assert (status, json.loads(text)["totals"][0]["prompts"]) == (200, 30)


def test_a_large_response_is_truncated_and_marked(address: str):
    query = "SELECT * FROM range(20000)"
    found = json.loads(get(f"{address}/api/sql", body={"runs": [], "query": query})[1])
    assert (len(found["rows"]), found["total"], found["more"]) == (1000, 10_000, True)


def test_a_damaged_run_is_listed_and_explained(serve: Serve, tmp_path: Path):
    folder = write(tmp_path / "runs" / "a", stream(5))
    for name in (MANIFEST, PREVIOUS):
        (folder / name).write_text("{}")
    address = serve(tmp_path / "runs")
    (state,) = json.loads(get(f"{address}/api/states")[1])
    assert "must be the manifest of a log" in state["problem"]
    assert "cannot be read" in get(f"{address}/stream")[1]
    assert "must be the manifest of a log" in get(f"{address}/api/stream")[1]


def test_a_part_that_is_damaged_after_it_was_shown_is_named_everywhere(serve: Serve, tmp_path: Path):
    folder = write(tmp_path / "runs" / "a", stream(5))
    address = serve(tmp_path / "runs")
    query = {"runs": [], "query": "SELECT sum(seconds) AS seconds FROM prompts"}

    def look() -> list[str]:
        bodies = {"runs": None, "stream": None, "sql": query}
        return [get(f"{address}/api/{name}", body=body)[1] for name, body in bodies.items()]

    shown = look()
    path = part_path(folder, read_manifest(folder).tables["prompts"][0])
    content = path.read_bytes()
    path.write_bytes(content[:99] + bytes([content[99] ^ 1]) + content[100:])
    assert [str(path) in text and "must have the digest" in text for text in look()] == [True] * len(shown)
    path.write_bytes(content)
    assert look() == shown


@contextmanager
def start_command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start the command, and end it with the test in any case."""
    program = "import typer; from pipeline.cli import pages; pages.LOOK_SECONDS = 0.1; typer.run(pages.dashboard)"
    command = warm_python.Popen(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield command
    finally:
        command.terminate()
        command.communicate(timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_a_signal_ends_it(tmp_path: Path, number: signal.Signals):
    write(tmp_path / "a", stream(5))
    with start_command("--run", str(tmp_path / "a"), "--port", "0") as command:
        line = command.stdout.readline()
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+", line)
        assert '"name":"a"' in get(f"{address}/api/states")[1]
        command.send_signal(number)
        rest, errors = command.communicate(timeout=200)
    assert (command.returncode, rest, errors) == (0, "", "")
    with pytest.raises(urllib.error.URLError):
        get(address)


def test_an_address_other_than_loopback_gives_a_warning(tmp_path: Path):
    with start_command("--runs", str(tmp_path), "--port", "0", "--host", "0.0.0.0") as command:
        assert "http://127.0.0.1:" in command.stdout.readline()
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=200)
    assert "warning: listening on 0.0.0.0: anyone who can reach this machine can read all prompts" in errors


def prompts_shown(address: str) -> int:
    (state,) = json.loads(get(f"{address}/api/states")[1])
    assert state["name"] == "run"
    return state["prompts"]


@pytest.mark.slow
def test_a_run_on_an_object_store_is_shown_and_followed(place: str, tmp_path: Path):  # noqa: F811
    mirror = ObjectMirror(tmp_path, place)
    mirror.pull()
    with RunLog(tmp_path, mirror=mirror) as log:
        append(log, [prompt(0)], commit=True)
        with start_command("--run", place, "--port", "0") as command:
            (address,) = re.findall(r"http://127\.0\.0\.1:\d+", command.stdout.readline())
            assert prompts_shown(address) == 1
            append(log, [prompt(1)], commit=True)
            end = time.monotonic() + 60
            while prompts_shown(address) == 1:
                assert time.monotonic() < end, "the second commit is not shown"
                time.sleep(0.1)
            assert prompts_shown(address) == 2
