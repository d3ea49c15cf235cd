"""A month in minutes: many prompts on stub models through the real loop, recorder, log, compaction,
the registry and retention. Memory, open files, threads, the files of the run and the registered versions stay as they
are.
"""

import gc
import shutil
import threading
from itertools import islice
from pathlib import Path
from statistics import median

import pyarrow as pa
import pytest
from loop_doubles import runner_of, stub_loop
from registry_making import MODEL, new_store, publish_run

from pipeline.run.context import EventSink
from store.events import PromptReceived
from store.log.compaction import compact
from store.log.run_log import Commit, RunLog
from store.query.summary import write_summary
from store.registry.mlflow_client import connect
from store.registry.mlflow_sync import RunSync
from store.registry.registry import list_versions, prune
from store.registry.run_description import RunDescription

KEEP, PUBLISHED = 3, 4  # registered versions that stay, and those of a day
JOINED = 20_000  # rows of a joined part: few, so that joining takes as much memory early as late
STATE = {"state.json": b"{}"}
STATUS = Path("/proc/self/status")
SHARE, MEBIBYTES = 0.05, 20  # what resident memory may grow by: the larger of the two


def resident_mebibytes() -> float:
    """Memory of this process."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


class Month:
    """A run that commits, compacts and sends to a registry as real runs do."""

    def __init__(self, folder: Path, prompts: int, day: int) -> None:
        self.folder, self._prompts, self.day = folder, prompts, day
        self._loop, self._log = stub_loop(batch=8), RunLog(folder, part_rows=20_000)
        self._events = EventSink(self._log)
        self.memory: list[float] = []
        self.descriptors: list[int] = []
        self.threads: list[int] = []
        self.files: list[int] = []
        self.bytes: list[int] = []
        self._registry = folder.parent / "mlflow"
        self._uri = new_store(self._registry)
        RunDescription.create("month", {}, [("month", "stub")], ("stub",), None).write(folder)
        self._sync = RunSync(folder, self._uri)
        self.registered: list[int] = []
        self.pruned = 0
        self.artifacts: list[int] = []

    def run(self) -> None:
        texts = ("ab", "abcd", "a", "abc")
        prompts = (
            PromptReceived(offset, f"month:{offset}", "month", offset + 1, texts[offset % 4])
            for offset in range(self._prompts)
        )
        self._events.take(self._loop.begin())
        commit = self.day // 4
        for number in range(commit, self._prompts + 1, commit):
            self._events.take(self._loop.until_idle(islice(prompts, commit), lambda: False))
            self._log.commit(Commit(lambda: STATE), wait=True)
            self._forget()
            if number % self.day == 0:
                self._sync.update(stopped=False)
                compact(self.folder, rows=JOINED, grace=0.0)
                self._publish_day(number // self.day)
                self._look()
        self._events.take(self._loop.end())
        self._log.finish()
        self._sync.update(stopped=True)

    def _forget(self) -> None:
        """Clear what the stubs keep."""
        runner = runner_of(self._loop)
        for stage in (runner.stages.decode, runner.stages.translate, runner.stages.verify):
            for kept in (stage.admitted, stage.released, stage.calls):
                kept.clear()
        runner.learner._response.noted.clear()

    def _publish_day(self, day: int) -> None:
        """Register the versions of a run of a day, and delete those of earlier days."""
        run = publish_run(self._uri, self.folder.parent / f"day-{day}", PUBLISHED)
        run.log.close()
        shutil.rmtree(run.folder)
        self.pruned += len(prune(self._uri, MODEL, KEEP, dry_run=False))
        self.registered.append(len(list_versions(self._uri)))
        files = [path for path in (self._registry / "mlartifacts").rglob("*") if path.is_file()]
        self.artifacts.append(sum(path.stat().st_size for path in files))

    def count_points(self) -> int:
        """The points of the curve of a rate in MLflow."""
        client = connect(self._uri)
        (run,) = client.search_runs(["1"], "attributes.run_name = 'month'")
        return len(client.get_metric_history(run.info.run_id, "window/block_efficiency"))

    def _look(self) -> None:
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        gc.collect()
        pa.default_memory_pool().release_unused()
        self.memory.append(resident_mebibytes())
        self.descriptors.append(len(list(Path("/proc/self/fd").iterdir())))
        self.threads.append(threading.active_count())
        self.files.append(len(files))
        self.bytes.append(sum(path.stat().st_size for path in files))


def require_flat(month: Month, prompts: int) -> None:
    half = len(month.memory) // 2
    early, late = median(month.memory[1:half]), median(month.memory[half:])
    assert late - early <= max(SHARE * early, MEBIBYTES), f"resident memory: {month.memory}"
    assert max(month.descriptors[1:]) <= month.descriptors[0] + 2, month.descriptors
    assert max(month.threads) <= month.threads[0] + 1, month.threads
    # Rows are never removed, so bytes grow with them, and joined parts become more; files of single commits do not.
    assert month.files[-1] <= month.files[0] + 16 * prompts / JOINED + 12, month.files
    per_prompt = [size / (month.day * (place + 1)) for place, size in enumerate(month.bytes)]
    assert per_prompt[-1] <= 1.1 * per_prompt[0], per_prompt
    summary = write_summary(month.folder)
    assert summary["totals"]["prompts"] == prompts
    assert summary["check"]["mismatches"] == 0
    assert summary["check"]["decisions"] == prompts * 10 // 4
    assert month.count_points() == prompts, "each prompt once, whatever was joined in the meantime"
    days = prompts // month.day
    assert month.pruned == (days - 1) * PUBLISHED, "all versions of earlier days"
    assert month.registered == [PUBLISHED] * days, "the newest, with their ancestors"
    assert max(month.artifacts) <= 1.1 * month.artifacts[0], month.artifacts


@pytest.mark.usefixtures("small_heap")
@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc/self to read memory and open files from")
@pytest.mark.parametrize(
    ("prompts", "day"),
    [
        (1_200, 300),
        pytest.param(100_000, 1_000, marks=[pytest.mark.sweep, pytest.mark.timeout(3600)]),
    ],
)
def test_nothing_grows_but_the_rows(tmp_path: Path, prompts: int, day: int):
    month = Month(tmp_path / "run", prompts, day)
    month.run()
    require_flat(month, prompts)
