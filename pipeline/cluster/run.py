"""One replay by several workers, from configuration to summary.

    sources -> dispatcher -> workers (worker.py) -> learner (learner.py) -> weights -> workers

Each worker and the learner write a partition of the log. The run's own log holds the source rows that were no prompts
and a checkpoint: the position in the sources, and the prompts before it that were not yet in a worker's log.
"""

import logging
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.assembly.models import settle_settings
from pipeline.cluster.dispatcher import Assignments, Dispatcher
from pipeline.cluster.ray_backend import LOCAL, RayActors, connect_to_ray, gpu_share
from pipeline.cluster.worker import TargetInfo, WorkerSetup
from pipeline.cluster.worker_pool import WorkerPool
from pipeline.config.settings import Config
from pipeline.learner_service.service import LearnerConfig
from pipeline.reports.artifacts import draw_run_plots
from pipeline.reports.progress import Display
from pipeline.reports.vocab_report import write_pair_reports
from pipeline.run.committer import CommitCosts
from pipeline.run.context import RunContext
from pipeline.run.folder import VOCABULARY
from pipeline.run.mlflow_run import UNSENT_TIMEOUT
from pipeline.run.signals import Stop, stop_on_signals
from pipeline.sources.position import Prefetcher, SourcePosition
from pipeline.sources.stream import datasets_of, open_sources, require_prompt, stream, total
from stages.contract.snapshot import State
from store.errors import SourceError, UsageError
from store.events import PromptReceived
from store.files import write_whole
from store.log.manifest import RunKind, read_manifest
from store.log.partitions import LEARNER, close_partition, partition_folder, partition_folders, worker_folders
from store.log.parts import completed_prompts
from store.log.run_log import Mirror
from store.log_records import PROJECT
from store.object_store.uri import uri_of
from store.query.summary import write_summary
from store.registry.registry import default_uri

LOG = logging.getLogger("omnidraft.cluster")

WORKERS = "workers"  # file in the run's folder with the wanted number of workers; may be edited during the run
MAX_PREFETCHED = 1024  # prompts that are read before workers need them
NOTHING_DONE: State = {"position": (0, ""), "open": (), "models": None, "seconds": 0.0}  # before the first commit


