"""The same over HTTP: a real `mlflow server` on loopback, which keeps the artifacts itself."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from version_making import contents, publication

from store.outbox import Patience
from store.registry import MODEL, MlflowRegistry, fetch_version, list_versions, show_version


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "files")]
    command = [sys.executable, "-m", "mlflow", "server", *store, "--host", "127.0.0.1", "--port", str(port)]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--workers", "1"], env=os.environ | quiet, stdout=log, stderr=log, start_new_session=True
        )
    uri = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(f"{uri}/health", 120)
        yield uri
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_up(url: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert time.monotonic() < end, f"{url} did not answer"
            time.sleep(0.2)


def test_versions_travel_through_a_server_and_back_without_a_word(
    server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    registry = MlflowRegistry(server, tmp_path / "queue.jsonl", patience=Patience(linger=0.01))
    registry.start_run("run-a", {"mode": "trie"}, {}, [("docs", "builtin:docs")])
    registry.log_points([("acceptance", 0.5, step, 1_700_000_000_000) for step in range(1500)])  # over MLflow's batch
    folders = []
    for version in range(2):
        folder, event = publication(tmp_path, version)
        registry.publish(folder, event, {})
        folders.append(folder)
    registry.finish({"acceptance": 0.5}, [])
    assert registry.close(120) == 0, registry.trouble
    assert [(version.number, version.parent) for version in list_versions(server)] == [(2, 1), (1, None)]
    assert show_version(server, MODEL, 2).metrics == {"acceptance": 0.25, "cache_entries": 7.0}
    fetched = fetch_version(f"models:/{MODEL}@candidate", server, tmp_path / "fetched")
    assert contents(fetched) == contents(folders[1])
    assert capfd.readouterr() == ("", "")
