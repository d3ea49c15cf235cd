"""What the log costs, and how quickly a large one answers; measured with the decisions of real runs."""

import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from store.compact import compact
from store.errors import OmnidraftError, RunError
from store.log import RunLog
from store.manifest import MANIFEST, part_path, read_manifest
from store.queries import LogReader
from store.resample import resample
from store.rollups import COUNTS
from store.sizes import bytes_by_column, logged_decisions

RECIPES = (
    "acceptance-over-time",
    "acceptance-by-dataset",
    "acceptance-by-version",
    "by-ngram-length",
    "by-position",
    "rejected-tokens",
)
APPENDED_ROWS = 1_000_000
EVENTS = 50_000  # different decisions that are appended over and over
SMALL_PARTS = 5_000  # decisions that a run commits in ten seconds, or a few times as many
_MAKING = "from pipeline.cli import main; main()"


@dataclass(frozen=True)
class Writing:
    """Decisions per second from `append` to disk, per repetition: by the clock, and by CPU time of all threads."""

    per_second: Sequence[float]
    per_cpu_second: Sequence[float]


@dataclass(frozen=True)
class Sizes:
    """Bytes per decision of a run, by column: as it wrote them, and when its parts were joined.

    Attributes:
        rows, parts: of decisions, as written.
        written, joined: by column.
        counts: per decision, of all tables of counts beside the joined parts.
    """

    rows: int
    parts: int
    written: Mapping[str, float]
    joined: Mapping[str, float]
    counts: float


@dataclass(frozen=True)
class Answers:
    """Seconds of a process that did nothing else.

    Attributes:
        opening: of the log, per repetition.
        recipes: per repetition, by name.
        cpu: of all threads together, alike: with cores to itself a query takes less by the clock.
        peak_bytes: of the process's memory.
    """

    opening: Sequence[float]
    recipes: Mapping[str, Sequence[float]]
    cpu: Mapping[str, Sequence[float]]
    peak_bytes: int


@dataclass(frozen=True)
class Large:
    """A log made of a real run's prompts, joined.

    Attributes:
        decisions, prompts: rows.
        bytes: on disk, of all tables.
        making: seconds.
    """

    decisions: int
    prompts: int
    bytes: int
    making: float
    answers: Answers


@dataclass(frozen=True)
class Joining:
    """A log of small parts before and after compaction.

    Attributes:
        decisions: rows.
        seconds: of the compaction.
    """

    decisions: int
    parts_before: int
    parts_after: int
    bytes_before: int
    bytes_after: int
    seconds: float
    before: Answers
    after: Answers


@dataclass(frozen=True)
class Report:
    """All of it. The machine's cores and load tell how much of it the bench had."""

    cores: int
    load: float
    writing: Mapping[str, Writing]
    sizes: Mapping[str, Sizes]
    joining: Joining
    large: Large


def measure(runs: Sequence[Path], scratch: Path, rows: int, repetitions: int) -> Report:
    """Measure with the decisions of `runs`; the logs of the last one's prompts are made below `scratch`.

    Raises `RunError` for runs of one folder name, for what is no run, and for one without decisions.
    """
    runs = [run.resolve() for run in runs]
    _require_measurable(runs)
    writing = measure_writing(runs, scratch, repetitions)
    sizes = {run.name: measure_sizes(run, scratch) for run in runs}
    joining = measure_joining(runs[-1], scratch, min(rows, 2_000_000), repetitions)
    large = measure_large(runs[-1], scratch, rows, repetitions)
    return Report(os.cpu_count() or 1, os.getloadavg()[0], writing, sizes, joining, large)


def _require_measurable(runs: Sequence[Path]) -> None:
    if len({run.name for run in runs}) != len(runs):
        raise RunError(f"runs must have different folder names, got {', '.join(map(str, runs))}; rename one")
    for run in runs:
        if not _rows(run, "decisions"):
            raise RunError(f"{run} must have decisions to measure, but it has none; name another with --run")


