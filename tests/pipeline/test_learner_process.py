"""A learner in a process of its own: who serves never waits for it, and goes on when it dies."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import learner_doubles
import pytest
import torch
from learner_hosting import embedded, host_config, setup_of
from replaying import table_of
from serving_tiny import PATIENCE, asked, assert_sound, select, serve_config, served_all, serving, texts, until
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

from pipeline import learner_process
from pipeline.learner_process import WAITING, LearnerProcess
from store.events import Event, Updated
from store.partitions import LEARNER, partition_folder

SHARE = 4.0  # of a core: no sleep


def children() -> list[multiprocessing.process.BaseProcess]:
    """Learners that live."""
    return [child for child in multiprocessing.active_children() if child.name == "learner"]


class Played:
    """A `LearnerProcess` whose other process is a double's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, double: Callable[..., None]) -> None:
        monkeypatch.setattr(learner_process, "_learn", double)
        self.folder, self.notes = folder, []
        self.learner = LearnerProcess(folder, 1.0, lambda event: None, self.notes.append)

    def go(self) -> None:
        (self.folder / learner_doubles.GO).touch()

    def heard(self) -> list[Any]:
        return eval((self.folder / learner_doubles.HEARD).read_text())


def test_it_is_told_everything_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    played = Played(monkeypatch, tmp_path, learner_doubles.listens)
    for number in range(100):
        played.learner.post(number)
    assert played.learner.lag == 100
    played.go()
    until(lambda: played.learner.lag == 0)
    played.learner.close(PATIENCE)
    assert played.heard() == list(range(100))
    assert (played.learner.posted, played.learner.handled, played.learner.dropped) == (100, 100, 0)
    assert played.notes == []


def test_posting_never_waits_and_the_oldest_that_wait_are_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A pipe that is full takes nothing: then no more than `WAITING` wait, and they are the newest."""
    played, large = Played(monkeypatch, tmp_path, learner_doubles.listens), "x" * 10_000
    learner = played.learner
    for number in range(3 * WAITING):
        learner.post((number, large))
    assert learner.dropped > WAITING
    assert learner.lag == 3 * WAITING - learner.dropped
    played.go()
    until(lambda: learner.lag == 0)
    dropped = learner.dropped
    learner.close(PATIENCE)
    heard = [number for number, _ in played.heard()]
    assert len(heard) == 3 * WAITING - dropped
    assert heard[-WAITING:] == list(range(2 * WAITING, 3 * WAITING))
    assert heard[:-WAITING] == list(range(len(heard) - WAITING)), "those that were on their way"


def test_one_that_hangs_is_killed_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    played = Played(monkeypatch, tmp_path, learner_doubles.hangs)
    until(lambda: bool(children()))
    for _ in range(1000):
        played.learner.post("x" * 10_000)
    played.learner.close(0.1)
    assert children() == []
    played.learner.close(0.0)  # a second time as well


def test_one_that_dies_is_started_again_and_what_it_held_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    played = Played(monkeypatch, tmp_path, learner_doubles.dies_once)
    played.learner.post("lost")
    until(lambda: bool(played.notes))
    assert played.learner.alive
    assert "started again" in played.notes[0]
    until(lambda: played.learner.lag == 0)
    assert (played.learner.posted, played.learner.dropped) == (1, 1)
    played.learner.post("heard")
    until(lambda: played.learner.handled == 1)
    played.learner.close(PATIENCE)
    assert played.heard() == ["heard"]
    assert len(played.notes) == 1


def test_one_that_dies_again_at_once_stays_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    played = Played(monkeypatch, tmp_path, learner_doubles.dies)
    until(lambda: not played.learner.alive)
    assert ["again" in note for note in played.notes] == [True, False]
    assert "without learning" in played.notes[1]
    for number in range(WAITING + 5):
        played.learner.post(number)  # nobody is there: it may not pile up
    assert (played.learner.lag, played.learner.dropped) == (0, WAITING + 5)
    assert played.learner.news() is None
    played.learner.close(PATIENCE)


def test_a_real_one_learns_hands_out_and_goes_on_after_a_kill(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    config = host_config(tiny_pair)
    coach = embedded(config, tmp_path / "embedded", 8)
    told: list[Event] = []
    notes: list[str] = []
    run = tmp_path / "run"
    learner = LearnerProcess(setup_of(config, run), SHARE, told.append, notes.append)
    try:
        for finished in coach.finished[:4]:
            learner.post(finished)
        until(lambda: learner.handled == 4)
        weights = learner.news()
        assert weights is not None
        (child,) = children()
        os.kill(int(child.pid or 0), signal.SIGKILL)
        until(lambda: bool(notes))
        for finished in coach.finished[4:]:
            learner.post(finished)
        until(lambda: learner.handled == 8)
        newer = learner.news()
        assert newer is not None
        assert newer.drafter_version > weights.drafter_version > 0
        assert not all(map(torch.equal, newer.drafter, weights.drafter))
    finally:
        learner.close(PATIENCE)
    assert children() == []
    said = [event for event in coach.said if isinstance(event, Updated)]
    versions = [event.drafter_version for event in told if isinstance(event, Updated) and event.served]
    assert versions == [event.drafter_version for event in said if event.served]
    known = table_of(partition_folder(run, LEARNER), "updates").to_pylist()
    assert [row["offset"] for row in known] == [event.offset for event in said], "all is committed when it has ended"


def test_a_signal_for_the_server_does_not_end_it(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    """A terminal's Ctrl-C and the end of a service reach every process: the server says when it is over."""
    config = host_config(tiny_pair)
    coach = embedded(config, tmp_path / "embedded", 4)
    notes: list[str] = []
    learner = LearnerProcess(setup_of(config, tmp_path / "run"), SHARE, lambda event: None, notes.append)
    for finished in coach.finished[:2]:
        learner.post(finished)
    until(lambda: learner.handled == 2)
    for number in (signal.SIGINT, signal.SIGTERM):
        (child,) = children()
        os.kill(int(child.pid or 0), number)
    for finished in coach.finished[2:]:
        learner.post(finished)
    learner.close(PATIENCE)
    assert learner.handled == 4
    assert notes == []


def test_serving_goes_on_without_it(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    """Killed once it comes back, twice quickly it stays away; asks are answered all the while."""
    run, notes = tmp_path / "run", []
    config = serve_config(tiny_pair, serve__learn="live", serve__learn_share=SHARE, learn__spacing="fixed")
    with serving(config, run, notes=notes) as server:
        engine = server.engine
        served_all(engine, texts(700, 706))
        until(lambda: engine.figures().drafter_version > 0 or not served_all(engine, texts(706, 707)))
        for life in range(2):
            until(lambda: bool(children()))
            (child,) = children()
            os.kill(int(child.pid or 0), signal.SIGKILL)
            until(lambda life=life: len([note for note in notes if "the learner ended" in note]) == life + 1)
            assert [told.usage.emitted > 0 for told in served_all(engine, texts(710, 713))] == [True] * 3
        assert engine.figures().learner_alive is False
        assert asked(engine, "Ann has 3").end().usage.emitted
    assert_sound(run)
    named = {row["drafter_version"] for row in select(run, "SELECT DISTINCT drafter_version FROM decisions")}
    known = {row["drafter_version"] for row in select(run, "SELECT drafter_version FROM updates WHERE served")}
    assert named > {0}
    assert named <= {0} | known
