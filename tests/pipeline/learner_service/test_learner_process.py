"""A learner in its own process: the server never waits for it, and continues when it dies."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import learner_doubles
import pytest
import torch
from learner_hosting import make_config, make_learner_config, run_local_learner
from replaying import table_of
from serving_tiny import (
    HANG_SECONDS,
    assert_sound,
    complete_all,
    has_ended,
    run_server,
    select,
    serve_config,
    submit_prompt,
    texts,
    wait_until,
)
from tiny_pair import TinyPair

from pipeline.learner_service import process as learner_process
from pipeline.learner_service.process import QUEUE_LIMIT, LearnerProcess
from pipeline.learner_service.start import FREE, POLL_SECONDS, start_learner
from store.events import Event, Updated, VersionPublished
from store.log.partitions import LEARNER, partition_folder

SHARE = 4.0  # of a core: no sleep


def kill(learner: LearnerProcess, number: int = signal.SIGKILL) -> None:
    wait_until(lambda: learner.pid is not None)
    os.kill(learner.pid or 0, number)


class DoubledLearner:
    """A `LearnerProcess` whose process runs a double."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, double: Callable[..., None]) -> None:
        monkeypatch.setattr(learner_process, "start_learner", partial(learner_doubles.start, double))
        self.folder = folder
        self.learner = LearnerProcess(folder, 1.0, lambda event: None)

    def allow_reading(self) -> None:
        (self.folder / learner_doubles.GO).touch()

    def read_received(self) -> list[Any]:
        return eval((self.folder / learner_doubles.RECEIVED).read_text())


def test_all_prompts_are_received_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    doubled = DoubledLearner(monkeypatch, tmp_path, learner_doubles.listen)
    for number in range(100):
        doubled.learner.post(number)
    assert doubled.learner.lag == 100
    doubled.allow_reading()
    wait_until(lambda: doubled.learner.lag == 0)
    doubled.learner.close(HANG_SECONDS)
    assert doubled.read_received() == list(range(100))
    assert (doubled.learner.posted, doubled.learner.handled, doubled.learner.dropped) == (100, 100, 0)
    assert caplog.records == []


def test_posting_never_waits_and_drops_the_oldest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """While the pipe is full, at most `QUEUE_LIMIT` prompts wait, and these are the newest."""
    doubled, large = DoubledLearner(monkeypatch, tmp_path, learner_doubles.listen), "x" * 10_000
    learner = doubled.learner
    for number in range(3 * QUEUE_LIMIT):
        learner.post((number, large))
    assert learner.dropped > QUEUE_LIMIT
    assert learner.lag == 3 * QUEUE_LIMIT - learner.dropped
    doubled.allow_reading()
    wait_until(lambda: learner.lag == 0)
    dropped = learner.dropped
    learner.close(HANG_SECONDS)
    received = [number for number, _ in doubled.read_received()]
    assert len(received) == 3 * QUEUE_LIMIT - dropped
    assert received[-QUEUE_LIMIT:] == list(range(2 * QUEUE_LIMIT, 3 * QUEUE_LIMIT))
    assert received == sorted({*received}), "each once and in order, those first that the pipe took"


def test_a_learner_that_hangs_is_killed_after_the_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    doubled = DoubledLearner(monkeypatch, tmp_path, learner_doubles.hang)
    wait_until(lambda: doubled.learner.pid is not None)
    pid = doubled.learner.pid
    for _ in range(1000):
        doubled.learner.post("x" * 10_000)
    doubled.learner.close(0.1)
    assert has_ended(pid or 0)
    doubled.learner.close(0.0)  # a second time as well


def test_a_learner_that_dies_is_restarted_and_its_prompts_are_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    doubled = DoubledLearner(monkeypatch, tmp_path, learner_doubles.crash_once)
    doubled.learner.post("lost")
    wait_until(lambda: bool(caplog.messages))
    assert doubled.learner.alive
    assert "with exit status 3); it is restarted" in caplog.messages[0]
    wait_until(lambda: doubled.learner.lag == 0)
    assert (doubled.learner.posted, doubled.learner.dropped) == (1, 1)
    doubled.learner.post("received")
    wait_until(lambda: doubled.learner.handled == 1)
    doubled.learner.close(HANG_SECONDS)
    assert doubled.read_received() == ["received"]
    assert len(caplog.messages) == 1


def test_a_learner_that_dies_twice_is_not_restarted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    doubled = DoubledLearner(monkeypatch, tmp_path, learner_doubles.crash)
    wait_until(lambda: not doubled.learner.alive)
    wait_until(lambda: len(caplog.records) == 2)
    assert ["restarted from" in message for message in caplog.messages] == [True, False]
    assert "without learning" in caplog.messages[1]
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    for number in range(QUEUE_LIMIT + 5):
        doubled.learner.post(number)  # no process receives them: they must not pile up
    assert (doubled.learner.lag, doubled.learner.dropped) == (0, QUEUE_LIMIT + 5)
    assert doubled.learner.take_new_weights() is None
    doubled.learner.close(HANG_SECONDS)


