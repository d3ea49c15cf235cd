"""Pending calls, without Ray: no work item is lost with the learner, no worker receives the same weights twice."""

import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from event_making import make_completed

from pipeline.cli.run import _import_cluster
from pipeline.cluster.learner import LearnerReport
from pipeline.cluster.worker import WorkerReport, WorkerSetup
from pipeline.cluster.worker_pool import (
    MAX_CALLS,
    RESTART_BUDGET,
    ActorLost,
    DeadError,
    WorkerPool,
    WorkerReady,
    WorkerState,
    WorkReported,
)
from pipeline.config.settings import Config
from store.errors import ConfigError, RunError

NOTHING = LearnerReport((), has_weights=False)


class ScriptedActors:
    """Actors that do nothing: the test sets the result of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[Any, ...], tuple[int, ...]]] = []  # actor, method, arguments, refs
        self.results: dict[int, Any] = {}
        self.killed: list[str] = []
        self._numbers, self._refs = count(), count()

    def start(self, kind: type, options: Mapping[str, float], *arguments: Any) -> str:
        return f"{kind.__name__} {next(self._numbers)}"

    def call(self, actor: str, method: str, *arguments: Any, returns: int = 1, **named: Any) -> Sequence[int]:
        refs = tuple(next(self._refs) for _ in range(returns))
        self.calls.append((actor, method, arguments, refs))
        return refs

    def wait(self, refs: Sequence[int], seconds: float) -> Sequence[int]:
        return [ref for ref in refs if ref in self.results]

    def get(self, ref: int) -> Any:
        if isinstance(self.results[ref], Exception):
            raise self.results[ref]
        return self.results[ref]

    def kill(self, actor: str) -> None:
        self.killed.append(actor)

    def find_calls(self, method: str) -> list[tuple[str, tuple[Any, ...]]]:
        return [(actor, arguments) for actor, name, arguments, _ in self.calls if name == method]

    def set_results(self, method: str, *results: Any) -> None:
        """Set the results of the newest call of a method."""
        refs = next(refs for _, name, _, refs in reversed(self.calls) if name == method)
        self.results |= dict(zip(refs, results, strict=False))


@pytest.fixture
def actors() -> ScriptedActors:
    return ScriptedActors()


@pytest.fixture
def pool(actors: ScriptedActors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerPool:
    """A pool with one worker that is ready."""
    monkeypatch.setattr("pipeline.cluster.worker_pool.RESTART_SECONDS", 0.0)
    new_pool = WorkerPool(actors, WorkerSetup(Config(), "", tmp_path, 0.0), tmp_path, {"num_cpus": 1})
    new_pool.add(tmp_path / "worker-000")
    actors.set_results("start", ["models"])
    assert new_pool.wait(0.0) == [WorkerReady("worker-000", ["models"])]
    return new_pool


def make_report(*offsets: int) -> WorkerReport:
    return WorkerReport(tuple(map(make_completed, offsets)), (), ())


def complete_prompt(pool: WorkerPool, actors: ScriptedActors, offset: int) -> int:
    """Let the worker complete one prompt. Returns the reference of its training example."""
    pool.submit("worker-000", [], more=False)
    _, finished = actors.calls[-1][3]
    report = make_report(offset)
    actors.set_results("work", report)
    assert pool.wait(0.0) == [WorkReported("worker-000", report, final=False)]
    return finished


def start_learner(pool: WorkerPool, actors: ScriptedActors) -> None:
    pool.start_learner(object())  # type: ignore[arg-type]
    pool.wait(0.0)
    actors.set_results("start", NOTHING, None)
    assert pool.wait(0.0) == [NOTHING]


def test_pending_calls_of_a_worker_are_limited(pool, actors):
    assert pool.get_state("worker-000") is WorkerState.READY
    for _ in range(MAX_CALLS):
        assert pool.accepts_work("worker-000")
        pool.submit("worker-000", [], more=False)
    assert not pool.accepts_work("worker-000")
    actors.set_results("work", make_report())
    pool.wait(0.0)
    assert pool.accepts_work("worker-000")


def test_unanswered_work_items_of_a_dead_learner_are_resent_in_order(pool, actors):
    start_learner(pool, actors)
    sent = [complete_prompt(pool, actors, offset) for offset in range(2)]
    pool.wait(0.0)
    first = next(refs for _, name, _, refs in actors.calls if name == "learn")
    actors.results[first[0]] = DeadError("killed")
    assert pool.wait(0.0) == [ActorLost("learner", "killed")]
    sent.append(complete_prompt(pool, actors, 2))
    assert pool.is_learning
    pool.wait(0.0)
    resent = [arguments[0] for actor, arguments in actors.find_calls("learn") if actor == actors.calls[-1][0]]
    assert resent == sent
    assert len(actors.killed) == 1


def test_a_work_item_that_crashes_every_learner_ends_the_run(pool, actors):
    start_learner(pool, actors)
    complete_prompt(pool, actors, 0)
    with pytest.raises(
        RunError, match="crashed 8 times in a row without completing an update; its last error was: again"
    ):
        _crash_repeatedly(pool, actors)
    assert len(actors.killed) == RESTART_BUDGET - 1


def _crash_repeatedly(pool: WorkerPool, actors: ScriptedActors) -> None:
    for _ in range(RESTART_BUDGET + 1):
        pool.wait(0.0)
        actors.set_results("start", NOTHING, None)
        actors.set_results("learn", DeadError("again"))
        pool.wait(0.0)


def test_every_worker_receives_the_newest_weights_once(pool, actors, tmp_path: Path):
    start_learner(pool, actors)
    complete_prompt(pool, actors, 0)
    pool.wait(0.0)
    actors.set_results("learn", LearnerReport((), has_weights=True), "weights")
    weights = actors.calls[-1][3][1]
    pool.wait(0.0)
    pool.wait(0.0)
    for _ in range(2):
        pool.submit("worker-000", [], more=False)
    assert [arguments[1] for _, arguments in actors.find_calls("work")] == [None, weights, None]
    pool.add(tmp_path / "worker-001")
    actors.set_results("start", ["models"])
    pool.wait(0.0)
    pool.submit("worker-001", [], more=False)
    assert actors.find_calls("work")[-1][1][1] == weights


def test_no_message_comes_from_a_lost_worker(pool, actors):
    for _ in range(MAX_CALLS):
        pool.submit("worker-000", [], more=False)
    actors.set_results("work", make_report(1))
    actors.results[actors.calls[-2][3][0]] = DeadError("killed")
    assert pool.wait(0.0) == [ActorLost("worker-000", "killed")]
    assert (pool.workers, pool.wait(0.0)) == ([], [])


def test_a_missing_ray_is_reported_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in ("pipeline.cluster.ray_backend", "pipeline.cluster.run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'omnidraft\[ray\]'"):
        _import_cluster()
