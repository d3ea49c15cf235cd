"""Records the runs of a study in MLflow, between runs, so that sending disturbs no measurement."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from pipeline.study.metrics import last_fifth, rates, whole
from pipeline.study.records import PromptCounts, Record
from pipeline.study.runner import StudyPlan
from store.registry.registry import MlflowRegistry, Point

EXPERIMENT = "omnidraft-studies"
WINDOW = 16  # prompts per point of a curve, as in the curves of a replay
TIMEOUT = 60.0  # seconds to wait for MLflow after each run


class StudyPublisher:
    """Sends finished runs to MLflow. Undelivered messages stay in a spool next to the study's file until the next run.

    Args:
        uri: URI of the MLflow store.
        plan: plan of the study, for names and parameters.
        spools: folder for the spools.
    """

    def __init__(self, uri: str, plan: StudyPlan, spools: Path) -> None:
        self._uri, self._plan, self._spools = uri, plan, spools

    def send_left_over(self) -> int:
        """Send the runs that earlier commands could not send. Returns the number of runs that remain unsent."""
        left = sorted(self._spools.glob("*.jsonl"))
        return sum(self._close(MlflowRegistry(self._uri, spool, experiment=EXPERIMENT), spool) for spool in left)

    def send(self, record: Record) -> bool:
        """Send one run. Returns whether MLflow accepted it."""
        study, key = self._plan.study.name, record.key
        name = f"{study} {Path(key.target).name} {key.arm} {key.seed}"
        spool = self._spools / f"{''.join(sign if sign.isalnum() else '-' for sign in name)}.jsonl"
        registry = MlflowRegistry(self._uri, spool, experiment=EXPERIMENT)
        params = {"study": study, **asdict(key), "drafter": self._plan.config.drafter}
        tags = {"kind": "study", "study": str(study), "arm": key.arm, "mlflow.source.name": f"omnidraft study {study}"}
        note = f"Study '{study}', arm '{key.arm}', seed {key.seed}, target {key.target}."
        sources = [(Path(source).stem, source) for source in self._plan.config.sources]
        registry.start_run(name, params, tags | {"mlflow.note.content": note}, sources)
        registry.log_points(list(points(record, time.time_ns() // 1_000_000)))
        registry.finish(summary(record), [])
        return not self._close(registry, spool)

    @staticmethod
    def _close(registry: MlflowRegistry, spool: Path) -> bool:
        """Close a registry, and remove its spool if it is empty. Returns whether messages remain unsent."""
        unsent = registry.close(TIMEOUT) > 0
        if not unsent:
            spool.unlink()
            if not any(spool.parent.iterdir()):
                spool.parent.rmdir()
        return unsent


def points(record: Record, now: int) -> Iterator[Point]:
    """Points of the curves over the stream, named as in a replay; `now` is the start of the run in milliseconds."""
    window: deque[PromptCounts] = deque(maxlen=WINDOW)
    for passed in sorted(record.passed, key=lambda one: one.offset):
        window.append(passed)
        found = rates(list(window), 0.0, 0.0)
        curves = {"acceptance_rate": found.acceptance, "block_efficiency": found.block_efficiency}
        for name, value in curves.items():
            if value is not None:
                yield f"curve/{name}", value, passed.offset, now + int(1000 * passed.at)


def summary(record: Record) -> dict[str, float]:
    """The results of a run, by flat name."""
    parts = {"whole": whole(record), "last_fifth": last_fifth(record)}
    found = {f"{part}/{name}": value for part, of in parts.items() for name, value in asdict(of).items()}
    counts = {"seconds": record.seconds, "learn_seconds": record.learning, "cache_bytes": float(record.cache_bytes)}
    return {name: value for name, value in found.items() if value is not None} | counts
