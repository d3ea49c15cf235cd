"""Only one process at a time writes a run's folder."""

import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_runs import Life, Stream, World, checkpoints, differences

from store.log.lock import OWNER


@pytest.fixture
def writing(stream: Stream, tmp_path: Path) -> Iterator[Life]:
    """A process that writes `tmp_path / "run"`, stopped in its middle."""
    life = Life(World(tmp_path / "first"), stream.begin(tmp_path / "run"))
    assert life.wait_until(lambda: checkpoints(tmp_path / "run") >= 3), life.errors()
    life.send(signal.SIGSTOP)
    yield life
    life.send(signal.SIGKILL)
    life.end()


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("how", ["resume", "run"])
def test_a_second_process_is_refused_with_an_error_that_names_the_first(
    stream: Stream, whole: Path, writing: Life, tmp_path: Path, how: str
):
    run, world = tmp_path / "run", World(tmp_path / "second")
    words = ["replay", "--resume", run] if how == "resume" else stream.begin(run)
    Life(world, words).end().assert_clear(2, f"process {writing.process.pid} on {socket.gethostname()}", str(run))
    writing.send(signal.SIGCONT)
    assert writing.end().status == 0
    assert differences(run, whole) == []


@pytest.mark.slow
def test_a_free_lock_is_taken_over_though_a_process_with_its_owners_number_runs(writing: Life, tmp_path: Path):
    """The lock of the operating system decides, not the recorded owner."""
    run = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert f'"pid": {writing.process.pid}' in (run / OWNER).read_text()
    os.kill(int(writing.process.pid or 0), 0)
    Life(World(tmp_path / "second"), ["replay", "--resume", run]).end().assert_clear(0)
