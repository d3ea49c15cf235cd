"""Runs that are made to fail: the command in processes of its own, a stream that exercises all that a run may lose, and
the contents of a run's folder after the run.

Processes are forked from one that has loaded the libraries already (`warm_python`), so that they start at once.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pytest
import warm_python
from constants import with_constants
from pyarrow import parquet
from tiny_pair import TinyPair, sentences, write_prompts

from store.fault_points import VARIABLE
from store.log.lock import LOCK, OWNER
from store.log.manifest import MANIFEST, PREVIOUS, Manifest, part_path, read_manifest
from store.log.schema import COUNTS, TABLES
from store.registry.version_folder import open_version

BY_THE_CLOCK = ("seconds", "waited", "started", "finished", "seconds_decode", "seconds_translate", "seconds_verify")
NOBODY = "http://127.0.0.1:9"  # no MLflow server is there
PROGRAM = "from pipeline.cli.app import main; main()"
HANG_SECONDS = 180.0  # seconds after which a process hangs


@dataclass(frozen=True)
class Ended:
    """The result of a command. A negative status is the signal that ended it."""

    status: int
    out: str
    err: str

    def assert_clear(self, status: int, *words: str) -> None:
        """Assert that it ended with this status and one message of ours that has these words."""
        assert self.status == status, self.err
        assert "Traceback" not in self.err, self.err
        messages = [line for line in self.err.splitlines() if line.startswith("omnidraft: ")]
        assert len(messages) == (status not in (0, 130)), self.err
        for word in words:
            assert word in self.err, self.err


@dataclass(frozen=True)
class World:
    """The environment of a process.

    Attributes:
        folder: its working directory; also holds its output.
        largest_file: in bytes.
        environment: variables in addition to those of the tests.
        before: a program that runs first.
    """

    folder: Path
    largest_file: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    before: str = ""

    @property
    def program(self) -> str:
        """Code that sets the limit and runs `before`, then the `omnidraft` command with the shortest waits."""
        return f"import warm_process\n{self._limit()}\n{self.before}\n{PROGRAM}"

    def _limit(self) -> str:
        if self.largest_file is None:
            return ""
        return (
            f"import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, ({self.largest_file}, -1)); "
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"  # as Python's own start does: the write fails instead
        )


class Life:
    """One process of the command, from its start to its end."""

    def __init__(self, world: World, arguments: Sequence[object], stdin: Path | int = subprocess.DEVNULL) -> None:
        world.folder.mkdir(parents=True, exist_ok=True)
        number = len(list(world.folder.glob("out-*")))
        self._out, self._err = world.folder / f"out-{number}", world.folder / f"err-{number}"
        kept = {name: value for name, value in os.environ.items() if name != VARIABLE}
        given = stdin if isinstance(stdin, int) else os.open(stdin, os.O_RDONLY)
        self.process = warm_python.Popen(
            [sys.executable, "-c", world.program, *map(str, arguments)],
            cwd=world.folder,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=kept | with_constants(**CONSTANTS) | world.environment,
        )
        if isinstance(stdin, Path):
            os.close(given)
        pipes = ((self.process.stdout, self._out), (self.process.stderr, self._err))
        self._copying = [threading.Thread(target=_copy, args=pipe, daemon=True) for pipe in pipes]
        for thread in self._copying:
            thread.start()

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    def send(self, number: int) -> None:
        """Send a signal to the process, if it is still running."""
        if not self.ended:
            with suppress(ProcessLookupError):  # it ended, and that was not reported yet
                os.kill(int(self.process.pid or 0), number)

    def errors(self) -> str:
        """Its error output so far."""
        return self._err.read_text(encoding="utf-8") if self._err.exists() else ""

    def wait_until(self, holds: Callable[[], bool]) -> bool:
        """Wait for a condition, or for its end. Returns whether the condition holds."""
        end = time.monotonic() + HANG_SECONDS
        while not (held := holds()) and not self.ended:
            assert time.monotonic() < end, self.errors()
            time.sleep(0.002)
        return held

    def end(self) -> Ended:
        try:
            status = self.process.wait(HANG_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it hangs: {self.errors()}")
        for thread in self._copying:
            thread.join(HANG_SECONDS)
        return Ended(status, self._out.read_text(encoding="utf-8"), self.errors())


def _copy(pipe: IO[bytes], path: Path) -> None:
    """Write the output of a process to a file. The process cannot do so itself: its files may not grow."""
    with pipe, path.open("wb", buffering=0) as file:
        while chunk := pipe.read1():  # type: ignore[attr-defined]
            file.write(chunk)


def type_command(folder: Path, *arguments: object, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """The command in an interpreter of its own, started in a folder that is not the project's."""
    return warm_python.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        cwd=folder,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass(frozen=True)
class Stream:
    """Two sources, the second quite another, with rows that are no prompts; and the settings that show everything."""

    sources: tuple[Path, ...]
    options: tuple[str, ...]

    def begin(self, run: Path, *more: object) -> list[object]:
        """The arguments that start a run of it."""
        return ["replay", *self.sources, *self.options, *more, "--run", run]


