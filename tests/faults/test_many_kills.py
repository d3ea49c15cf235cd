"""Many kills with everything on: learning, drift, publishing, compaction, an object store; of replays and of servers.

`OMNIDRAFT_TEST_KILLS=100 pytest -m sweep tests/faults/test_many_kills.py` sets the number of kills of replays, divided
among ten seeds; servers get half as many, among five. `::test_many_kills_of_replays_change_nothing[3]` runs one seed.
"""

import os
import random
import signal
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Self

import pytest
from faulty_runs import NOBODY, Life, Stream, World, differences, rows_of, strays
from object_serving import ObjectServer
from scaling import run_in_parallel
from serving_process import ServerProcess, server_arguments, server_process
from serving_tiny import OFTEN, assert_sound, texts
from test_object_runs import pull_run
from tiny_pair import TinyPair

from store.log.compaction import compact
from store.log.manifest import MANIFEST, read_manifest
from store.log.partitions import LEARNER, partition_folder
from store.log.schema import COUNTS, TABLES
from store.object_store.mirror import ObjectMirror
from store.registry.version_folder import open_version

KILLS = int(os.environ.get("OMNIDRAFT_TEST_KILLS", "50"))  # of replays; servers get half as many
REPLAY_SEEDS, SERVER_SEEDS = range(10), range(5)
LATEST = 5.0  # longest seconds from the start of a replay to a kill
# Errors for a place that holds a run: it is unfinished, finished, or finished on an object store.
IN_USE = ("that is not finished", "a run needs a new or empty folder", "holds a finished run")
SERVED = 6.0  # longest seconds between two kills of a server
LEARNING = {"learn.spacing": "fixed", "learn.interval": 2, "publish.interval": 2}


def share(kills: int, seeds: range, seed: int) -> int:
    """Number of the kills that one seed makes."""
    return kills // len(seeds) + (seed < kills % len(seeds))


def keep_compacting(run: Path) -> AbstractContextManager[None]:
    """Compact a log repeatedly, as another process would, while a run writes it. Raises if a compaction fails."""

    def work(over: threading.Event) -> None:
        while not over.wait(0.3):
            for log in (run, partition_folder(run, LEARNER)):
                if (log / MANIFEST).exists():
                    with suppress(FileNotFoundError):  # a folder that is being created
                        compact(log)

    return run_in_parallel(work)


def kill_replays(stream: Stream, run: Path | str, folder: Path, kills: int, chance: random.Random) -> int:
    """Kill a run up to `kills` times at random instants, and let it finish. Returns how often it was killed."""
    begun, killed = False, 0
    while True:
        life = Life(World(folder), ["replay", "--resume", run] if begun else stream.begin(run))  # type: ignore[arg-type]
        if killed < kills:
            time.sleep(chance.uniform(0, LATEST))
            life.send(signal.SIGKILL)
        ended = life.end()
        if not begun and ended.status == 2 and any(words in ended.err for words in IN_USE):
            begun = True  # it was killed after its start, perhaps after its last commit
            continue
        assert ended.status in (0, -signal.SIGKILL), ended.err
        killed += ended.status == -signal.SIGKILL
        if ended.status == 0:
            return killed


