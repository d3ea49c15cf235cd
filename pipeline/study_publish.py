"""A study's runs in MLflow: one per record, sent between runs, so that sending disturbs no measurement."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from pipeline.study import Plan
from pipeline.study_figures import last_fifth, rates, whole
from pipeline.study_records import Passed, Record
from store.registry import MlflowRegistry, Point

EXPERIMENT = "omnidraft-studies"
WINDOW = 16  # prompts that a point of a curve looks back on, as in a replay's curves
TIMEOUT = 60.0  # seconds to wait for MLflow after each run


class StudyPublisher:
    """Sends finished runs. What MLflow does not take stays in a spool beside the study's file and is sent next time.

    Args:
        uri: of the MLflow store.
        plan: for names and params.
        spools: a folder.
    """

    def __init__(self, uri: str, plan: Plan, spools: Path) -> None:
        self._uri, self._plan, self._spools = uri, plan, spools

    def send_left_over(self) -> int:
        """Try again what earlier commands could not send; the number of runs that are still waiting."""
        left = sorted(self._spools.glob("*.jsonl"))
        return sum(self._close(MlflowRegistry(self._uri, spool, experiment=EXPERIMENT), spool) for spool in left)

    def send(self, record: Record) -> bool:
        """Send one run; whether MLflow took it."""
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
        """Whether something stayed unsent."""
        unsent = registry.close(TIMEOUT) > 0
        if not unsent:
            spool.unlink()
            if not any(spool.parent.iterdir()):
                spool.parent.rmdir()
        return unsent


def points(record: Record, now: int) -> Iterator[Point]:
    """Curves over the stream, by the names of a replay's, at milliseconds `now` plus those of the run."""
    window: deque[Passed] = deque(maxlen=WINDOW)
    for passed in sorted(record.passed, key=lambda one: one.offset):
        window.append(passed)
        found = rates(list(window), 0.0, 0.0)
        curves = {"acceptance_rate": found.acceptance, "block_efficiency": found.block_efficiency}
        for name, value in curves.items():
            if value is not None:
                yield f"curve/{name}", value, passed.offset, now + int(1000 * passed.at)


def summary(record: Record) -> dict[str, float]:
    """The figures of a run, flat."""
    parts = {"whole": whole(record), "last_fifth": last_fifth(record)}
    found = {f"{part}/{name}": value for part, of in parts.items() for name, value in asdict(of).items()}
    counts = {"seconds": record.seconds, "learn_seconds": record.learning, "cache_bytes": float(record.cache_bytes)}
    return {name: value for name, value in found.items() if value is not None} | counts
