"""Runs that are made to fail: the command in processes of its own, a stream that shows all that a run may lose, and
what a run's folder holds when it is over.

A process that is to be killed many times is forked from one that has loaded the libraries already, so that a life
begins at once; from there on it is `omnidraft` as it is typed.
"""

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from tiny_pair import TinyPair, sentences, write_prompts

from store.faults import VARIABLE
from store.lock import LOCK, OWNER
from store.manifest import MANIFEST, Manifest, part_path, read_manifest
from store.rollups import COUNTS
from store.schema import TABLES
from store.version_folder import open_version

ROOT = Path(__file__).resolve().parents[2]
BY_THE_CLOCK = ("seconds", "waited", "started", "finished", "seconds_decode", "seconds_translate", "seconds_verify")
NOBODY = "http://127.0.0.1:9"  # no MLflow server is there
SPOOL = "registry-queue.jsonl"
PROGRAM = "from pipeline.cli import main; main()"
PATIENCE = 180.0  # seconds after which a process hangs

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["warm_process"])


@dataclass(frozen=True)
class Ended:
    """What came of a command. A negative status is the signal that ended it."""

    status: int
    out: str
    err: str

    def assert_clear(self, status: int, *words: str) -> None:
        """It ended with this status and one message of ours that has these words."""
        assert self.status == status, self.err
        assert "Traceback" not in self.err, self.err
        told = [line for line in self.err.splitlines() if line.startswith("omnidraft: ")]
        assert len(told) == (status not in (0, 130)), self.err
        for word in words:
            assert word in self.err, self.err


@dataclass(frozen=True)
class World:
    """What surrounds a process.

    Attributes:
        folder: where it is started, and where what it prints is kept.
        largest_file: in bytes.
        environment: variables beside those of the tests.
        before: a program that runs first.
    """

    folder: Path
    largest_file: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    before: str = ""


def _warm_up() -> None:
    """Start the process that is forked. It finds its modules by the environment, until Python 3.12 by nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(Path(__file__).parent))))
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()


class Life:
    """One process of the command, from its start to its end."""

    def __init__(self, world: World, arguments: Sequence[object], input_file: Path | None = None) -> None:
        world.folder.mkdir(parents=True, exist_ok=True)
        number = len(list(world.folder.glob("out-*")))
        self._out, self._err = world.folder / f"out-{number}", world.folder / f"err-{number}"
        self._out.touch()
        words = [str(argument) for argument in arguments]
        _warm_up()
        self.process: ForkServerProcess = _forks.Process(
            target=_live, args=(world, words, input_file or Path(os.devnull), self._out, self._err)
        )
        self.process.start()

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.process.exitcode is not None

    def send(self, number: int) -> None:
        """A signal, if it still lives."""
        if not self.ended:
            with suppress(ProcessLookupError):  # it ended, and that was not told yet
                os.kill(int(self.process.pid or 0), number)

    def errors(self) -> str:
        """What it told so far."""
        return self._err.read_text(encoding="utf-8") if self._err.exists() else ""

    def wait_until(self, holds: Callable[[], bool]) -> bool:
        """Wait for something, or for its end; whether it holds."""
        end = time.monotonic() + PATIENCE
        while not (held := holds()) and not self.ended:
            assert time.monotonic() < end, self.errors()
            time.sleep(0.002)
        return held

    def end(self) -> Ended:
        """Wait for its end."""
        self.process.join(PATIENCE)
        assert self.ended, f"it hangs: {self.errors()}"
        return Ended(int(self.process.exitcode or 0), self._out.read_text(encoding="utf-8"), self.errors())


def _live(world: World, words: list[str], stdin: Path, stdout: Path, stderr: Path) -> None:
    """The forked process: `omnidraft`, typed."""
    for number, path, flags in ((0, stdin, os.O_RDONLY), (1, stdout, os.O_WRONLY), (2, stderr, os.O_WRONLY)):
        os.dup2(os.open(path, flags | (os.O_CREAT if number else 0)), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, encoding="utf-8") for number, mode in enumerate("rww"))
    os.chdir(world.folder)
    os.environ.pop(VARIABLE, None)
    os.environ |= world.environment
    if world.largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (world.largest_file, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python's own start does: the write fails instead
    sys.argv = ["omnidraft", *words]
    exec(world.before or "", {})
    try:
        exec(PROGRAM, {})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def typed(folder: Path, *arguments: object, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """The command in an interpreter of its own, started in a folder that is not the project's."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        cwd=folder,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


