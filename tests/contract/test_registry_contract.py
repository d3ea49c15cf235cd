"""The contract of `Registry`, for every implementation."""

import inspect
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from store.events import VersionPublished
from store.outbox import RetryPolicy
from store.registry.registry import MlflowRegistry, NoRegistry, Registry
from store.registry.version_folder import seal

QUICK = RetryPolicy(attempts=1, backoff=0.01, max_backoff=0.01, linger=0.01)
CLOSED = "http://127.0.0.1:9"  # nothing listens on the discard port

MAKERS: dict[str, Callable[[Path], Registry]] = {
    "NoRegistry": lambda folder: NoRegistry(),
    "MlflowRegistry": lambda folder: MlflowRegistry(CLOSED, folder / "spool.jsonl", retry_policy=QUICK, keep=0),
}
METHODS = {name for name, value in vars(Registry).items() if not name.startswith("_") and callable(value)}


@pytest.fixture(params=sorted(MAKERS))
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    return MAKERS[request.param](tmp_path)


def version(folder: Path) -> tuple[Path, VersionPublished]:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    digest = seal(
        folder,
        {
            "name": "drafter",
            "version": 0,
            "parent": None,
            "run": "run",
            "offset": 0,
            "target": "t",
            "drafter": "d",
            "pair": "p",
            "counters": {},
            "created_at": "2026-01-02T03:04:05+00:00",
        },
    )
    return folder, VersionPublished(0, 0, "big", None, "floor", 0, 0, 0, 0, None, "v", digest)


def use(registry: Registry, folder: Path) -> None:
    """Perform one whole run, with calls in the order of the contract."""
    registry.start_run("run", {"mode": "trie", "temperature": 0.5}, {"a": "b"}, [("docs", "builtin:docs")])
    registry.log_points([])
    registry.log_points([("acceptance", 0.5, 0, 1), ("acceptance", float("nan"), 1, 2)])
    registry.publish(*version(folder / "v"), {"x": 1.0, "y": float("inf")}, drift=3)
    registry.pause()
    registry.resume()
    registry.release(registry.mark())
    registry.finish({"acceptance": 0.5, "ratio": float("nan")}, [])


def test_no_implementation_is_missing_from_this_suite():
    assert {implementation.__name__ for implementation in Registry.__subclasses__()} == MAKERS.keys()


def test_calls_neither_wait_for_the_receiver_nor_raise(registry: Registry, tmp_path: Path):
    started = time.monotonic()
    use(registry, tmp_path)
    assert time.monotonic() - started < 2
    assert registry.close(0.1) >= 0


def test_marks_never_decrease_and_may_be_released_repeatedly_and_by_another_thread(registry: Registry, tmp_path: Path):
    marks = [registry.mark()]
    use(registry, tmp_path)
    marks += [registry.mark(), registry.mark()]
    assert marks == sorted(marks)
    assert marks[1] == marks[2]
    thread = threading.Thread(target=lambda: [registry.release(mark) for mark in reversed(marks)])
    thread.start()
    thread.join()
    assert registry.close(0.1) >= 0


def test_close_keeps_its_time_limit_and_may_be_repeated(registry: Registry, tmp_path: Path):
    use(registry, tmp_path)
    started = time.monotonic()
    first = registry.close(0.1)
    assert registry.close(0.1) == first
    assert time.monotonic() - started < 3


def test_an_unused_registry_closes_with_nothing_unsent(registry: Registry):
    assert registry.close(10) == 0
    assert registry.last_error is None


def test_the_folder_of_a_version_is_left_unchanged(registry: Registry, tmp_path: Path):
    use(registry, tmp_path)
    registry.close(0.1)
    assert sorted(path.name for path in (tmp_path / "v").iterdir()) == ["manifest.json", "model.safetensors"]


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("implementation", [NoRegistry, MlflowRegistry])
def test_parameters_are_named_as_in_the_protocol(implementation: type, name: str):
    assert inspect.signature(getattr(implementation, name)) == inspect.signature(getattr(Registry, name))
