"""Only one process at a time writes a run."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from store.errors import RunError
from store.log.lock import OWNER, RunLock, is_being_written

HOLD = """
import sys, time
from pathlib import Path
from store.log.lock import OWNER, RunLock, is_being_written
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def start_holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_with_the_number_and_host_of_the_first(tmp_path: Path):
    first = start_holder(tmp_path / "run")
    try:
        with pytest.raises(RunError, match=rf"process {first.pid} on {socket.gethostname()}"):
            RunLock(tmp_path / "run").take()
    finally:
        first.kill()
        first.communicate()


def test_whether_a_run_is_being_written_is_known_without_taking_its_lock(tmp_path: Path):
    run = tmp_path / "run"
    assert is_being_written(run) is None, "a copy has no lock"
    process = start_holder(run)
    try:
        assert is_being_written(run) is True
    finally:
        process.kill()
        process.communicate()
    assert is_being_written(run) is False, "it was killed"
    with RunLock(run):
        assert is_being_written(run) is True
    assert is_being_written(run) is False
    (run / OWNER).write_text(f'{{"pid": {os.getpid()}, "host": "elsewhere", "since": ""}}')
    assert is_being_written(run) is None
