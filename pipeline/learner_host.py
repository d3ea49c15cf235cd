"""The other end of a `RemoteCoach`: one drafter that learns from the completed prompts of one or many loops.

It has models of its own (the drafter; of the target only the vocabulary), a partition of the run's log for updates,
drifts and versions, and a checkpoint there. An update is committed before its weights are handed out: so every version
that a decision names is in the log, whoever dies.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline.build_cache import make_cache
from pipeline.build_coach import Shelving, make_coach
from pipeline.build_learning import make_distills
from pipeline.build_models import load_drafter_models
from pipeline.build_stages import make_head
from pipeline.coach import Finished
from pipeline.committing import Committer, last_snapshot
from pipeline.config import Config
from pipeline.curves import Curves
from pipeline.probe import probe_of
from pipeline.publish import Numbers
from pipeline.registering import open_registry
from pipeline.run_folder import SPOOL
from stages.blocks import Lesson
from stages.distill import weights_in
from stages.huggingface import set_threads
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from stages.translate import remember
from stages.trie import trie_of_direct_maps
from stages.weights import Weights, taken_out
from store.checkpoint import read_checkpoint
from store.committed import completed_prompts
from store.events import Event, PromptCompleted, VersionPublished
from store.lock import RunLock
from store.log import RunLog
from store.manifest import MANIFEST, read_manifest
from store.object_store_mirror import mirror_of
from store.partitions import LEARNER, open_partition, partition_folder

WATCHED_AGAIN = 4096  # newest prompts that the drift watch is shown again when the host goes on


@dataclass(frozen=True)
class HostSetup:
    """What a host is made of; crosses to another process.

    Attributes:
        config: of the run; learning is enabled, and there is one target.
        run_folder: of the run; versions go there, the log to its partition `learner`, which may be there already.
        uri: of the MLflow store.
        datasets: name and source of each, for MLflow.
        piece_cost: see `build_learning.piece_cost`; the target that it depends on is not at the host.
        probe: the target's lessons on the probe's prompts; none measures nothing.
        uri_of_run: where the run is on an object store, if it is on one.
    """

    config: Config
    run_folder: Path
    uri: str
    datasets: tuple[tuple[str, str], ...]
    piece_cost: float
    probe: tuple[Lesson, ...]
    uri_of_run: str | None = None


@dataclass(frozen=True)
class Past:
    """What a learner had committed.

    Attributes:
        weights: in service there.
        next_offset: behind all prompts that it knows of; some of them may have died with who decoded them.
        published: number of its newest version.
    """

    weights: Weights
    next_offset: int
    published: int | None


def past_of(run_folder: Path) -> Past | None:
    """Of the run's learner; None if there was none. Called before it goes on."""
    folder = partition_folder(run_folder, LEARNER)
    kept = last_snapshot(folder)
    if kept is None:
        return None
    parts = [part for of_table in read_manifest(folder).tables.values() for part in of_table]
    known = [*kept.state["seen"], *(part.last_offset for part in parts)]
    weights = weights_in(kept.state["coach"]["distill"], kept)
    return Past(weights, max(known, default=-1) + 1, kept.state["published"])


