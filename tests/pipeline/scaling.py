"""Runs of several workers in tests: deaths while they go on, and what must hold behind."""

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

from replaying import replayed
from tiny_pair import sentences, write_prompts

from pipeline.config import Config
from pipeline.scale_run import ScaledReplay
from store.events import Event, PromptCompleted
from store.lock import OWNER
from store.partitions import read_manifests
from store.queries import LogReader


def many_prompts(folder: Path, count: int) -> Path:
    """A file of so many prompts, two of which are none and one too long for the models."""
    path = write_prompts(folder / "many.jsonl", sentences(300, 300 + count))
    lines = path.read_text(encoding="utf-8").splitlines()
    strange = [json.dumps({"prompt": 7}), json.dumps({"prompt": "long " * 2000}), "{no json"]
    path.write_text("\n".join([*lines[:2], *strange, *lines[2:]]) + "\n", encoding="utf-8")
    return path


REJECTED = 3


class Notes:
    """A display that keeps what the user is told and shown.

    `act`: called once, on the thread of the run, when so many prompts are completed.
    """

    def __init__(self, act: Callable[[], None] = lambda: None, after: int = 0) -> None:
        self.told: list[str] = []
        self.completed: list[int] = []
        self._act, self._after = act, after

    def show(self, event: Event) -> None:
        if isinstance(event, PromptCompleted):
            self.completed.append(event.offset)
            if len(self.completed) == self._after:
                self._act()

    def remember(self, prompt: PromptCompleted) -> None:
        self.completed.append(prompt.offset)

    def note(self, text: str) -> None:
        self.told.append(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def scaled(
    config: Config, run: Path, address: str, workers: int = 2, *, resume: bool = False, notes: Notes | None = None
) -> tuple[dict, Notes]:
    """The summary of a run of several workers, and what the user saw."""
    notes = notes or Notes()
    prepared = ScaledReplay(config, run, None, lambda told: None, resume=resume, address=address, workers=workers)
    return prepared.run(notes), notes


def rows_of(run: Path, query: str) -> list[dict[str, Any]]:
    with LogReader([run]) as log:
        return log.select(query).to_pylist()


def texts_of(run: Path) -> list[tuple[int, str]]:
    """Offset and completion of every prompt in the log, in stream order."""
    rows = rows_of(run, 'SELECT "offset", completion_text FROM prompts ORDER BY 1')
    return [(row["offset"], row["completion_text"]) for row in rows]


def embedded_texts(config: Config, folder: Path) -> list[tuple[int, str]]:
    """What one process says to the same prompts."""
    replayed(config, folder)
    return texts_of(folder)


def assert_whole(run: Path, texts: list[tuple[int, str]]) -> None:
    """Every prompt once and with its text, every decision sound, every version known, and nobody writes any more."""
    assert texts_of(run) == texts
    with LogReader([run]) as log:
        found = log.check()
        emitted = log.select('SELECT "offset", count(*) AS n FROM tokens GROUP BY 1 ORDER BY 1').to_pylist()
        told = log.select('SELECT "offset", emitted AS n FROM prompts ORDER BY 1').to_pylist()
        unknown = log.select(
            "SELECT DISTINCT drafter_version FROM decisions WHERE drafter_version <> 0 AND drafter_version NOT IN "
            "(SELECT drafter_version FROM updates WHERE served)"
        ).to_pylist()
    assert (found.mismatches.num_rows, found.miscounts.num_rows) == (0, 0)
    assert emitted == told
    assert unknown == []
    assert all(manifest.finished for manifest in read_manifests(run).values())
    assert len((run / "rejected.jsonl").read_text(encoding="utf-8").splitlines()) == REJECTED


def owner_of(partition: Path) -> int | None:
    """The process that writes to a partition."""
    with suppress(OSError, ValueError):
        return int(json.loads((partition / OWNER).read_bytes())["pid"])
    return None


def kill_owner(partition: Path) -> bool:
    """End it as a power cut would. Whether there was one."""
    owner = owner_of(partition)
    with suppress(ProcessLookupError):
        if owner:
            os.kill(owner, signal.SIGKILL)
            return True
    return False


def committed_prompts(run: Path) -> int:
    """In all logs of a run, so far."""
    return sum(part.rows for one in read_manifests(run).values() for part in one.tables["prompts"])


@contextmanager
def meanwhile(action: Callable[[threading.Event], None]) -> Iterator[None]:
    """Do something on another thread as long as the block lasts; its event is set at the end."""
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


def until(over: threading.Event, holds: Callable[[], bool], seconds: float = 240.0) -> bool:
    """Wait for something, or until the run is over. Whether it holds."""
    end = time.monotonic() + seconds
    while not over.is_set() and time.monotonic() < end:
        with suppress(Exception):  # what is read is being written
            if holds():
                return True
        time.sleep(0.02)
    return False


def led_elsewhere(config: Config, run: Path, address: str, folder: Path) -> subprocess.Popen[str]:
    """The command in a process of its own, with two workers."""
    settings = folder / "settings.json"
    settings.write_text(config.to_json(), encoding="utf-8")
    words = ["replay", "--config", settings, "--run", run, "--ray", address, "--workers", "2"]
    return subprocess.Popen(
        [sys.executable, "-c", "from pipeline.cli import main; main()", *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"},
    )
