"""A sender in its own process: the same results and errors, a low priority, and no message lost at its end."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from registry_making import new_store

from store.outbox import OutageError
from store.registry.mlflow_client import connect
from store.registry.sender_process import SenderProcess

START = {"name": "run-p", "params": {"mode": "trie"}, "tags": {}, "datasets": [["docs", "builtin:docs"]]}
POINTS = {"points": [["acceptance", 0.5, 3, 1_700_000_000_000]]}
CLOSED = "http://127.0.0.1:9"  # nothing listens on the discard port


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return new_store(tmp_path)


@pytest.fixture
def sender(uri: str, tmp_path: Path) -> Iterator[SenderProcess]:
    made = SenderProcess(uri, "omnidraft", None, {}, tmp_path)
    yield made
    made.end()


def pid_of(sender: SenderProcess) -> int:
    assert sender._process is not None
    return sender._process.pid


@pytest.mark.slow
def test_after_a_kill_the_next_process_continues_the_same_run(sender: SenderProcess, uri: str):
    known = sender.deliver("start", [{**START, "identity": "one"}])
    first = pid_of(sender)
    assert first != os.getpid()
    os.kill(first, 9)
    with pytest.raises(OutageError, match="process that sends to MLflow has ended"):
        sender.deliver("points", [POINTS])
    assert sender.deliver("points", [POINTS]) == {"last": 1_700_000_000_000}, "the next process knows the run"
    assert pid_of(sender) != first
    run = connect(uri).get_run(known["run_id"])
    assert run.data.metrics == {"acceptance": 0.5}


@pytest.mark.slow
def test_errors_in_the_process_are_raised_by_the_sender(sender: SenderProcess, tmp_path: Path):
    with pytest.raises(RuntimeError, match="the run must have been started in MLflow"):
        sender.deliver("points", [POINTS])
    unreachable = SenderProcess(CLOSED, "omnidraft", None, {}, tmp_path)
    with pytest.raises(OutageError):
        unreachable.deliver("start", [{**START, "identity": "two"}])
    unreachable.end()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no idle priority")
def test_it_has_the_lowest_priority_until_something_waits_for_it(sender: SenderProcess):
    with pytest.raises(RuntimeError):
        sender.deliver("points", [POINTS])
    assert os.sched_getscheduler(pid_of(sender)) == os.SCHED_IDLE
    sender.wait_for()
    assert os.sched_getscheduler(pid_of(sender)) == os.SCHED_OTHER
    sender.end()
    with pytest.raises(RuntimeError):
        sender.deliver("points", [POINTS])
    assert os.sched_getscheduler(pid_of(sender)) == os.SCHED_OTHER, "so does the next process"


@pytest.mark.slow
def test_it_ends_with_the_process_that_posts(uri: str, tmp_path: Path):
    program = f"""
from pathlib import Path
from store.registry.sender_process import SenderProcess
sender = SenderProcess({uri!r}, "omnidraft", None, {{}}, Path())
try:
    sender.deliver("points", [])
except RuntimeError:
    print(sender._process.pid, flush=True)
import os; os._exit(0)
"""
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    pid, deadline = int(made.stdout), time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1][:3]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