class ClusterReplay:
    """A run of several workers that is ready to start or to resume. Arguments and errors as `Replay`; the address is
    that of a Ray cluster, as in `connect_to_ray`.
    """

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        *,
        resume: bool,
        mirror: Mirror | None = None,
        address: str,
        workers: int,
    ) -> None:
        self._run = RunContext(run_folder.resolve(), RunKind.CLUSTER)
        targets = config.router.targets
        if mirror and uri_of(Path(mirror.name)):
            raise UsageError(
                f"a run with --ray must be in a folder that all machines share, got {mirror.name}; name one with --run"
            )
        if len(targets) != 1:
            raise UsageError(f"a run with --ray must have one target, got {', '.join(targets)}")
        self._address, self._workers = address, workers
        self._uri = config.publish.mlflow_uri or default_uri(self._run.folder.parent)
        with self._run.acquire(resume=resume):
            self.config = settle_settings(config, self._uri, resume=resume)
            self._sources = open_sources(config.sources, config.source, seed=config.seed, targets=targets)
            events = stream(self._sources)
            self._events = events if resume else require_prompt(events)

    def total(self) -> int | None:
        """The number of prompts; None if a source does not know."""
        return total(self._sources)

    def run(self, display: Display) -> dict[str, Any]:
        """Replay the rest of the stream, or until a signal. Returns and raises as `Replay.run`."""
        with connect_to_ray(self._address), self._run.open(self.config.to_json()), stop_on_signals() as stop:
            write_whole(self._run.folder / WORKERS, f"{self._workers}\n".encode())
            return self._replay(stop, display)

    def _replay(self, stop: Stop, display: Display) -> dict[str, Any]:
        run = self._run
        folder = partition_folder(run.folder, LEARNER)
        if folder in partition_folders(run.folder) and read_manifest(folder).finished:
            run.finish()  # it was killed after the end of the stream
            costs = CommitCosts(0, 0.0, 0.0, 1.0)
            return {**write_summary(run.folder), "stopped": False, "commits": asdict(costs)}
        events, state = self._events, self._run.snapshot or NOTHING_DONE
        position, assignments, done = SourcePosition(events), Assignments(), self._read_committed_offsets(display)
        self._reread_open_prompts(state, position, assignments, done)
        began = time.time() - state["seconds"]

        def save() -> State:
            return {
                "position": position.state,
                "open": list(assignments.offsets),  # before the position, and committed by no worker
                "models": dispatcher.model_fingerprints,  # of every worker; None before the first one was ready
                "seconds": time.time() - began,
            }

        run.commit_by(self.config.commit.seconds, save, display.show, text=self.config.log.text)
        dispatcher = Dispatcher(
            self._make_pool(began),
            run.folder,
            self.config.batch,
            assignments,
            done,
            position,
            run.events,
            self._describe_target,
            display,
            tuple(state["models"]) if state["models"] else None,
        )

        def pause() -> bool:
            if run.committer.is_due():
                run.commit()
            return stop.requested

        broken: SourceError | None = None
        try:
            dispatcher.run(Prefetcher(events, MAX_PREFETCHED), self._read_worker_count, pause)
        except SourceError as error:
            broken = error
        stopped = stop.requested or broken is not None
        if stopped:
            LOG.info("stopping: committing completed prompts")
            dispatcher.halt()
            run.commit(wait=True)
        summary = self._end_learner(dispatcher.pool, stopped)
        if not stopped:
            run.finish()
        run.log.close()
        if broken:
            raise broken
        return {**summary, "stopped": stopped, "commits": asdict(run.committer.costs)}

    def _read_committed_offsets(self, display: Display) -> set[int]:
        """Close the partitions of earlier workers and return the offsets in their logs."""
        done = set()
        for folder in worker_folders(self._run.folder):
            close_partition(folder)
        for prompt in completed_prompts(self._run.folder):
            done.add(prompt.offset)
            display.remember(prompt)
        return done

    def _reread_open_prompts(
        self, state: State, position: SourcePosition, assignments: Assignments, done: set[int]
    ) -> None:
        """Reread the sources up to the saved position, and add the prompts that are in no log."""
        missing = set(state["open"]) - done
        for event in position.reread(state["position"]):
            if isinstance(event, PromptReceived) and event.offset in missing:
                assignments.add_prompt(event)

    def _make_pool(self, began: float) -> WorkerPool:
        threads = self.config.threads or 1
        config = self.config.with_overrides({"threads": threads})
        wanted = PROJECT.getEffectiveLevel()
        # One line of level INFO per worker is too many.
        level = max(wanted, logging.WARNING) if wanted > logging.DEBUG else wanted
        setup = WorkerSetup(config, self._uri, Path.cwd(), began, level)
        cpus = 0 if self._address == LOCAL else threads  # the cores of one machine do not limit its workers
        gpus = 0.0 if config.device == "cpu" else gpu_share(self._workers)
        return WorkerPool(RayActors(), setup, self._run.folder, {"num_cpus": cpus, "num_gpus": gpus})

    def _describe_target(self, found: TargetInfo) -> LearnerConfig:
        """Write the report on the vocabularies, and return what the learner starts with."""
        write_pair_reports(self._run.folder / VOCABULARY, [found.vocabularies])
        datasets = datasets_of(self._sources, self.config.sources)
        return LearnerConfig(self.config, self._run.folder, self._uri, datasets, found.piece_cost, found.probe)

    def _read_worker_count(self) -> int:
        """Read the wanted number of workers from the run's folder; the last one if the file holds no number."""
        with suppress(OSError, ValueError):
            self._workers = max(1, int((self._run.folder / WORKERS).read_text(encoding="ascii")))
        return self._workers

    def _end_learner(self, pool: WorkerPool, stopped: bool) -> dict[str, Any]:
        write_summary(self._run.folder)
        if not stopped and self.config.publish.enabled:
            draw_run_plots(self._run.folder)
        if not pool.end_learner("pause" if stopped else "end", UNSENT_TIMEOUT):
            LOG.warning(
                "MLflow did not take all of the run; `omnidraft versions sync %s` sends what is missing", self._run.name
            )
        return write_summary(self._run.folder)
