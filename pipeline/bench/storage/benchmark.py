"""Measures the cost of the log and the speed of queries on a large one, with the decisions of real runs."""

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pipeline.reports.machine import peak_memory  # imports nothing that would count as memory
from store.errors import OmnidraftError, RunError
from store.log.committed_events import logged_decisions
from store.log.compaction import compact
from store.log.manifest import MANIFEST, part_path, read_manifest
from store.log.measurement import bytes_by_column, resample
from store.log.rollups import COUNTS
from store.log.run_log import RunLog
from store.query.log_reader import LogReader

RECIPES = (
    "acceptance-over-time",
    "acceptance-by-dataset",
    "acceptance-by-version",
    "by-ngram-length",
    "by-position",
    "rejected-tokens",
)
APPENDED_ROWS = 1_000_000
EVENTS = 50_000  # distinct decisions that are appended repeatedly
SMALL_PARTS = 5_000  # decisions per part; a run commits as many in ten seconds, or a fraction
_MAKING = "from pipeline.cli.app import main; main()"


@dataclass(frozen=True)
class Writing:
    """Decisions per second from `append` to disk, per repetition: by wall time, and by CPU time of all threads."""

    per_second: Sequence[float]
    per_cpu_second: Sequence[float]


@dataclass(frozen=True)
class Sizes:
    """Bytes per decision of a run, by column, as written and after compaction.

    Attributes:
        rows, parts: number of decisions and of their parts, as written.
        written, joined: bytes per decision by column, as written and after compaction.
        counts: bytes per decision of all tables of counts that compaction adds.
    """

    rows: int
    parts: int
    written: Mapping[str, float]
    joined: Mapping[str, float]
    counts: float


@dataclass(frozen=True)
class Answers:
    """Query times in a separate process, in seconds.

    Attributes:
        opening: wall seconds to open the log, per repetition.
        recipes: wall seconds of each recipe, per repetition, by name.
        cpu: CPU seconds of all threads for each recipe, per repetition, by name.
        peak_bytes: peak memory of the process.
    """

    opening: Sequence[float]
    recipes: Mapping[str, Sequence[float]]
    cpu: Mapping[str, Sequence[float]]
    peak_bytes: int


@dataclass(frozen=True)
class Large:
    """Results on a large, compacted log made of the prompts of a real run.

    Attributes:
        decisions, prompts: numbers of rows.
        bytes: size of all tables on disk.
        making: seconds to create the log.
        answers: query times.
    """

    decisions: int
    prompts: int
    bytes: int
    making: float
    answers: Answers


@dataclass(frozen=True)
class Joining:
    """Results on a log of small parts, before and after compaction.

    Attributes:
        decisions: number of rows.
        parts_before, parts_after: number of parts.
        bytes_before, bytes_after: size on disk.
        seconds: wall seconds of the compaction.
        before, after: query times.
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
class StorageReport:
    """All results, with the number of cores and the load average of the machine."""

    cores: int
    load: float
    writing: Mapping[str, Writing]
    sizes: Mapping[str, Sizes]
    joining: Joining
    large: Large


def measure(runs: Sequence[Path], scratch: Path, rows: int, repetitions: int) -> StorageReport:
    """Measure with the decisions of `runs`. Large logs are made of the prompts of the last one, below `scratch`.

    Args:
        runs: folders of runs.
        scratch: folder for temporary logs.
        rows: decisions in the large log.
        repetitions: repetitions of each measurement.

    Raises:
        RunError: two runs have the same folder name, or one is no run or has no decisions.
    """
    runs = [run.resolve() for run in runs]
    _require_measurable(runs)
    writing = measure_writing(runs, scratch, repetitions)
    sizes = {run.name: measure_sizes(run, scratch) for run in runs}
    joining = measure_joining(runs[-1], scratch, min(rows, 2_000_000), repetitions)
    large = measure_large(runs[-1], scratch, rows, repetitions)
    return StorageReport(os.cpu_count() or 1, os.getloadavg()[0], writing, sizes, joining, large)


def _require_measurable(runs: Sequence[Path]) -> None:
    if len({run.name for run in runs}) != len(runs):
        raise RunError(f"runs must have different folder names, got {', '.join(map(str, runs))}; rename one")
    for run in runs:
        if not _rows(run, "decisions"):
            raise RunError(f"{run} must have decisions to measure, but it has none; name another with --run")


def make_run(folder: Path, temperature: float) -> Path:
    """Run the built-in stream at a temperature, always drafting, and return its folder.

    Raises:
        OmnidraftError: the run failed.
    """
    arguments = ["replay", "--temperature", str(temperature), "--batch", "8", "--no-publish", "--run", str(folder)]
    made = subprocess.run(
        [sys.executable, "-c", _MAKING, *arguments, "--set", "draft.only_where_paying=false"],
        check=False,
        capture_output=True,
        text=True,
    )
    if made.returncode:
        raise OmnidraftError(f"a run must be made to measure its log, but it failed: {made.stderr[-500:]}; see --run")
    return folder


def measure_writing(runs: Sequence[Path], scratch: Path, repetitions: int) -> dict[str, Writing]:
    """Measure writing. The runs take turns in each repetition, so that other work on the machine affects them alike."""
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
    """Measure sizes before and after compaction on a copy of the run."""
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
    """Create a large log and measure queries on it."""
    folder = scratch / "large"
    began = time.perf_counter()
    decisions = resample(run, folder, rows)
    making = time.perf_counter() - began
    found = Large(decisions, _rows(folder, "prompts"), _bytes(folder), making, measure_queries(folder, repetitions))
    shutil.rmtree(folder)
    return found


def measure_joining(run: Path, scratch: Path, rows: int, repetitions: int) -> Joining:
    """Create a log of small parts, and measure queries before and after its compaction."""
    folder = scratch / "small"
    decisions = resample(run, folder, rows, part_rows=SMALL_PARTS, counted=False)
    before = measure_queries(folder, repetitions)
    began = time.perf_counter()
    done = compact(folder)
    seconds = time.perf_counter() - began
    after = measure_queries(folder, repetitions)
    shutil.rmtree(folder)
    size = done.bytes_after or 0
    return Joining(decisions, done.parts_before, done.parts_after, done.bytes_before, size, seconds, before, after)


def measure_queries(folder: Path, repetitions: int) -> Answers:
    """Measure queries in a separate process, so that its peak memory is that of the queries."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure_queries, folder, repetitions).result()


def _measure_queries(folder: Path, repetitions: int) -> Answers:
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
    recipes, cpus = ({name: [pair[at] for pair in pairs] for name, pairs in found.items()} for at in (0, 1))
    return Answers(opening, recipes, cpus, peak_memory() or 0)


def _rows(folder: Path, table: str) -> int:
    return sum(part.rows for part in read_manifest(folder).tables[table])


def _bytes(folder: Path) -> int:
    parts = [part for parts in read_manifest(folder).tables.values() for part in parts]
    return sum(part_path(folder, part).stat().st_size for part in parts)
