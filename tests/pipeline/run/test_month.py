"""A month in minutes: a hundred thousand prompts on stub models through the real loop, recorder, log, compaction,
registry queue and retention. Memory, open files, threads, the files of the run and the registered versions stay as they
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
from registry_making import new_store
from test_soak import MEBIBYTES, SHARE, STATUS, resident_mebibytes
from version_making import publication

from pipeline.run.event_sink import EventSink
from store.events import PromptReceived
from store.log.compaction import compact
from store.log.run_log import Commit, RunLog
from store.outbox import Outbox, RetryPolicy
from store.query.summary import write_summary
from store.registry.registry import MODEL, MlflowRegistry, list_versions
from store.registry.retention import prune

COMMIT, COMPACT = 500, 5_000  # prompts between two
KEEP, PUBLISHED = 3, 4  # registered versions that stay, and those of a day
JOINED = 20_000  # rows of a joined part: few, so that joining takes as much memory early as late
STATE = {"state.json": b"{}"}


class Month:
    """A run that commits, compacts and posts to a registry as real runs do."""

    def __init__(self, folder: Path, prompts: int) -> None:
        self.folder, self._prompts = folder, prompts
        self._loop, self._log = stub_loop(batch=8), RunLog(folder, part_rows=20_000)
        self._events = EventSink(self._log)
        self.delivered = 0
        self._outbox = Outbox(folder / "queue.jsonl", self._deliver, retry_policy=RetryPolicy(linger=0.01), keep=0)
        self.memory: list[float] = []
        self.descriptors: list[int] = []
        self.threads: list[int] = []
        self.files: list[int] = []
        self.bytes: list[int] = []
        self._registry = folder.parent / "mlflow"
        self._uri = new_store(self._registry)
        self.registered: list[int] = []
        self.pruned = 0
        self.artifacts: list[int] = []

    def _deliver(self, kind: str, bodies: list[dict]) -> dict:
        self.delivered += len(bodies)
        return {}

    def run(self) -> None:
        texts = ("ab", "abcd", "a", "abc")
        prompts = (
            PromptReceived(offset, f"month:{offset}", "month", offset + 1, texts[offset % 4])
            for offset in range(self._prompts)
        )
        self._events.take(self._loop.begin())
        for number in range(COMMIT, self._prompts + 1, COMMIT):
            self._events.take(self._loop.until_idle(islice(prompts, COMMIT), lambda: False))
            self._outbox.post("points", {"step": number})
            mark = self._outbox.mark()
            self._log.commit(Commit(lambda: STATE, mark, lambda mark=mark: self._outbox.release(mark)), wait=True)
            self._forget()
            if number % COMPACT == 0:
                compact(self.folder, rows=JOINED, grace=0.0)
                self._publish_day(number // COMPACT)
                self._look()
        self._events.take(self._loop.end())
        self._log.finish(self._outbox.mark())
        assert self._outbox.close(60) == 0

    def _forget(self) -> None:
        """Clear what the stubs keep."""
        runner = runner_of(self._loop)
        for stage in (runner.stages.decode, runner.stages.translate, runner.stages.verify):
            for kept in (stage.admitted, stage.released, stage.calls):
                kept.clear()
        runner.learner._response.noted.clear()

    def _publish_day(self, day: int) -> None:
        """Register the versions of a run of a day, and delete those of earlier days."""
        run, spool = f"day-{day}", self.folder.parent / f"queue-{day}.jsonl"
        registry = MlflowRegistry(self._uri, spool)
        registry.start_run(run, {}, {}, [("month", "stub")], identity=run)
        for version in range(PUBLISHED):
            folder, event = publication(self.folder.parent, version, run)
            registry.publish(folder, event, {}, drift=None)
        registry.finish({}, [])
        assert registry.close(60) == 0
        shutil.rmtree(self.folder.parent / run)
        self.pruned += len(prune(self._uri, MODEL, KEEP, dry_run=False))
        self.registered.append(len(list_versions(self._uri)))
        files = [path for path in (self._registry / "mlartifacts").rglob("*") if path.is_file()]
        self.artifacts.append(sum(path.stat().st_size for path in files))

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
    per_prompt = [size / (COMPACT * (place + 1)) for place, size in enumerate(month.bytes)]
    assert per_prompt[-1] <= 1.1 * per_prompt[0], per_prompt
    summary = write_summary(month.folder)
    assert summary["totals"]["prompts"] == prompts
    assert summary["check"]["mismatches"] == 0
    assert summary["check"]["decisions"] == prompts * 10 // 4
    assert month.delivered == prompts // COMMIT
    days = prompts // COMPACT
    assert month.pruned == (days - 1) * PUBLISHED, "all versions of earlier days"
    assert month.registered == [PUBLISHED] * days, "the newest, with their ancestors"
    assert max(month.artifacts) <= 1.1 * month.artifacts[0], month.artifacts


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc/self to read memory and open files from")
@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param(20_000, marks=pytest.mark.slow),
        pytest.param(100_000, marks=[pytest.mark.sweep, pytest.mark.timeout(3600)]),
    ],
)
def test_nothing_grows_but_the_rows(tmp_path: Path, prompts: int):
    month = Month(tmp_path / "run", prompts)
    month.run()
    require_flat(month, prompts)
