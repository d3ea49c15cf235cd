"""A learner's process that is no child of `multiprocessing`."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from places import ROOT

from pipeline.learner_service.detached import DetachedContext, DetachedProcess, FileFlag

LONGEST_WAIT = 60.0


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs find the functions of this module."""
    folders = ROOT, Path(__file__).parent, ROOT / "tests" / "support"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))


def answer(connection: Connection, flag: FileFlag) -> None:
    """Send every message back, reversed once the flag is set."""
    while message := connection.recv_bytes():
        connection.send_bytes(message[::-1] if flag.is_set() else message)


def start() -> tuple[Connection, FileFlag, DetachedProcess]:
    context = DetachedContext()
    ours, theirs = context.Pipe()
    flag = context.Event()
    process = context.Process(answer, (theirs, flag), "answer", daemon=True)
    process.start()
    theirs.close()
    return ours, flag, process


def ask(connection: Connection, text: bytes) -> bytes:
    connection.send_bytes(text)
    assert connection.poll(LONGEST_WAIT)
    return connection.recv_bytes()


def test_a_task_runs_and_sees_the_flag():
    connection, flag, process = start()
    assert ask(connection, b"abc") == b"abc"
    flag.set()
    flag.set()
    assert ask(connection, b"abc") == b"cba"
    connection.send_bytes(b"")
    process.join()
    process = start()[2]
    process.kill()
    process.join()


def test_a_killed_program_closes_its_end():
    connection, _, process = start()
    process.kill()
    with pytest.raises(EOFError):
        connection.recv_bytes()
    process.join()


def run_in_daemon(results: "multiprocessing.Queue[bytes]") -> None:
    """As a worker of vLLM, which may have no children of `multiprocessing`."""
    connection, _, process = start()
    results.put(ask(connection, b"from a daemon"))
    connection.send_bytes(b"")
    process.join()


def test_a_daemonic_process_may_start_one():
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    daemon = context.Process(target=run_in_daemon, args=(results,), daemon=True)
    daemon.start()
    assert results.get(timeout=LONGEST_WAIT) == b"from a daemon"
    daemon.join()


def test_the_program_ends_with_the_process_that_started_it():
    code = "import test_detached, time\nprint(test_detached.start()[2]._process.pid, flush=True)\ntime.sleep(600)"
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    deadline = time.monotonic() + LONGEST_WAIT
    while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
