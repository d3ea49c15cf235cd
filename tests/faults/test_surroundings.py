"""A run does not rely on the wall clock, nor on an MLflow server that answers."""

import signal
from pathlib import Path
from typing import Any

import pytest
from faulty_runs import Life, Stream, World, differences, rows_of, strays, stream_of
from registry_making import new_store, read_store
from tiny_pair import TinyPair

from store.log.manifest import read_manifest
from store.registry.registry import list_versions

# The clock loses an hour and a half at its twentieth reading, and again at every twentieth after it.
JUMPING_CLOCK = """
import datetime, sys, time
from itertools import count
readings, seconds, nanoseconds = count(), time.time, time.time_ns
def lag():
    return next(readings) // 20 * 5400
time.time = lambda: seconds() - lag()
time.time_ns = lambda: nanoseconds() - lag() * 1_000_000_000
class Jumping(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.fromtimestamp(time.time(), tz)
for name, module in list(sys.modules.items()):
    if name.split(".")[0] in ("pipeline", "stages", "store") and hasattr(module, "datetime"):
        module.datetime = Jumping
"""


@pytest.mark.slow
def test_a_clock_that_jumps_back_changes_nothing(stream: Stream, whole: Path, tmp_path: Path):
    run = tmp_path / "run"
    Life(World(tmp_path / "world", before=JUMPING_CLOCK), stream.begin(run)).end().assert_clear(0)
    assert differences(run, whole) == []
    assert strays(run) == set()


def contents_of(uri: str) -> dict[str, Any]:
    """What MLflow holds of a run, without what depends on the wall clock."""
    found = read_store(uri)
    for run in found["runs"].values():
        run.pop("seconds")
        run["points"] = {
            key: [(step, value) for step, value, _ in points]
            for key, points in run["points"].items()
            if not any(word in key for word in ("seconds", "ledger", "whole/", "times_without", "tokens_per_second"))
        }
    return found


@pytest.mark.sweep
def test_a_run_that_is_killed_leaves_in_mlflow_what_an_uninterrupted_one_leaves(tiny_pair: TinyPair, tmp_path: Path):
    """The run writes to a real store and is killed twice while versions are being sent."""
    stream, uris = stream_of(tiny_pair, tmp_path / "stream", prompts=40), list[str]()
    world = World(tmp_path / "world", before="import pipeline.run.replay; pipeline.run.replay.UNSENT_TIMEOUT = 120.0")
    for place, kills in (("killed", (1, 3)), ("whole", ())):
        run = tmp_path / place / "run"
        uris.append(new_store(run.parent))
        words = stream.begin(run, "--mlflow-uri", uris[-1])
        for registered in kills:
            life = Life(world, words)
            assert life.wait_until(lambda registered=registered: len(list_versions(uris[0])) >= registered), (
                life.errors()
            )
            life.send(signal.SIGKILL)
            assert life.end().status == -signal.SIGKILL
            assert not read_manifest(run).finished
            words = ["replay", "--resume", run, "--mlflow-uri", uris[-1]]
        Life(world, words).end().assert_clear(0)
    published = [row["digest"] for row in rows_of(tmp_path / "killed/run", "versions")]
    assert [version.digest for version in reversed(list_versions(uris[0]))] == published
    assert len(published) >= 5
    assert contents_of(uris[0]) == contents_of(uris[1])
