"""Helpers for runs of several workers: crashes during a run, and checks of its log."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import warm_python
from replaying import run_replay
from tiny_pair import sentences, write_prompts

from benchmarks.studies.messages import collect_messages
from pipeline.cluster.run import ClusterReplay
from pipeline.config.settings import Config
from store.events import Event, PromptCompleted
from store.log.lock import OWNER
from store.log.partitions import read_manifests
from store.query.log_reader import LogReader


def many_prompts(folder: Path, count: int) -> Path:
    """Write a file of `count` prompts and of three rows that are rejected, one of them too long for the models."""
    path = write_prompts(folder / "many.jsonl", sentences(300, 300 + count))
    lines = path.read_text(encoding="utf-8").splitlines()
    strange = [json.dumps({"prompt": 7}), json.dumps({"prompt": "long " * 2000}), "{no json"]
    path.write_text("\n".join([*lines[:2], *strange, *lines[2:]]) + "\n", encoding="utf-8")
    return path


REJECTED = 3


class RecordingDisplay:
    """A display that records the completed prompts, and the log messages of the run as `notes`.

    `act` is called once, on the thread of the run, when `after` prompts are completed.
    """

    def __init__(self, act: Callable[[], None] = lambda: None, after: int = 0) -> None:
        self.notes: list[str] = []
        self.completed: list[int] = []
        self._act, self._after = act, after

    def show(self, event: Event) -> None:
        if isinstance(event, PromptCompleted):
            self.completed.append(event.offset)
            if len(self.completed) == self._after:
                self._act()

    def remember(self, prompt: PromptCompleted) -> None:
        self.completed.append(prompt.offset)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def replay_on_cluster(
    config: Config,
    run: Path,
    address: str,
    workers: int = 2,
    *,
    resume: bool = False,
    display: RecordingDisplay | None = None,
) -> tuple[dict, RecordingDisplay]:
    """Run a replay with several workers. Returns its summary and its display."""
    display = display or RecordingDisplay()
    prepared = ClusterReplay(config, run, resume=resume, address=address, workers=workers)
    with collect_messages() as display.notes:
        return prepared.run(display), display


def select_rows(run: Path, query: str) -> list[dict[str, Any]]:
    with LogReader([run]) as log:
        return log.select(query).to_pylist()


def read_texts(run: Path) -> list[tuple[int, str]]:
    """Return offset and completion of every prompt in the log, in stream order."""
    rows = select_rows(run, 'SELECT "offset", completion_text FROM prompts ORDER BY 1')
    return [(row["offset"], row["completion_text"]) for row in rows]


def replay_texts(config: Config, folder: Path) -> list[tuple[int, str]]:
    """Return the completions of the same prompts by a replay in one process."""
    run_replay(config, folder)
    return read_texts(folder)


def assert_whole(run: Path, texts: list[tuple[int, str]]) -> None:
    """Check a log: every prompt once with its text, consistent decisions, known versions, all partitions finished."""
    assert read_texts(run) == texts
    with LogReader([run]) as log:
        found = log.check()
        emitted = log.select('SELECT "offset", count(*) AS n FROM tokens GROUP BY 1 ORDER BY 1').to_pylist()
        counted = log.select('SELECT "offset", emitted AS n FROM prompts ORDER BY 1').to_pylist()
        unknown = log.select(
            "SELECT DISTINCT drafter_version FROM decisions WHERE drafter_version <> 0 AND drafter_version NOT IN "
            "(SELECT drafter_version FROM updates WHERE served)"
        ).to_pylist()
    assert (found.mismatches.num_rows, found.miscounts.num_rows) == (0, 0)
    assert emitted == counted
    assert unknown == []
    assert all(manifest.finished for manifest in read_manifests(run).values())
    assert len((run / "rejected.jsonl").read_text(encoding="utf-8").splitlines()) == REJECTED


def find_owner(partition: Path) -> int | None:
    """Return the id of the process that writes to a partition."""
    with suppress(OSError, ValueError):
        return int(json.loads((partition / OWNER).read_bytes())["pid"])
    return None


def kill_owner(partition: Path) -> bool:
    """Kill the process that writes to a partition. Returns whether there was one."""
    owner = find_owner(partition)
    with suppress(ProcessLookupError):
        if owner:
            os.kill(owner, signal.SIGKILL)
            return True
    return False


def count_committed_prompts(run: Path) -> int:
    """Count the committed prompts in all partitions of a run."""
    return sum(part.rows for one in read_manifests(run).values() for part in one.tables["prompts"])


@contextmanager
def run_in_parallel(action: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run an action on another thread during the block; its event is set at the end."""
    over = threading.Event()
    errors: list[BaseException] = []

    def act() -> None:
        try:
            action(over)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]


def wait_until(over: threading.Event, holds: Callable[[], bool], seconds: float = 240.0) -> bool:
    """Wait for a condition, or until the run is over. Returns whether the condition holds."""
    end = time.monotonic() + seconds
    while not over.is_set() and time.monotonic() < end:
        with suppress(Exception):  # files are written while they are read
            if holds():
                return True
        time.sleep(0.02)
    return False


def start_replay_command(config: Config, run: Path, address: str, folder: Path) -> subprocess.Popen[str]:
    """Start the command in its own process, with two workers."""
    settings = folder / "settings.json"
    settings.write_text(config.to_json(), encoding="utf-8")
    words = ["replay", "--config", settings, "--run", run, "--ray", address, "--workers", "2"]
    return warm_python.Popen(
        [sys.executable, "-c", "from pipeline.cli.app import main; main()", *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
