"""The registry over HTTP: real servers on loopback that store the artifacts and fail for some time."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from registry_making import check, play
from serving import Proxy, mlflow_server, postgres
from version_making import contents, publication

from store.outbox import Ledger, RetryPolicy
from store.registry.registry import MODEL, MlflowRegistry, fetch_version, list_versions, show_version

SWEEP = pytest.mark.sweep
QUICK = RetryPolicy(attempts=3, backoff=0.05, max_backoff=0.2, linger=0.01)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("server")) as uri:
        yield uri


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    proxy = Proxy(server)
    yield proxy
    proxy.close()


@pytest.mark.slow
def test_versions_are_sent_to_a_server_and_fetched_without_output(
    server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    registry = MlflowRegistry(server, tmp_path / "queue.jsonl", retry_policy=RetryPolicy(linger=0.01))
    registry.start_run("run-a", {"mode": "trie"}, {}, [("docs", "builtin:docs")])
    registry.log_points([("acceptance", 0.5, step, 1_700_000_000_000) for step in range(1500)])  # more than a batch
    folders = []
    for version in range(2):
        folder, event = publication(tmp_path, version)
        registry.publish(folder, event, {})
        folders.append(folder)
    registry.finish({"acceptance": 0.5}, [])
    assert registry.close(120) == 0, registry.last_error
    assert [(version.number, version.parent) for version in list_versions(server)] == [(2, 1), (1, None)]
    assert show_version(server, MODEL, 2).metrics == {"acceptance": 0.25, "version/cache_entries": 7.0}
    fetched = fetch_version(f"models:/{MODEL}@candidate", server, tmp_path / "fetched")
    assert contents(fetched) == contents(folders[1])
    assert capfd.readouterr() == ("", "")


@pytest.mark.sweep
@pytest.mark.parametrize(
    "mood", ["moody", "down", *(pytest.param(mood, marks=SWEEP) for mood in ("broken", "slow", "mute"))]
)
def test_a_failing_server_costs_time_and_nothing_else(server: str, proxy: Proxy, tmp_path: Path, mood: str):
    registry = MlflowRegistry(proxy.uri, tmp_path / "q.jsonl", experiment=mood, model=mood, retry_policy=QUICK, keep=0)
    turns = play(registry, tmp_path)
    next(turns)
    registry.release(registry.mark())
    wait_until(lambda: all_sent(tmp_path))
    spoil(proxy, mood)
    slowest = max(measure_seconds(lambda: next(turns)) for _ in range(4))  # curves, two versions and the pause
    registry.release(registry.mark())
    if mood in ("broken", "down", "mute"):
        wait_until(lambda: registry.last_error is not None)
        time.sleep(0.5)  # time for several attempts
        assert not all_sent(tmp_path)
    elif mood == "moody":
        wait_until(lambda: proxy.requests > 60)
    restore(proxy, mood)
    wait_until(lambda: all_sent(tmp_path))
    for _ in turns:
        registry.release(registry.mark())
    assert registry.close(60) == 0, registry.last_error
    assert slowest < 1, "the stream waited for the server"
    check(server, tmp_path, mood)


@pytest.mark.sweep
def test_postgresql_stores_the_same(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """The registry sends without failures, and through a proxy that fails in two ways."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with postgres() as store, mlflow_server(tmp_path_factory.mktemp("server"), store) as server:
        proxy = Proxy(server)
        for mood in ("well", "moody", "broken"):
            folder = tmp_path_factory.mktemp(mood)
            registry = MlflowRegistry(proxy.uri, folder / "q.jsonl", experiment=mood, model=mood, retry_policy=QUICK)
            proxy.mood = mood
            for _ in play(registry, folder):
                pass
            wait_until(lambda: proxy.requests > 20)
            proxy.mood, proxy.requests = "well", 0
            assert registry.close(120) == 0, registry.last_error
            check(server, folder, mood)
        proxy.close()


def all_sent(folder: Path) -> bool:
    ledger = Ledger.read(folder / "q.jsonl")
    return len(ledger.delivered) == ledger.posted


def spoil(proxy: Proxy, mood: str) -> None:
    if mood == "down":
        proxy.close()
    else:
        proxy.mood = mood


def restore(proxy: Proxy, mood: str) -> None:
    if mood == "down":
        proxy.open_again()
    else:
        proxy.mood = "well"


def measure_seconds(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()
