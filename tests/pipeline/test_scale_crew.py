"""What is on its way, without Ray: nothing is lost with the learner, nobody gets the same weights twice."""

import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from event_making import completed

from pipeline.cli_replay import Several, _prepared, _several
from pipeline.config import Config
from pipeline.scale_crew import CALLS, LESSONS, LIVES, Crew, State
from pipeline.scale_learner import Told
from pipeline.scale_messages import DeadError, GoneError, Lost, Reported, Up
from pipeline.scale_worker import Report, WorkerSetup
from store.errors import ConfigError, RunError
from store.object_store_mirror import NoMirror

NOTHING = Told((), news=False)


class ScriptedActors:
    """Does nothing by itself: a test says what comes of each call."""

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

    def asked(self, method: str) -> list[tuple[str, tuple[Any, ...]]]:
        return [(actor, arguments) for actor, name, arguments, _ in self.calls if name == method]

    def answer(self, method: str, *results: Any) -> None:
        """The newest call of this method brings these, by its references."""
        refs = next(refs for _, name, _, refs in reversed(self.calls) if name == method)
        self.results |= dict(zip(refs, results, strict=False))


@pytest.fixture
def actors() -> ScriptedActors:
    return ScriptedActors()


@pytest.fixture
def crew(actors: ScriptedActors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Crew:
    """With one worker that is up."""
    monkeypatch.setattr("pipeline.scale_crew.PAUSE", 0.0)
    made = Crew(actors, WorkerSetup(Config(), "", tmp_path, 0.0), tmp_path, {"num_cpus": 1})
    made.hire(tmp_path / "worker-000")
    actors.answer("start", ["models"])
    assert made.wait(0.0) == [Up("worker-000", ["models"])]
    return made


def report(*offsets: int) -> Report:
    return Report(tuple(map(completed, offsets)), (), ())


def portion(crew: Crew, actors: ScriptedActors, offset: int) -> int:
    """Let the worker complete one prompt. The reference of what it teaches."""
    crew.give("worker-000", [], more=False)
    _, finished = actors.calls[-1][3]
    actors.answer("work", report(offset))
    assert crew.wait(0.0) == [Reported("worker-000", report(offset), left=False)]
    return finished


def begun(crew: Crew, actors: ScriptedActors) -> None:
    crew.begin_learning(object())  # type: ignore[arg-type]
    crew.wait(0.0)
    actors.answer("start", NOTHING, None)
    assert crew.wait(0.0) == [NOTHING]


def test_a_worker_has_as_many_calls_on_its_way_as_it_may(crew, actors):
    assert crew.state("worker-000") is State.UP
    for _ in range(CALLS):
        assert crew.has_room("worker-000")
        crew.give("worker-000", [], more=False)
    assert not crew.has_room("worker-000")
    actors.answer("work", report())
    crew.wait(0.0)
    assert crew.has_room("worker-000")


def test_no_more_prompts_while_lessons_wait(crew, actors):
    for offset in range(LESSONS + 1):
        assert crew.has_room("worker-000")
        portion(crew, actors, offset)
    assert not crew.has_room("worker-000")
    begun(crew, actors)
    crew.wait(0.0)
    actors.results |= {refs[0]: NOTHING for _, name, _, refs in actors.calls if name == "learn"}
    crew.wait(0.0)
    assert crew.has_room("worker-000")
    assert not crew.learning


def test_what_a_dead_learner_had_not_answered_is_sent_again_in_order(crew, actors):
    begun(crew, actors)
    sent = [portion(crew, actors, offset) for offset in range(2)]
    crew.wait(0.0)
    first = next(refs for _, name, _, refs in actors.calls if name == "learn")
    actors.results[first[0]] = DeadError("killed")
    assert crew.wait(0.0) == [Lost("learner", "killed")]
    sent.append(portion(crew, actors, 2))
    assert crew.learning
    crew.wait(0.0)
    again = [arguments[0] for actor, arguments in actors.asked("learn") if actor == actors.calls[-1][0]]
    assert again == sent
    assert len(actors.killed) == 1


def test_a_portion_that_went_with_a_machine_is_no_death(crew, actors):
    begun(crew, actors)
    portion(crew, actors, 0)
    crew.wait(0.0)
    actors.answer("learn", GoneError("its machine"))
    assert crew.wait(0.0) == []
    assert actors.killed == []
    assert not crew.learning


def test_a_portion_that_kills_every_learner_ends_the_run(crew, actors):
    begun(crew, actors)
    portion(crew, actors, 0)
    with pytest.raises(RunError, match="in a row"):
        _die_again_and_again(crew, actors)
    assert len(actors.killed) == LIVES - 1


def _die_again_and_again(crew: Crew, actors: ScriptedActors) -> None:
    for _ in range(LIVES + 1):
        crew.wait(0.0)
        actors.answer("start", NOTHING, None)
        actors.answer("learn", DeadError("again"))
        crew.wait(0.0)


def test_a_learner_that_finds_another_at_work_begins_again(crew, actors):
    crew.begin_learning(object())  # type: ignore[arg-type]
    crew.wait(0.0)
    actors.answer("start", RunError("another process"))
    assert crew.wait(0.0) == [Lost("learner", "another process")]
    crew.wait(0.0)
    assert len({actor for actor, _ in actors.asked("start")}) == 3  # a worker and two learners


def test_every_worker_is_given_the_newest_weights_once(crew, actors, tmp_path: Path):
    begun(crew, actors)
    portion(crew, actors, 0)
    crew.wait(0.0)
    actors.answer("learn", Told((), news=True), "weights")
    weights = actors.calls[-1][3][1]
    crew.wait(0.0)
    crew.wait(0.0)
    for _ in range(2):
        crew.give("worker-000", [], more=False)
    assert [arguments[1] for _, arguments in actors.asked("work")] == [None, weights, None]
    crew.hire(tmp_path / "worker-001")
    actors.answer("start", ["models"])
    crew.wait(0.0)
    crew.give("worker-001", [], more=False)
    assert actors.asked("work")[-1][1][1] == weights


def test_nothing_is_heard_of_a_worker_that_is_gone(crew, actors):
    for _ in range(CALLS):
        crew.give("worker-000", [], more=False)
    actors.answer("work", report(1))
    actors.results[actors.calls[-2][3][0]] = DeadError("killed")
    assert crew.wait(0.0) == [Lost("worker-000", "killed")]
    assert (crew.workers, crew.wait(0.0)) == ([], [])


def test_ray_is_asked_for_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("pipeline.scale", "pipeline.scale_run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'omnidraft\[ray\]'"):
        _prepared(Config(), tmp_path / "run", NoMirror(tmp_path / "run"), Several("local", 2), print, resume=False)


def test_workers_need_a_cluster():
    with pytest.raises(ConfigError, match="--workers needs --ray"):
        _several(None, 2)
    assert (_several(None, None), _several("auto", None)) == (None, Several("auto", 1))