def make_run(folder: Path, temperature: float) -> Path:
    """A real run of the built-in stream that drafts always. Raises `OmnidraftError` when it fails."""
    arguments = ["replay", "--temperature", str(temperature), "--batch", "8", "--no-publish", "--run", str(folder)]
    made = subprocess.run(
        [sys.executable, "-c", _MAKING, *arguments, "--set", "draft.only_where_paying=false"],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        raise OmnidraftError(f"a run must be made to measure its log, but it failed: {made.stderr[-500:]}; see --run")
    return folder


def measure_writing(runs: Sequence[Path], scratch: Path, repetitions: int) -> dict[str, Writing]:
    """One repetition of every run after the other, so that what else the machine does meets them alike."""
    events = {run.name: logged_decisions(run, EVENTS) for run in runs}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in events}
    for _ in range(repetitions):
        for name, decisions in events.items():
            folder = scratch / "writing"
            clock, cpu = time.perf_counter(), time.process_time()
            with RunLog(folder) as log:
                for _ in range(APPENDED_ROWS // len(decisions)):
                    for decision in decisions:
                        log.append(decision)
            written = APPENDED_ROWS // len(decisions) * len(decisions)
            found[name].append((written / (time.perf_counter() - clock), written / (time.process_time() - cpu)))
            shutil.rmtree(folder)
    return {name: Writing(*map(list, zip(*speeds, strict=True))) for name, speeds in found.items()}


def measure_sizes(run: Path, scratch: Path) -> Sizes:
    """Of a copy, so that the run stays as it is."""
    copy = scratch / "sizes" / run.name
    shutil.copytree(run / MANIFEST.parent, copy / MANIFEST.parent)
    written, parts = bytes_by_column(copy), read_manifest(copy).tables["decisions"]
    compact(copy)
    rows = sum(part.rows for part in parts)
    counted = sum(part.bytes for table in COUNTS for part in read_manifest(copy).tables[table])
    found = Sizes(rows, len(parts), written, bytes_by_column(copy), counted / rows)
    shutil.rmtree(copy)
    return found


def measure_large(run: Path, scratch: Path, rows: int, repetitions: int) -> Large:
    """Make a large log and ask it."""
    folder = scratch / "large"
    began = time.perf_counter()
    decisions = resample(run, folder, rows)
    making = time.perf_counter() - began
    found = Large(decisions, _rows(folder, "prompts"), _bytes(folder), making, ask(folder, repetitions))
    shutil.rmtree(folder)
    return found


def measure_joining(run: Path, scratch: Path, rows: int, repetitions: int) -> Joining:
    """Make a log of small parts, ask it, join them, and ask again."""
    folder = scratch / "small"
    decisions = resample(run, folder, rows, part_rows=SMALL_PARTS, counted=False)
    before = ask(folder, repetitions)
    began = time.perf_counter()
    done = compact(folder)
    seconds = time.perf_counter() - began
    after = ask(folder, repetitions)
    shutil.rmtree(folder)
    size = done.bytes_after or 0
    return Joining(decisions, done.parts_before, done.parts_after, done.bytes_before, size, seconds, before, after)


def ask(folder: Path, repetitions: int) -> Answers:
    """Ask in a process of its own, which shows what it takes in memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_ask, folder, repetitions).result()


def _ask(folder: Path, repetitions: int) -> Answers:
    opening: list[float] = []
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in RECIPES}
    for _ in range(repetitions):
        began = time.perf_counter()
        with LogReader([folder]) as log:
            opening.append(time.perf_counter() - began)
            for name in RECIPES:
                began, cpu = time.perf_counter(), time.process_time()
                log.recipe(name)
                found[name].append((time.perf_counter() - began, time.process_time() - cpu))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    recipes, cpus = ({name: [pair[at] for pair in pairs] for name, pairs in found.items()} for at in (0, 1))
    return Answers(opening, recipes, cpus, peak)


def _rows(folder: Path, table: str) -> int:
    return sum(part.rows for part in read_manifest(folder).tables[table])


def _bytes(folder: Path) -> int:
    parts = [part for parts in read_manifest(folder).tables.values() for part in parts]
    return sum(part_path(folder, part).stat().st_size for part in parts)