# The process is killed after its last commit, before it states the run's folder.
AFTER_THE_LAST_COMMIT = """
import os, signal
from pipeline.run.replay import Replay
Replay._close = lambda replay: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("where", ["folder", "object store"])
def test_a_kill_after_the_last_commit_changes_nothing(
    stream: Stream, whole: Path, objects: ObjectServer, tmp_path: Path, where: str
):
    run = tmp_path / "run" if where == "folder" else objects.place()
    world = World(tmp_path / "world", before=AFTER_THE_LAST_COMMIT)
    assert Life(world, stream.begin(run)).end().status == -signal.SIGKILL  # type: ignore[arg-type]
    assert kill_replays(stream, run, tmp_path / "world", 0, random.Random(0)) == 0
    assert differences(Path(run) if where == "folder" else pull_run(str(run), tmp_path), whole) == []


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", REPLAY_SEEDS)
def test_many_kills_of_replays_change_nothing(
    stream: Stream, whole: Path, objects: ObjectServer, tmp_path: Path, seed: int
):
    """Odd seeds run on an object store; even seeds in a folder, whose log is compacted all the time."""
    chance, left = random.Random(1000 + seed), share(KILLS, REPLAY_SEEDS, seed)
    for number in range(100):
        if left <= 0:
            break
        folder = tmp_path / str(number)
        if seed % 2:
            place = objects.place()
            left -= kill_replays(stream, place, folder / "world", left, chance)
            run = pull_run(place, folder)
        else:
            run = folder / "run"
            with keep_compacting(run):
                left -= kill_replays(stream, run, folder / "world", left, chance)
        assert differences(run, whole) == []
        if seed % 2:
            assert strays(run) == set()
    assert left == 0


class Clients:
    """Clients that send requests without a pause, and count completions and failures."""

    def __init__(self, server: ServerProcess, chance: random.Random) -> None:
        self._server, self._model, self._seed = server, server.model(), chance.random()
        self._done = threading.Event()
        self.answered = self.failed = 0
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(3)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        chance, prompts = random.Random(self._seed + number), texts(700, 760)
        while not self._done.is_set():
            try:
                self._server.complete(chance.choice(prompts), model=self._model, temperature=1, max_tokens=8)
                self.answered += 1
            except OSError:  # refused, reset, or an error as an answer
                self.failed += 1
                time.sleep(0.05)


def tables_of(run: Path) -> dict[str, list[dict[str, Any]]]:
    """All rows of a run and of its learner."""
    logs = {"run": run, "learner": partition_folder(run, LEARNER)}
    return {
        f"{name}/{table}": rows_of(log, table)
        for name, log in logs.items()
        if (log / MANIFEST).exists()
        for table in TABLES
        if table not in COUNTS
    }


def require_kept(before: dict[str, list[dict[str, Any]]], after: dict[str, list[dict[str, Any]]]) -> None:
    """Require that all earlier rows are still there, in their order and before the new ones."""
    for table, rows in before.items():
        assert after[table][: len(rows)] == rows, table


def arguments_of(pair: TinyPair, run: Path | str) -> list[object]:
    """The options that start a server which learns and publishes."""
    words = [word for word in server_arguments(pair, Path("run"), **OFTEN)[:-2] if word != "--no-publish"]
    chosen = [word for key, value in LEARNING.items() for word in ("--set", f"{key}={value}")]
    return [*words, *chosen, "--mlflow-uri", NOBODY, "--run", run]


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", SERVER_SEEDS)
def test_many_kills_of_servers_lose_nothing_that_was_committed(
    tiny_pair: TinyPair, objects: ObjectServer, tmp_path: Path, seed: int
):
    """Odd seeds run on an object store; even seeds in a folder, whose logs are compacted all the time."""
    chance, kills = random.Random(2000 + seed), share(KILLS // 2, SERVER_SEEDS, seed)
    run: Path | str = objects.place() if seed % 2 else tmp_path / "run"

    def current(number: int) -> Path:
        if not seed % 2:
            return Path(run)
        pulled = pull_run(str(run), tmp_path / f"pulled-{number}")
        ObjectMirror(pulled, str(run)).partition(LEARNER).pull()
        return pulled

    before: dict[str, list[dict[str, Any]]] = {}
    answered = 0
    for number in range(kills + 1):
        words = ["--resume", run, "--port", 0] if number else arguments_of(tiny_pair, run)
        with server_process(tmp_path / "world", *words) as server:
            with Clients(server, chance) as clients:
                with nullcontext() if seed % 2 else keep_compacting(Path(run)):
                    time.sleep(chance.uniform(0.5, SERVED))
                if number < kills:
                    assert server.end(signal.SIGKILL) == -signal.SIGKILL
            answered += clients.answered
            if number == kills:
                assert server.end() == 0, server.err
        after = tables_of(current(number))
        require_kept(before, after)
        offsets = [row["offset"] for row in after["run/prompts"]]
        assert len(offsets) == len(set(offsets)), "no prompt is logged twice"
        before = after
    last = current(kills)
    assert_sound(last)
    assert 0 < len(before["run/prompts"]) <= answered + 3 * kills, "each prompt is one that a client sent"
    assert before["learner/updates"], "it learned"
    assert before["learner/versions"], "it published"
    for row in before["learner/versions"]:
        assert open_version(last / row["folder"])["digest"] == row["digest"]
    assert read_manifest(last).checkpoint
