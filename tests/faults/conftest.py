"""One stream for all tests of faults, an uninterrupted run of it, and a run that was killed in its middle."""

import signal
from pathlib import Path

import pytest
from faulty_runs import Life, Stream, World, checkpoints, complete_run, stream_of
from object_serving import objects, place  # noqa: F401  (fixtures)
from tiny_pair import TinyPair

from store.log.manifest import read_manifest


@pytest.fixture(scope="session")
def stream(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Stream:
    return stream_of(tiny_pair, tmp_path_factory.mktemp("stream"))


@pytest.fixture(scope="session")
def whole(stream: Stream, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run. No test changes it."""
    folder = tmp_path_factory.mktemp("whole")
    return complete_run(stream, folder / "world", folder / "run")


@pytest.fixture(scope="session")
def half(stream: Stream, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its middle. Tests copy it."""
    folder = tmp_path_factory.mktemp("half")
    run = folder / "run"
    life = Life(World(folder / "world"), stream.begin(run))
    assert life.wait_until(lambda: checkpoints(run) >= 5 and len(read_manifest(run).tables["prompts"]) >= 3)
    life.send(signal.SIGKILL)
    assert life.end().status == -signal.SIGKILL
    return run