@dataclass(frozen=True)
class Stream:
    """Two sources, the second quite another, with rows that are no prompts; and the settings that show everything."""

    sources: tuple[Path, ...]
    options: tuple[str, ...]

    def begin(self, run: Path, *more: object) -> list[object]:
        """The words that begin a run of it."""
        return ["replay", *self.sources, *self.options, *more, "--run", run]


# Drift alarms at the least fall, a few n-grams fill the cache and a few lessons all that keeps them, an update is
# nearly always under way, and drafting rests now and then.
SETTINGS = {
    "learn.rate": 5e-3,
    "learn.interval": 2,
    "learn.lag": 2,
    "learn.spacing": "fixed",
    "learn.replay_prompts": 6,
    "learn.gate_share": 0.34,
    "learn.gate_window": 4,
    "draft.relative_cost": 0.05,
    "drift.threshold": 0.1,
    "drift.grace": 1,
    "drift.tolerance": 0.0,
    "drift.cooldown": 3,
    "drift.recall_margin": 0.0,
    "cache.budget_bytes": 12000,
    "publish.interval": 5,
    "commit.seconds": 0.05,
    "commit.share": 1.0,
    "commit.prompts": 1,
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


def completed(stream: Stream, folder: Path, run: Path) -> Path:
    """A whole run."""
    Life(World(folder), stream.begin(run)).end().assert_clear(0)
    return run


def resumed(run: Path, folder: Path) -> Path:
    """A run that is gone on with to its end."""
    Life(World(folder), ["replay", "--resume", run]).end().assert_clear(0)
    return run


def committed(run: Path) -> Manifest | None:
    """What the run has committed up to now; None before there is anything."""
    return read_manifest(run) if (run / MANIFEST).exists() else None


def checkpoints(run: Path) -> int:
    """The number of the last checkpoint, 0 before the first; past the end of the stream a very large one."""
    manifest = committed(run)
    if manifest is None:
        return 0
    if manifest.finished:
        return 1 << 62
    return int(manifest.checkpoint.folder.rpartition("/")[2]) if manifest.checkpoint else 0


def rows_of(run: Path, table: str) -> list[dict[str, Any]]:
    """The committed rows of a table, without what the wall clock says."""
    parts = read_manifest(run).tables[table]
    read = [parquet.read_table(part_path(run, part), partitioning=None) for part in parts]
    rows = pa.concat_tables(read).to_pylist() if read else []
    return [{key: value for key, value in row.items() if key not in BY_THE_CLOCK} for row in rows]


def differences(run: Path, other: Path) -> list[str]:
    """Where two finished runs differ: in a row of a table of events, in a version's folder, in the rejected rows, or in
    what was sent to MLflow."""
    tables = [table for table in TABLES if table not in COUNTS]
    found = [f"{table}: {told}" for table in tables for told in _first(rows_of(run, table), rows_of(other, table))]
    found += [f"versions/: {told}" for told in _first(versions_of(run), versions_of(other))]
    found += [f"rejected: {told}" for told in _first(rejected_of(run), rejected_of(other))]
    return found + [f"sent: {told}" for told in _first(sent_by(run), sent_by(other))]


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


def sent_by(run: Path) -> list[Any]:
    """What a run posted to MLflow: its beginning, versions, points and its end, in order, without times. That it was
    stopped and gone on with is left out."""
    sent: list[Any] = []
    for line in map(json.loads, filter(None, (run / SPOOL).read_text(encoding="utf-8").splitlines())):
        match line.get("kind"):
            case "points":
                points = (point for point in line["body"]["points"] if point[0] != "curve/tokens_per_second")
                sent += [("point", key, value, step) for key, value, step, _ in points]
            case "publish":
                sent.append(("publish", line["body"]["event"]["version"], line["body"]["event"]["digest"]))
            case "start" | "finish" as kind:
                sent.append(kind)
    return _points_by_name(sent)


def _points_by_name(sent: list[Any]) -> list[Any]:
    """Points travel in batches whose ends depend on commits: each series keeps its order, apart from the rest."""
    points = sorted((message for message in sent if message[0] == "point"), key=lambda message: message[1])
    return [message for message in sent if message[0] != "point"] + points


def strays(run: Path) -> set[str]:
    """Files of a finished run that nothing names. A process that is killed behind its last commit leaves its name."""
    manifest = read_manifest(run)
    assert manifest.finished
    named = {"config.json", "summary.json", "rejected.jsonl", SPOOL, LOCK, OWNER, str(MANIFEST), "log/.manifest.lock"}
    named |= {f"log/{part.file}" for parts in manifest.tables.values() for part in parts}
    for row in rows_of(run, "versions"):
        files = open_version(run / row["folder"])["files"]
        named |= {f"{row['folder']}/{name}" for name in (*files, "manifest.json")}
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()} - named
