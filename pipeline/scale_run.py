"""One replay by several workers, from configuration to summary.

    sources -> deal -> workers (scale_worker.py) -> learner (scale_learner.py) -> weights -> workers

Each worker and the learner keep a partition of the log. The run's own log has the source rows that were no prompts, and
a checkpoint: how far the sources were read, and which prompts before that were not yet in a worker's log.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.build_models import pinned
from pipeline.committing import CommitCosts, Committer
from pipeline.config import Config
from pipeline.dealing import Dealing
from pipeline.learner_host import HostSetup
from pipeline.leftovers import UNSENT_TIMEOUT
from pipeline.pictures import of_run
from pipeline.progress import Display
from pipeline.read_ahead import ReadAhead
from pipeline.records import without_text
from pipeline.registering import numbers_of
from pipeline.run_folder import CONFIG, is_unfinished, require_new
from pipeline.scale import LOCAL, RayActors, connected, gpu_share
from pipeline.scale_crew import Crew
from pipeline.scale_deal import Deal
from pipeline.scale_dispatch import Dispatch
from pipeline.scale_worker import ForLearner, WorkerSetup
from pipeline.source import Source, open_sources, stream
from pipeline.stop import Stop, stop_on_signals
from pipeline.tape import Tape
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from store.checkpoint import read_checkpoint
from store.committed import completed_prompts
from store.errors import RunError, SourceError, UsageError
from store.events import PromptReceived, PromptRejected
from store.files import write_whole
from store.lock import RunLock
from store.log import RunLog
from store.manifest import MANIFEST, read_manifest
from store.object_store_mirror import Mirror
from store.object_store_uri import uri_of
from store.partitions import LEARNER, close_partition, partition_folder, partition_folders, worker_folders
from store.registry import NoRegistry, default_uri
from store.summary import SUMMARY, write_summary
from store.versions import check_model_name

WORKERS = "workers"  # file of the run's folder: how many workers there are to be, which may be changed at any time
READ_AHEAD = 1024  # prompts that may wait for being dealt


class ScaledReplay:
    """A run of several workers that is ready to start, or to go on. Arguments and errors as `Replay`, and:

    Args:
        address: of a Ray cluster, see `scale.connected`.
        workers: how many, at first.

    Raises:
        UsageError: there are several targets.
    """

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        uri: str | None,
        notice: Callable[[str], None],
        *,
        resume: bool,
        mirror: Mirror | None = None,
        address: str,
        workers: int,
    ) -> None:
        self.run_folder = run_folder.resolve()
        self._lock = RunLock(self.run_folder)
        if is_unfinished(self.run_folder):
            self._lock.take()  # before anything of it is read; who writes it is named
        _require_fit(config, self.run_folder, mirror, resume)
        self._resume, self._notice, self._address, self._workers = resume, notice, address, workers
        self._uri = uri or default_uri(self.run_folder.parent)
        self.config = config if resume else config.model_copy(update={"drafter": pinned(config.drafter, self._uri)})
        self.sources: list[Source] = open_sources(
            config.sources, config.source, seed=config.seed, targets=Dealing.of(config).targets
        )

    def total(self) -> int | None:
        """Prompts to expect, None if a source does not know."""
        sizes = [source.size() for source in self.sources]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def run(self, display: Display) -> dict[str, Any]:
        """Replay the stream from where it stands to its end, or until a signal. Returns and raises as `Replay.run`."""
        with self._lock, connected(self._address):
            if not self._resume:
                require_new(self.run_folder)  # still: another process may have been quicker
            write_whole(self.run_folder / CONFIG, self.config.to_json().encode())
            write_whole(self.run_folder / WORKERS, f"{self._workers}\n".encode())
            with RunLog(self.run_folder) as log, stop_on_signals() as stop:
                return self._run(log, stop, display)

    def _run(self, log: RunLog, stop: Stop, display: Display) -> dict[str, Any]:
        if self._has_learned_all():  # killed behind the end of the stream
            log.finish()
            return {
                **write_summary(self.run_folder),
                "stopped": False,
                "commits": asdict(CommitCosts(0, 0.0, 0.0, 1.0)),
            }
        kept, events = self._kept(), stream(self.sources)
        tape, deal, done = Tape(events), Deal(), self._committed(display)
        self._go_on(kept, tape, deal, done)
        began = time.time() - kept["seconds"]
        dispatch = self._dispatch(self._crew(began), deal, done, tape, log, display, kept["models"])

        def save(keep: SnapshotWriter) -> Json:
            models, seconds = dispatch.known_by, time.time() - began
            return {"tape": tape.save(), "open": deal.offsets, "models": models, "seconds": seconds}

        committer = Committer(self.config.commit, save, lambda: False, log, NoRegistry(), rows=False)

        def pause() -> bool:
            if committer.is_due():
                committer.commit()
            return stop.asked

        broken: SourceError | None = None
        try:
            dispatch.run(ReadAhead(events, READ_AHEAD), self._wanted, pause)
        except SourceError as error:
            broken = error
        stopped = stop.asked or broken is not None
        if stopped:
            display.note("stopping: committing what was done")
            dispatch.halt()
            committer.commit(wait=True)
        summary = self._end(dispatch.crew, stopped, display)
        if not stopped:
            log.finish()
        log.close()
        if broken:
            raise broken
        return {**summary, "stopped": stopped, "commits": asdict(committer.costs)}

    def _has_learned_all(self) -> bool:
        """Whether an earlier process saw the stream to its end."""
        folder = partition_folder(self.run_folder, LEARNER)
        return folder in partition_folders(self.run_folder) and read_manifest(folder).finished

    def _dispatch(
        self, crew: Crew, deal: Deal, done: set[int], tape: Tape, log: RunLog, display: Display, known_by: Json
    ) -> Dispatch:
        def reject(event: PromptRejected) -> None:
            log.append(event if self.config.log.text else without_text(event))

        folder, batch = self.run_folder, self.config.batch
        return Dispatch(crew, folder, batch, deal, done, tape, reject, self._host_of, display, known_by)

    def _kept(self) -> Json:
        """The state of the last commit; that of a run that begins, if there was none."""
        nothing = {"tape": Tape(iter(())).save(), "open": [], "models": None, "seconds": 0.0}
        if not self._resume:
            return nothing
        checkpoint = read_manifest(self.run_folder).checkpoint
        return SnapshotReader(read_checkpoint(self.run_folder, checkpoint)).state if checkpoint else nothing

    def _committed(self, display: Display) -> set[int]:
        """The offsets in the logs of earlier workers, none of which may write any more."""
        done = set()
        for folder in worker_folders(self.run_folder):
            close_partition(folder)
        for prompt in completed_prompts(self.run_folder):
            done.add(prompt.offset)
            display.remember(prompt)
        return done

    def _go_on(self, kept: Json, tape: Tape, deal: Deal, done: set[int]) -> None:
        """Read again what was read, for the prompts of which that is in no log."""
        left = set(kept["open"]) - done
        for event in tape.again(kept["tape"]):
            if isinstance(event, PromptReceived) and event.offset in left:
                deal.put(event)

    def _crew(self, began: float) -> Crew:
        threads = self.config.threads or 1
        config = self.config.with_overrides({"threads": threads})
        setup = WorkerSetup(config, self._uri, Path.cwd(), began)
        cpus = 0 if self._address == LOCAL else threads  # on one machine as many as were asked for, cores or not
        gpus = 0.0 if config.device == "cpu" else gpu_share(self._workers)
        return Crew(RayActors(), setup, self.run_folder, {"num_cpus": cpus, "num_gpus": gpus})

    def _host_of(self, found: ForLearner) -> HostSetup:
        datasets = tuple((source.dataset, spec) for source, spec in zip(self.sources, self.config.sources, strict=True))
        return HostSetup(self.config, self.run_folder, self._uri, datasets, found.piece_cost, found.probe)

    def _wanted(self) -> int:
        """The number in the run's folder; what it was before if nobody can read it as one."""
        try:
            found = int((self.run_folder / WORKERS).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return self._workers
        self._workers = max(1, found)
        return self._workers

    def _end(self, crew: Crew, stopped: bool, display: Display) -> dict[str, Any]:
        """Let the learner end, and sum up."""
        summary = write_summary(self.run_folder)
        if stopped:
            unsent = crew.end_learning("pause", UNSENT_TIMEOUT)
        else:
            pictures = of_run(self.run_folder) if self.config.publish.enabled else ()
            files = [self.run_folder / SUMMARY, self.run_folder / CONFIG, *pictures]
            unsent = crew.end_learning("end", numbers_of(summary), files, UNSENT_TIMEOUT)
        if unsent:
            display.note(f"MLflow did not take {unsent} messages; they wait in the learner's partition of the run")
        return write_summary(self.run_folder)


def _require_fit(config: Config, run_folder: Path, mirror: Mirror | None, resume: bool) -> None:
    """Refuse what cannot be run by several workers."""
    targets = Dealing.of(config).targets
    if mirror and uri_of(Path(mirror.name)):
        raise UsageError(
            f"a run with --ray must be in a folder that all machines share, got {mirror.name}; name one with --run"
        )
    if len(targets) != 1:
        raise UsageError(f"a run with --ray must have one target, got {', '.join(targets)}")
    if not resume:
        require_new(run_folder)
    elif (run_folder / MANIFEST).exists() and not partition_folders(run_folder):
        raise RunError(f"the run in {run_folder} must have begun with --ray to go on so; go on with it without")
    if config.publish.enabled:
        check_model_name(config.publish.name)
