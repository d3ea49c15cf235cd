"""SIGTERM and Ctrl-C end a run with a commit, from which it can be resumed."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from faulty_runs import (
    Ended,
    Life,
    Stream,
    World,
    checkpoints,
    differences,
    resume_run,
    rows_of,
    strays,
    type_command,
)

from store.log.manifest import read_manifest


def end_by_signal(number: int, life: Life, run: Path, wait: float) -> Ended:
    """Send the signal some time after the process's first commit, and wait for the end."""
    before = checkpoints(run)
    assert life.wait_until(lambda: checkpoints(run) > before), life.errors()
    time.sleep(wait)
    life.send(number)
    return life.end()


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_commits_and_the_run_can_be_resumed(stream: Stream, whole: Path, tmp_path: Path, number: int):
    run, chance = tmp_path / "run", random.Random(int(number))
    words = stream.begin(run)
    for _ in range(2):
        ended = end_by_signal(number, Life(World(tmp_path / "world"), words), run, chance.uniform(0, 0.1))
        ended.assert_clear(130, "stopping: committing what was done", f"omnidraft replay --resume {run}")
        words = ["replay", "--resume", run]
        assert not read_manifest(run).finished
        assert json.loads((run / "summary.json").read_text())["totals"]["prompts"] == len(rows_of(run, "prompts"))
    resume_run(run, tmp_path / "world")
    assert differences(run, whole) == []
    assert strays(run) == set()


@pytest.mark.slow
def test_everything_up_to_the_signal_is_committed(stream: Stream, tmp_path: Path):
    """Commits are hours apart: there is one at the start, and the one that the signal requests."""
    run = tmp_path / "run"
    rare = ["--set", "commit.seconds=10000"]
    life = Life(World(tmp_path / "world"), stream.begin(run, *rare))
    assert life.wait_until(lambda: "version 2" in life.errors())
    assert rows_of(run, "prompts") == []
    life.send(signal.SIGTERM)
    life.end().assert_clear(130, "commits: 2")
    assert len(rows_of(run, "prompts")) >= 5


# SIGTERM arrives when a row has been read and before it is decoded.
WHILE_A_ROW_IS_TAKEN = """
import os, signal
import pipeline.sources.position
from itertools import count
digest, calls = pipeline.sources.position.sha256, count(1)
def interrupted(content):
    if next(calls) == 12:
        os.kill(os.getpid(), signal.SIGTERM)
    return digest(content)
pipeline.sources.position.sha256 = interrupted
"""
# SIGTERM arrives after the last prompt.
AT_THE_END = """
import os, signal
from pipeline.loop import Loop
end = Loop.end
def interrupted(loop):
    os.kill(os.getpid(), signal.SIGTERM)
    return end(loop)
Loop.end = interrupted
"""


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("moment", [WHILE_A_ROW_IS_TAKEN, AT_THE_END], ids=["taking a row", "at the end"])
def test_a_signal_at_any_moment_loses_nothing(stream: Stream, whole: Path, tmp_path: Path, moment: str):
    run = tmp_path / "run"
    Life(World(tmp_path / "world", before=moment), stream.begin(run)).end().assert_clear(130)
    resume_run(run, tmp_path / "world")
    assert differences(run, whole) == []
    assert strays(run) == set()


@pytest.fixture(scope="module")
def sent(stream: Stream, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of all lines, for standard input."""
    path = tmp_path_factory.mktemp("sent") / "lines.jsonl"
    path.write_bytes(b"".join(source.read_bytes() for source in stream.sources))
    return path


@pytest.fixture(scope="module")
def from_input(stream: Stream) -> Stream:
    return Stream(("-",), stream.options)


@pytest.fixture(scope="module")
def waiting(from_input: Stream, sent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in its own interpreter that SIGTERM ended while it waited for more standard input."""
    folder = tmp_path_factory.mktemp("waiting")
    running = type_command(folder, *from_input.begin(folder / "run", "--no-publish"), stdin=-1)
    assert running.stdin is not None
    running.stdin.write("".join(sent.read_text(encoding="utf-8").splitlines(keepends=True)[:8]))
    running.stdin.flush()
    while running.poll() is None and checkpoints(folder / "run") < 2:
        time.sleep(0.01)
    time.sleep(1.0)  # by now it waits for input
    running.terminate()
    status = running.wait(timeout=120)  # standard input is still open
    errors = running.communicate()[1]
    Ended(status, "", errors).assert_clear(130, f"omnidraft replay --resume {folder / 'run'}")
    return folder / "run"


@pytest.mark.sweep
def test_a_run_that_waited_for_input_resumes_when_all_lines_are_sent_again(
    from_input: Stream, waiting: Path, sent: Path, tmp_path: Path
):
    run = shutil.copytree(waiting, tmp_path / "run")
    world = World(tmp_path / "world")
    Life(world, ["replay", "--resume", run], sent).end().assert_clear(0)
    alone = tmp_path / "alone"
    Life(world, from_input.begin(alone, "--no-publish"), sent).end().assert_clear(0)
    for table in ("decisions", "blocks", "prompts", "updates", "drifts"):
        assert rows_of(run, table) == rows_of(alone, table)
    assert (run / "rejected.jsonl").read_bytes() == (alone / "rejected.jsonl").read_bytes()


def test_a_signal_ends_a_resumed_run_that_waits_for_the_rows_it_has_read(waiting: Path, tmp_path: Path):
    run = shutil.copytree(waiting, tmp_path / "run")
    before = read_manifest(run)
    reading, writing = os.pipe()
    life = Life(World(tmp_path / "world"), ["replay", "--resume", run], reading)
    os.close(reading)
    with open(writing, "wb"):  # nothing is sent, but the input stays open
        assert life.wait_until(lambda: "resumed after" in life.errors()), "it has loaded its models"
        time.sleep(0.5)
        life.send(signal.SIGTERM)
        life.process.wait(60)
    life.end().assert_clear(130)
    assert read_manifest(run) == before