class LearnerHost:
    """Learns from completed prompts in the order in which they arrive. Used by one thread. A context manager; leaving
    it without `end` leaves what can be gone on with.

    Args:
        setup: what it is made of.
        notice: is told what the user should know.
        breathe: called between the parts of an update, to keep within a budget of time.
    """

    def __init__(
        self, setup: HostSetup, notice: Callable[[str], None] = print, breathe: Callable[[], None] = lambda: None
    ) -> None:
        self._exit, self._setup = ExitStack(), setup
        self._folder = partition_folder(setup.run_folder, LEARNER)
        self._exit.enter_context(RunLock(self._folder))
        self._mirror = mirror_of(setup.run_folder, setup.uri_of_run).partition(LEARNER)
        self._mirror.pull()
        begun = (self._folder / MANIFEST).exists()
        open_partition(setup.run_folder, LEARNER)
        manifest, set_apart = read_manifest(self._folder), setup.config.with_overrides({"learn.lag": 0})
        set_threads(1)
        self._registry = open_registry(
            setup.config, setup.uri, manifest, self._folder / SPOOL, setup.run_folder.name, setup.datasets
        )
        self._models = load_drafter_models(set_apart, setup.uri, setup.run_folder.parent / ".fetched")
        self._head, _ = make_head(set_apart, self._models)
        self._make_coach(set_apart, notice, breathe)
        self._log = self._exit.enter_context(RunLog(self._folder, mirror=self._mirror))
        self._curves = Curves(self._registry, lambda: time.time_ns() // 1_000_000)
        self._committer = Committer(set_apart.commit, self._save, lambda: False, self._log, self._registry, rows=False)
        self._told: list[Event] = []
        self._seen: deque[int] = deque(maxlen=WATCHED_AGAIN)  # offsets, in the order of arrival
        self._published: int | None = None
        self._handed_out = (0, 0)  # versions of the drafter and the head
        self._prompts = 0  # since then
        if begun and manifest.checkpoint:
            self._go_on(SnapshotReader(read_checkpoint(self._folder, manifest.checkpoint)))
        else:
            self._take(self._coach.floor())

    def _make_coach(self, config: Config, notice: Callable[[str], None], breathe: Callable[[], None]) -> None:
        models, setup = self._models, self._setup
        sizes = len(models.pair.pieces), models.drafter.vocabulary_size
        trie = trie_of_direct_maps(models.pair.pieces, *sizes, models.drafter.device)
        self._cache = make_cache(config, models, trie, notice)
        (distill,) = make_distills(config, [models], [self._head], setup.piece_cost, breathe)
        probe: Callable[[], Mapping[str, float]] = probe_of(config, models, setup.probe) if setup.probe else dict
        shelving = Shelving(setup.run_folder, self._registry, Numbers(), probe)
        self._coach = make_coach(config, models, self._head, self._cache, distill, shelving)

    def _go_on(self, kept: SnapshotReader) -> None:
        self._coach.restore(kept.state["coach"], kept)
        kept.once(kept.state["cache"], self._cache.restore)
        self._published = kept.state["published"]
        self._seen.extend(kept.state["seen"])
        for prompt in self._logged(self._seen):
            self._coach.watch_again(prompt)
            self._curves.remember(prompt)

    def _logged(self, offsets: Collection[int]) -> list[PromptCompleted]:
        """Those of these prompts that are in the run's log, wherever they were decoded."""
        if not (self._setup.run_folder / MANIFEST).exists():
            return []
        wanted = frozenset(offsets)
        prompts = completed_prompts(self._setup.run_folder)
        logged = {prompt.offset: prompt for prompt in prompts if prompt.offset in wanted}
        return [logged[offset] for offset in offsets if offset in logged]

    def _save(self, keep: SnapshotWriter) -> Json:
        return {
            "coach": self._coach.save(keep),
            "cache": keep.once(self._cache, self._cache.save),
            "published": self._published,
            "seen": list(self._seen),
        }

    def completed(self, finished: Finished) -> None:
        """Learn from a completed prompt."""
        remember(self._cache, self._models.pair.pieces, finished.emitted)
        self._curves.add(finished.prompt)
        self._seen.append(finished.prompt.offset)
        self._take(self._coach.completed(finished))
        self._committer.completed()
        self._prompts += 1
        if self._committer.is_due():
            self._commit(wait=False)

    def news(self) -> Weights | None:
        """What is in service now, if it is worth handing out: another drafter, or a head that has learned from as many
        prompts as make an update of the drafter. It is committed then."""
        versions = (self._coach.drafter_version, self._coach.head_version)
        too_soon = versions[0] == self._handed_out[0] and self._prompts < self._setup.config.learn.interval
        if versions == self._handed_out or too_soon:
            return None
        self._commit(wait=True)
        self._handed_out, self._prompts = versions, 0
        return taken_out(self._models.drafter, self._head, *versions)

    def told(self) -> list[Event]:
        """The events since the last call: updates, drifts, recalls, versions."""
        told, self._told = self._told, []
        return told

    @property
    def published(self) -> int | None:
        """Number of the newest version."""
        return self._published

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            self._log.append(event)
            self._curves.add(event)
            self._told.append(event)
            if isinstance(event, VersionPublished):
                self._published = event.version

    def _commit(self, *, wait: bool) -> None:
        self._curves.flush()
        self._committer.commit(wait=wait)

    def end(self, summary: Mapping[str, float], artifacts: Sequence[Path], timeout: float) -> int:
        """The stream is at its end, and these are its figures: publish what is left, finish the log and MLflow's run.

        Returns:
            messages that MLflow did not take within `timeout` seconds.
        """
        self._take(self._coach.end())
        self._commit(wait=True)
        self._registry.finish(summary, artifacts)
        mark = self._registry.mark()
        self._log.finish(mark, lambda: self._registry.release(mark))
        return self._close_registry(timeout)

    def pause(self, timeout: float) -> int:
        """Commit, and leave what can be gone on with. Returns as `end`."""
        self._registry.pause()
        self._commit(wait=True)
        self._log.close()
        return self._close_registry(timeout)

    def _close_registry(self, timeout: float) -> int:
        unsent = self._registry.close(timeout)
        self._mirror.push(read_manifest(self._folder))  # with what was sent
        return unsent

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()
        self._exit.close()