# The drift monitor alarms at the smallest fall, a few n-grams fill the cache and a few examples all that keeps them, an
# update is nearly always under way, and speculation is paused from time to time.
SETTINGS = {
    "learn.rate": 5e-3,
    "learn.interval": 2,
    "learn.spacing": "fixed",
    "draft.costs": 0.2,  # at 0.05 a pause depends on the rounding of the machine's kernels
    "cache.budget_bytes": 12000,
    "publish.interval": 5,
    "commit.seconds": 1e-9,
}
CONSTANTS = {
    "update_lag": 2,
    "replay_prompts": 6,
    "gate_every": 3,
    "gate_window": 4,
    "drift_threshold": 0.1,
    "drift_grace": 1,
    "drift_tolerance": 0.0,
    "drift_cooldown": 3,
    "recall_margin": 0.5,  # so that no version is put on trial, which would outlast the stream
    "recall_versions": 3,
}


def stream_of(pair: TinyPair, folder: Path, prompts: int = 16, tokens: int = 20, **changes: object) -> Stream:
    """A stream of so many prompts from each source; `section__key` changes a setting."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = write_prompts(folder / "sums.jsonl", sentences(600, 600 + prompts))
    turned = [text[:30].swapcase()[::-1] for text in sentences(700, 700 + prompts)]
    strange = write_prompts(folder / "strange.jsonl", turned)
    for path in (sums, strange):
        spoil(path)
    settings = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    sampled = ["--temperature", "1", "--max-new-tokens", str(tokens), "--batch", "3", "--device", "cpu"]
    chosen = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return Stream((sums, strange), (*pair.options, *sampled, "--mlflow-uri", NOBODY, *chosen))


def spoil(path: Path) -> None:
    """Put rows that cannot be prompts between the others."""
    lines = path.read_text(encoding="utf-8").splitlines()
    spoilt = [*lines[:3], "{no json", *lines[3:-2], json.dumps({"prompt": 7}), *lines[-2:]]
    path.write_text("\n".join(spoilt) + "\n", encoding="utf-8")


def complete_run(stream: Stream, folder: Path, run: Path) -> Path:
    """Complete a run without interruption."""
    Life(World(folder), stream.begin(run)).end().assert_clear(0)
    return run


def resume_run(run: Path, folder: Path) -> Path:
    Life(World(folder), ["replay", "--resume", run]).end().assert_clear(0)
    return run


def read_committed(run: Path) -> Manifest | None:
    """The manifest of the run's last commit; None before the first."""
    return read_manifest(run) if (run / MANIFEST).exists() else None


def checkpoints(run: Path) -> int:
    """The number of the last checkpoint, 0 before the first; past the end of the stream a very large one."""
    manifest = read_committed(run)
    if manifest is None:
        return 0
    if manifest.finished:
        return 1 << 62
    return int(manifest.checkpoint.folder.rpartition("/")[2]) if manifest.checkpoint else 0


def rows_of(run: Path, table: str) -> list[dict[str, Any]]:
    """The committed rows of a table, without the columns that depend on the wall clock."""
    parts = read_manifest(run).tables[table]
    read = [parquet.read_table(part_path(run, part), partitioning=None) for part in parts]
    rows = pa.concat_tables(read).to_pylist() if read else []
    return [{key: value for key, value in row.items() if key not in BY_THE_CLOCK} for row in rows]


def differences(run: Path, other: Path) -> list[str]:
    """The differences of two finished runs: rows of the tables of events, folders of versions, rejected rows.
    What MLflow gets follows from them."""
    tables = [table for table in TABLES if table not in COUNTS]
    found = [
        f"{table}: {difference}"
        for table in tables
        for difference in _first(rows_of(run, table), rows_of(other, table))
    ]
    found += [f"versions/: {difference}" for difference in _first(versions_of(run), versions_of(other))]
    return found + [f"rejected: {difference}" for difference in _first(rejected_of(run), rejected_of(other))]


def _first(mine: Sequence[Any], others: Sequence[Any]) -> Iterator[str]:
    if len(mine) != len(others):
        yield f"{len(mine)} and {len(others)}"
    for number, (one, other) in enumerate(zip(mine, others, strict=False)):
        if one != other:
            yield f"number {number}: {one} and {other}"
            return


def versions_of(run: Path) -> list[tuple[str, str]]:
    """The folders of versions, each opened and checked, with their digests."""
    return [(folder.name, open_version(folder)["digest"]) for folder in sorted((run / "versions").iterdir())]


def rejected_of(run: Path) -> list[str]:
    """The source rows that became no prompts."""
    return (run / "rejected.jsonl").read_text(encoding="utf-8").splitlines()


def strays(run: Path) -> set[str]:
    """Files of a finished run that nothing names. A process killed after its last commit may leave its owner file."""
    manifest = read_manifest(run)
    assert manifest.finished
    named = {"config.json", "vocabulary.json", "summary.json", "answers.jsonl", "rejected.jsonl"}
    named |= {"mlflow.json", LOCK, OWNER, "log/.manifest.lock", "log/.mlflow.lock"}
    named |= {str(MANIFEST), str(PREVIOUS)}
    named |= {f"log/{part.file}" for parts in manifest.tables.values() for part in parts}
    for row in rows_of(run, "versions"):
        files = open_version(run / row["folder"])["files"]
        named |= {f"{row['folder']}/{name}" for name in (*files, "manifest.json")}
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()} - named
