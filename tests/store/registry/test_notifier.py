"""Sending after commits: neither waits for MLflow nor fails because of it, and an outage is one line."""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from registry_making import CLOSED, MODEL, LittleRun, check_files, new_store, play, read_store

import store.registry.notifier
from store.registry.mlflow_sync import RunSync, Sent
from store.registry.notifier import Notifier
from store.registry.registry import list_versions


@pytest.fixture
def in_another_process(monkeypatch: pytest.MonkeyPatch, forked: None) -> None:
    """As if MLflow had not been imported in this process; that which sends has it."""
    hidden = SimpleNamespace(modules={})
    monkeypatch.setattr(store.registry.notifier, "sys", hidden)


def wait_until(holds: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    assert holds()


def follow(folder: Path, uri: str) -> bool:
    """Play a run with a notifier; return whether MLflow has everything."""
    notifier: Notifier | None = None
    for run in play(folder):
        notifier = notifier or Notifier(run.folder, run.folder, uri, run.folder.name)
        notifier.notify()
    assert notifier is not None
    return notifier.close(120)


def test_a_run_that_is_followed_is_what_one_update_makes_of_it(tmp_path: Path):
    uri, at_once = new_store(tmp_path), new_store(tmp_path / "other")
    assert follow(tmp_path / "run-a", uri)
    *_, run = play(tmp_path / "other/run-a")
    run.sync(at_once)
    assert read_store(uri) == read_store(at_once)
    check_files(uri, tmp_path / "run-a")


@pytest.mark.slow
def test_another_process_sends_the_same_and_prints_nothing(tmp_path: Path, in_another_process, capfd):
    uri = new_store(tmp_path)
    assert follow(tmp_path / "run-a", uri)
    assert [version.version for version in list_versions(uri)] == [1, 0]
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_after_a_kill_of_that_process_the_next_one_continues(tmp_path: Path, in_another_process):
    uri, run = new_store(tmp_path), LittleRun(tmp_path / "run-k")
    notifier = Notifier(run.folder, run.folder, uri, "run-k")
    run.publish()
    notifier.notify()
    wait_until(lambda: len(list_versions(uri)) == 1)
    pid = notifier._process.pid
    assert os.sched_getscheduler(pid) == os.SCHED_IDLE, "it computes where the stream leaves a processor idle"
    os.kill(pid, 9)
    run.publish()
    notifier.notify()
    assert notifier.close(120)
    assert [version.version for version in list_versions(uri)] == [1, 0]


def test_an_outage_costs_one_line_and_is_sent_later(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "it's here"
    assert not follow(folder, CLOSED)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith(f"MLflow at {CLOSED} did not take all of the run: ")
    assert """`omnidraft versions sync 'it'"'"'s here'` sends what is missing""" in line
    uri = new_store(tmp_path)
    assert RunSync(folder, uri).update(stopped=True).versions == 2


@pytest.fixture
def update(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Sent]], None]:
    """Replaces what an update does."""
    return lambda what: monkeypatch.setattr(RunSync, "update", lambda self, **_: what())


def test_nothing_waits_for_an_update_that_hangs(tmp_path: Path, update, caplog: pytest.LogCaptureFixture):
    release, run = threading.Event(), LittleRun(tmp_path / "run-h")
    update(lambda: Sent(int(release.wait(60))))
    notifier = Notifier(run.folder, run.folder, CLOSED, "run-h")
    for _ in range(3):
        run.publish()
        before = threading.active_count()
        notifier.notify()
        assert threading.active_count() == before
    assert not notifier.close(0.1)
    assert "it took longer than 0 s" in caplog.text
    release.set()


def test_a_failure_that_ends_is_not_reported_and_one_that_returns_is(tmp_path: Path, update, caplog, monkeypatch):
    monkeypatch.setattr(store.registry.notifier, "MOST_SECONDS", 0.0)
    run, outcomes, calls = LittleRun(tmp_path / "run-f"), ["fail", "fail", "sent", "sent"], list[str]()

    def play_outcomes() -> Sent:
        calls.append(outcomes.pop(0))
        if calls[-1] == "fail":
            raise ConnectionError("no answer")
        return Sent()

    update(play_outcomes)
    notifier = Notifier(run.folder, run.folder, CLOSED, "run-f")
    for count in range(1, 4):
        run.publish()
        notifier.notify()
        wait_until(lambda count=count: len(calls) == count)
    assert notifier.close(10)
    assert caplog.text == ""


def test_a_version_that_is_refused_is_reported_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    uri, run = new_store(tmp_path), LittleRun(tmp_path / "run-r")
    folder = run.folder / run.publish().folder
    (folder / "config.json").write_text("changed")
    run.publish()
    notifier = Notifier(run.folder, run.folder, uri, "run-r")
    notifier.notify()
    assert not notifier.close(60)
    assert "did not take all of the run: version 0: " in caplog.text
    assert "config.json was changed" in caplog.text
    assert [version.version for version in list_versions(uri, MODEL)] == [1]


def test_without_a_commit_nothing_is_sent(tmp_path: Path, update):
    update(lambda: pytest.fail("nothing is committed"))
    run = LittleRun(tmp_path / "run-n")
    notifier = Notifier(run.folder, run.folder, CLOSED, "run-n")
    assert not notifier.close(10)