@pytest.mark.slow
def test_a_real_learner_learns_and_resumes_after_a_kill(
    tiny_pair: TinyPair, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = make_config(tiny_pair)
    recorded = run_local_learner(config, tmp_path / "local", 8)
    events: list[Event] = []
    run = tmp_path / "run"
    learner = LearnerProcess(make_learner_config(config, run), SHARE, events.append)
    try:
        for finished in recorded.finished[:4]:
            learner.post(finished)
        wait_until(lambda: learner.handled == 4)
        weights = learner.take_new_weights()
        assert weights is not None
        kill(learner)
        wait_until(lambda: bool(caplog.messages))
        for finished in recorded.finished[4:]:
            learner.post(finished)
        wait_until(lambda: learner.handled == 8)
        newer = learner.take_new_weights()
        assert newer is not None
        assert newer.drafter_version > weights.drafter_version > 0
        assert not all(map(torch.equal, newer.drafter, weights.drafter))
    finally:
        learner.close(HANG_SECONDS)
    assert learner.pid is None
    local_updates = [event for event in recorded.events if isinstance(event, Updated)]
    versions = [event.drafter_version for event in events if isinstance(event, Updated) and event.served]
    assert versions == [event.drafter_version for event in local_updates if event.served]
    known = table_of(partition_folder(run, LEARNER), "updates").to_pylist()
    assert [row["offset"] for row in known] == [event.offset for event in local_updates], "all is committed at the end"


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_without_a_share_it_is_not_even_imported_before_it_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share: float
):
    ran, parent = Mock(), Mock()
    monkeypatch.setattr(learner_process, "run_learner", ran)
    thread = threading.Thread(target=start_learner, args=(parent, share, str(tmp_path)))
    thread.start()
    thread.join(None if share else 2 * POLL_SECONDS)
    assert ran.called == bool(share)
    (tmp_path / FREE).touch()
    thread.join()
    ran.assert_called_once_with(parent, parent.receive(), share, str(tmp_path))


@pytest.mark.slow
def test_a_learner_without_a_share_learns_in_free_time_alone(
    tiny_pair: TinyPair, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A kill loses no update that was reported, and what is not free any more waits again."""
    config = make_config(tiny_pair, publish__enabled=True, publish__interval=64, learn__spacing="paying")
    recorded = run_local_learner(config, tmp_path / "local", 12)
    events: list[Event] = []
    run = tmp_path / "run"
    learner = LearnerProcess(make_learner_config(config, run), 0.0, events.append)
    try:
        for finished in recorded.finished[:8]:
            learner.post(finished)
        time.sleep(0.5)
        assert (events, learner.handled, learner.waits, learner.accepts_examples) == ([], 0, True, True)
        learner.set_free(True)
        wait_until(lambda: any(isinstance(event, VersionPublished) and event.reason == "idle" for event in events))
        assert (learner.handled, learner.waits) == (8, False)
        weights = learner.take_new_weights()
        assert weights is not None
        learner.set_free(False)
        kill(learner)
        wait_until(lambda: bool(caplog.messages))
        for finished in recorded.finished[8:]:
            learner.post(finished)
        time.sleep(0.3)
        assert (learner.handled, learner.waits) == (8, True)
    finally:
        learner.close(HANG_SECONDS)
    assert learner.handled == 12, "at the end nothing holds it back"
    updates = [event for event in events if isinstance(event, Updated) and event.part == "drafter"]
    assert updates
    assert all(update.reason.startswith("idle: ") and update.waited == 0.0 for update in updates)
    assert updates[-1].drafter_version >= weights.drafter_version > 0
    versions = table_of(partition_folder(run, LEARNER), "versions").to_pylist()
    assert {row["reason"] for row in versions} == {"baseline", "idle"}
    digests = [row["digest"] for row in versions]
    assert len(set(digests)) == len(digests)
    assert versions[0]["drafter_digest"] != versions[1]["drafter_digest"]


def test_its_log_arrives_in_the_process_that_serves(
    tiny_pair: TinyPair, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = make_config(tiny_pair).with_overrides({"cache.budget_bytes": 1})
    learner = LearnerProcess(make_learner_config(config, tmp_path / "run"), SHARE, lambda event: None)
    learner.close(60.0)
    (record,) = caplog.records
    assert "cache.budget_bytes must be at least" in record.message
    assert (record.levelname, record.name, record.processName) == ("WARNING", "omnidraft.models", "learner")


def test_a_signal_for_the_server_does_not_end_the_learner(
    tiny_pair: TinyPair, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A terminal's Ctrl-C and the end of a service reach every process; only the server ends the learner."""
    config = make_config(tiny_pair)
    recorded = run_local_learner(config, tmp_path / "local", 4)
    learner = LearnerProcess(make_learner_config(config, tmp_path / "run"), SHARE, lambda event: None)
    for finished in recorded.finished[:2]:
        learner.post(finished)
    wait_until(lambda: learner.handled == 2)
    for number in (signal.SIGINT, signal.SIGTERM):
        kill(learner, number)
    for finished in recorded.finished[2:]:
        learner.post(finished)
    learner.close(HANG_SECONDS)
    assert learner.handled == 4
    assert caplog.records == []


@pytest.mark.slow
def test_serving_continues_without_the_learner(tiny_pair: TinyPair, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """After one kill the learner restarts, after two in quick succession it does not; requests are always answered."""
    run = tmp_path / "run"
    config = serve_config(tiny_pair, serve__learn="live", learn__spacing="fixed")
    with run_server(config, run) as server:
        engine = server.engine
        complete_all(engine, texts(700, 706))
        wait_until(lambda: engine.read_status().drafter_version > 0 or not complete_all(engine, texts(706, 707)))
        for life in range(2):
            assert server._learner
            kill(server._learner)
            wait_until(lambda life=life: caplog.text.count("the learner ended") == life + 1)
            assert [response.usage.emitted > 0 for response in complete_all(engine, texts(710, 713))] == [True] * 3
        assert engine.read_status().learner_alive is False
        assert submit_prompt(engine, "Ann has 3").end().usage.emitted
    assert_sound(run)
    named = {row["drafter_version"] for row in select(run, "SELECT DISTINCT drafter_version FROM decisions")}
    known = {row["drafter_version"] for row in select(run, "SELECT drafter_version FROM updates WHERE served")}
    assert named > {0}
    assert named <= {0} | known
