"""A learner that several replicas share: all receive its weights and the memories of the others."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Listener
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from learner_hosting import make_config, make_learner_config, run_local_learner
from places import ROOT
from serving_tiny import wait_until
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

from pipeline.learner_protocol import CompletedPrompt
from pipeline.learner_service.service import LearnerConfig, read_learner_checkpoint
from pipeline.learner_service.shared import Replica, SharedLearner
from pipeline.learner_service.shared_program import ADDRESS
from stages.memory.calibration import CalibrationState
from stages.memory.memory_share import LearnedText, MemoryShare
from store.events import Event, Updated

Connect = Callable[..., SharedLearner]
LONGEST_WAIT = 200.0


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program finds the packages."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    """Connects replicas of one run, which are closed at the end."""
    made: list[SharedLearner] = []

    def connect_replica(number: int, setup: LearnerConfig | None = None, **named: Any) -> SharedLearner:
        made.append(SharedLearner(Replica(tmp_path, number), setup, named.pop("on_event", print), **named))
        return made[-1]

    yield connect_replica
    for one in made:
        one.close(LONGEST_WAIT)


def share_of(*tokens: int) -> MemoryShare:
    return MemoryShare((LearnedText(tokens, 1, 0),), CalibrationState([tokens[0] / 2], [float(tokens[0])]))


def die(replica: SharedLearner) -> None:
    """End the connection without a last message, as that of a process that is killed."""
    replica._ending = True  # no other connection follows
    replica._learner.kill()
    replica._thread.join()


class Memory:
    """Records what a replica receives."""

    def __init__(self, learner: SharedLearner) -> None:
        self._learner, self.texts, self.trials = learner, list[tuple[int, ...]](), 0.0

    def wait_for(self, count: int) -> list[tuple[int, ...]]:
        wait_until(lambda: self._count() >= count)
        return self.texts

    def _count(self) -> int:
        if share := self._learner.take_memory(1):
            assert len(share.texts) <= 1
            self.texts += [text.tokens for text in share.texts]
            self.trials = share.cells.trials[0] if share.cells else self.trials
        return len(self.texts)


def test_each_replica_receives_what_the_memories_of_the_others_learned(connect: Connect, tmp_path: Path):
    first, second = connect(0, starts=False), connect(1)
    first.share_memory(share_of(3, 4))
    of_second = Memory(second)
    assert of_second.wait_for(1) == [(3, 4)]
    second.share_memory(share_of(5, 6))
    second.share_memory(share_of(7, 8))
    of_first = Memory(first)
    assert of_first.wait_for(2) == [(5, 6), (7, 8)]
    assert of_first.trials == 7, "the newest of each replica"
    of_third = Memory(connect(2))
    assert of_third.wait_for(3) == [(3, 4), (5, 6), (7, 8)]
    assert of_third.trials == 3 + 7
    assert first.program is None
    assert second.program is not None
    for one in (second, first):
        one.close(LONGEST_WAIT)
    assert second.program.poll() is None, "the third one is connected"


def test_the_program_ends_with_the_last_replica(connect: Connect, tmp_path: Path):
    first, second = connect(0), connect(1)
    wait_until(lambda: first._learner is not None and second._learner is not None)
    program = first.program or second.program
    assert program is not None
    assert (first.program is None) != (second.program is None)
    assert (tmp_path / ADDRESS).exists()
    first.close(LONGEST_WAIT)
    die(second)
    program.wait(LONGEST_WAIT)
    assert not (tmp_path / ADDRESS).exists()


def test_a_program_that_dies_is_started_again(connect: Connect, caplog: pytest.LogCaptureFixture):
    first, second = connect(0), connect(1)
    wait_until(lambda: first._learner is not None and second._learner is not None)
    program = first.program or second.program
    assert program is not None
    program.kill()
    wait_until(lambda: first.restarts == second.restarts == 1)
    first.share_memory(share_of(3, 4))
    assert Memory(second).wait_for(1) == [(3, 4)]
    assert all("restarted" in message for message in caplog.messages)


def test_a_program_that_takes_connections_while_it_is_killed_is_not_used(connect: Connect, tmp_path: Path):
    with TemporaryDirectory() as folder, Listener(f"{folder}/socket", "AF_UNIX") as dying:
        (tmp_path / ADDRESS).write_text(f"{folder}/socket")
        threading.Thread(target=lambda: dying.accept().close(), daemon=True).start()
        replica = connect(0)
        wait_until(lambda: replica._learner is not None)
    assert replica.program is not None
    assert replica.restarts == 0


def test_a_replica_that_waits_for_a_program_can_be_closed(connect: Connect, tmp_path: Path):
    alone = connect(0, starts=False)
    alone.share_memory(share_of(3, 4))
    alone.close(LONGEST_WAIT)
    assert not (tmp_path / ADDRESS).exists()


def close_in_daemon(folder: Path, results: "multiprocessing.Queue[bool]") -> None:
    """Close in a daemon process. A worker of vLLM is one; it may have no children of `multiprocessing`."""
    learner = SharedLearner(Replica(folder, 0), None, print)
    wait_until(lambda: learner._learner is not None)
    learner.close(LONGEST_WAIT)
    results.put(learner.alive)


def test_a_daemonic_process_may_start_the_program(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    daemon = context.Process(target=close_in_daemon, args=(tmp_path, results), daemon=True)
    daemon.start()
    assert results.get(timeout=LONGEST_WAIT)
    daemon.join()


@pytest.mark.slow
def test_replicas_share_a_learner_and_one_dies(
    tiny_pair: TinyPair,  # noqa: F811
    tmp_path: Path,
    connect: Connect,
):
    config = make_config(tiny_pair)
    finished = run_local_learner(config, tmp_path / "local", 12).finished
    setup, events = make_learner_config(config, tmp_path), [list[Event](), list[Event]()]
    replicas = [connect(number, setup, on_event=events[number].append) for number in range(2)]
    post(replicas, finished[:8])
    wait_until(lambda: replicas[0].lag == replicas[1].lag == 0)
    versions = [0, 0]

    def take() -> bool:
        for number, replica in enumerate(replicas):
            if weights := replica.take_new_weights():
                versions[number] = weights.drafter_version
        return versions[0] == versions[1] > 0

    wait_until(take)
    assert [any(isinstance(event, Updated) for event in of_one) for of_one in events].count(True) >= 1
    die(replicas[0])
    post(replicas[1:], finished[8:])
    wait_until(lambda: replicas[1].lag == 0)
    later = replicas[1].take_new_weights()
    assert later is not None
    assert later.drafter_version > versions[0]
    replicas[1].close(LONGEST_WAIT)
    checkpoint = read_learner_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.weights.drafter_version >= later.drafter_version, "an update may end after the last prompt"
    assert checkpoint.next_offset == 1_000_011 + 1, "it received prompts of both"
    of_first = read_learner_checkpoint(tmp_path, range(1_000_000))
    assert of_first is not None
    assert of_first.next_offset == 6 + 1


def post(replicas: list[SharedLearner], finished: list[CompletedPrompt]) -> None:
    """Complete prompts in turn; those of the second replica have offsets of their own."""
    for number, one in enumerate(finished):
        place = number % len(replicas) if len(replicas) > 1 else 1
        offset = one.prompt.offset + 1_000_000 * place
        example = one.example and replace(one.example, offset=offset)
        prompt = replace(one.prompt, offset=offset)
        replicas[place % len(replicas)].post(replace(one, prompt=prompt, example=example))
