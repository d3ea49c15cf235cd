"""A run does not rely on the wall clock, nor on an MLflow server that answers."""

import json
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from faulty_runs import SPOOL, Life, Stream, World, differences, rows_of, strays, stream_of
from tiny_pair import TinyPair

from store.log.manifest import read_manifest
from store.registry.mlflow_client import connect
from store.registry.registry import default_uri, list_versions

# The clock loses an hour and a half at its twentieth reading, and again at every twentieth after it.
JUMPING_CLOCK = """
import datetime, sys, time
from itertools import count
readings, seconds, nanoseconds = count(), time.time, time.time_ns
def lag():
    return next(readings) // 20 * 5400
time.time = lambda: seconds() - lag()
time.time_ns = lambda: nanoseconds() - lag() * 1_000_000_000
class Jumping(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.fromtimestamp(time.time(), tz)
for name, module in list(sys.modules.items()):
    if name.split(".")[0] in ("pipeline", "stages", "store") and hasattr(module, "datetime"):
        module.datetime = Jumping
"""


def points_of(run: Path) -> list[tuple[str, int, int]]:
    """Series, step and time of what was sent to MLflow, in the order of sending."""
    lines = map(json.loads, filter(None, (run / SPOOL).read_text(encoding="utf-8").splitlines()))
    sent = (point for line in lines if line.get("kind") == "points" for point in line["body"]["points"])
    return [(key, step, time) for key, _, step, time in sent]


@pytest.mark.slow
def test_a_clock_that_jumps_back_changes_nothing(stream: Stream, whole: Path, tmp_path: Path):
    run = tmp_path / "run"
    Life(World(tmp_path / "world", before=JUMPING_CLOCK), stream.begin(run)).end().assert_clear(0)
    assert differences(run, whole) == []
    assert strays(run) == set()
    times = [time for _, _, time in points_of(run)]
    assert times != sorted(times), "the clock jumped back"
    steps = [(series, step) for series, step, _ in points_of(run)]
    assert steps == [(series, step) for series, step, _ in points_of(whole)]
    rates = [step for series, step in steps if series == "curve/block_efficiency"]
    assert sorted(rates) == list(range(32))


class _Broken(BaseHTTPRequestHandler):
    """Answers every request with status 500."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(500)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_PUT = do_PATCH = do_GET

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def broken_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Broken)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
def test_an_mlflow_server_that_is_broken_does_not_hold_up_a_run(stream: Stream, whole: Path, tmp_path: Path):
    run = tmp_path / "run"
    with broken_server() as uri:
        ended = Life(World(tmp_path / "world"), stream.begin(run, "--mlflow-uri", uri)).end()
    ended.assert_clear(0, "MLflow did not take", f"they wait in {run / SPOOL}")
    assert differences(run, whole) == []


@pytest.mark.sweep
def test_a_killed_run_registers_each_version_once(tiny_pair: TinyPair, tmp_path: Path):
    """The run writes to a real store and is killed twice while versions are being sent."""
    uri = default_uri(tmp_path)
    connect(uri).search_experiments()
    stream, run = stream_of(tiny_pair, tmp_path / "stream", prompts=40), tmp_path / "run"
    world = World(tmp_path / "world", before="import pipeline.run.replay; pipeline.run.replay.UNSENT_TIMEOUT = 120.0")
    words = stream.begin(run, "--mlflow-uri", uri)
    for registered in (1, 3):
        life = Life(world, words)
        assert life.wait_until(lambda registered=registered: len(list_versions(uri)) >= registered), life.errors()
        life.send(signal.SIGKILL)
        assert life.end().status == -signal.SIGKILL
        assert not read_manifest(run).finished
        words = ["replay", "--resume", run, "--mlflow-uri", uri]
    Life(world, words).end().assert_clear(0)
    published = [row["digest"] for row in rows_of(run, "versions")]
    assert [version.digest for version in reversed(list_versions(uri))] == published
    assert len(published) >= 5


@pytest.mark.slow
def test_a_finished_run_sends_what_mlflow_has_not_taken(whole: Path, tmp_path: Path):
    """The server was unreachable until the run's end, and is reachable now."""
    run, uri = shutil.copytree(whole, tmp_path / "run"), default_uri(tmp_path)
    connect(uri).search_experiments()
    assert list_versions(uri) == []
    world = World(tmp_path / "world", before="import pipeline.run.replay; pipeline.run.replay.UNSENT_TIMEOUT = 120.0")
    Life(world, ["replay", "--resume", run, "--mlflow-uri", uri]).end().assert_clear(0)
    published = [row["digest"] for row in rows_of(run, "versions")]
    assert [version.digest for version in reversed(list_versions(uri))] == published
    Life(world, ["replay", "--resume", run, "--mlflow-uri", uri]).end().assert_clear(2, "is finished")
