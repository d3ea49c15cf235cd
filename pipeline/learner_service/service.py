"""The service of a `RemoteLearner`: one drafter that learns from the completed prompts of one or many loops.

It has its own models (the drafter; of the target only the vocabulary), a partition of the run's log for updates,
drifts and versions, and a checkpoint there. An update is committed before its weights are given out: so every version
that a decision names is in the log, also when a process dies.
"""

from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline.assembly.cache import make_cache
from pipeline.assembly.learner import VersionSink, make_learner
from pipeline.assembly.models import load_drafter_models
from pipeline.assembly.probe import probe_of
from pipeline.assembly.stages import make_head
from pipeline.assembly.training import make_distillers
from pipeline.config.settings import Config
from pipeline.learner_protocol import CompletedPrompt, Epoch
from pipeline.learning.publisher import Numbers
from pipeline.run.committer import last_snapshot
from pipeline.run.context import RunContext
from stages.contract.blocks import TrainingExample
from stages.contract.snapshot import State, load_state
from stages.distill import read_weights
from stages.engine.models.devices import set_threads
from stages.learn.training.probe import ProbeResult
from stages.learn.training.update import Pace
from stages.learn.training.weight_update import Weights, export_weights
from stages.ngrams.trie import build_direct_trie
from stages.translate import cache_ngrams
from stages.verification.rules import MODES
from store.events import Event, Updated, VersionPublished
from store.log.manifest import MANIFEST, PREVIOUS, RunKind, read_manifest
from store.log.partitions import LEARNER, partition_folder
from store.log.parts import completed_prompts
from store.object_store.mirror import mirror_of

REPLAYED_PROMPTS = 4096  # newest prompts that a resumed service replays to its drift detector


@dataclass(frozen=True)
class LearnerConfig:
    """The configuration of a learner service; is sent to another process."""

    config: Config  # of the run; learning is enabled, and there is one target
    run_folder: Path  # for versions, and for the log in its partition `learner`, which may exist
    uri: str  # of the MLflow store
    datasets: tuple[tuple[str, str], ...]  # name and source of each, for MLflow
    piece_cost: float  # as measured by `piece_cost` where the target is loaded
    probe: tuple[TrainingExample, ...]  # the target's, on the probe's prompts; with none nothing is measured
    uri_of_run: str | None = None  # on an object store, if it is on one


@dataclass(frozen=True)
class LearnerCheckpoint:
    """The last commit of a learner."""

    weights: Weights  # in service
    next_offset: int  # after all prompts that it received; some of these may not be in the run's log
    published: int | None  # number of its newest published version


def read_learner_checkpoint(run_folder: Path) -> LearnerCheckpoint | None:
    """Read the last commit of the run's learner; None if there is none. Called before the learner resumes."""
    folder = partition_folder(run_folder, LEARNER)
    state = last_snapshot(folder)
    if state is None:
        return None
    parts = [part for of_table in read_manifest(folder).tables.values() for part in of_table]
    after = max((*state["seen"], *(part.last_offset for part in parts)), default=-1) + 1
    return LearnerCheckpoint(read_weights(state["learner"]["distill"]), after, state["published"])


class LearnerService:
    """Learns from completed prompts in the order in which they arrive. Used by one thread. A context manager; without a
    call of `end` the run can be resumed. `pace` decides when updates compute; None for any time.
    """

    def __init__(self, setup: LearnerConfig, pace: Pace | None = None) -> None:
        self._setup, self._events = setup, list[Event]()
        self.published: int | None = None  # number of the newest published version
        self._seen: deque[int] = deque(maxlen=REPLAYED_PROMPTS)  # offsets, in the order of arrival
        self._given_out, self._epoch = (0, 0), Epoch(0, 0)  # versions of the drafter and the head; of the learner
        self._prompts = 0  # completed since weights were given out last
        self._run = RunContext(
            partition_folder(setup.run_folder, LEARNER),
            RunKind.LEARNER,
            mirror_of(setup.run_folder, setup.uri_of_run).partition(LEARNER),
        )
        with ExitStack() as undo:
            undo.enter_context(self._run.open())
            self._start(pace)
            self._exit = undo.pop_all()

    def _start(self, pace: Pace | None) -> None:
        run, setup, config = self._run, self._setup, self._setup.config
        set_threads(1)
        run.connect(config, setup.uri, setup.datasets)
        self._models = load_drafter_models(config, setup.uri, setup.run_folder.parent / ".fetched")
        self._head = make_head(self._models, config.seed)
        models = self._models
        sizes = len(models.pair.pieces), models.drafter.vocabulary_size
        trie = build_direct_trie(models.pair.pieces, *sizes, models.drafter.device)
        self._cache = make_cache(config.cache, MODES[config.draft.mode], models, trie)
        (distill,) = make_distillers(config, [models], [self._head], setup.piece_cost, pace, background=False)
        probe = probe_of(models, setup.probe, config.batch) if setup.probe else ProbeResult
        sink = VersionSink(setup.run_folder, Numbers(), probe)
        # To be changed between two prompts only.
        self.learner = make_learner(config, models, self._head, self._cache, distill, sink)
        run.commit_by(config.commit.seconds, self._save, self._on_event, text=config.log.text)
        if run.snapshot:
            self._resume(run.snapshot)
            run.snapshot = None  # its contents are restored
        else:
            run.events.take(self.learner.publish_baseline())

    def _resume(self, state: State) -> None:
        load_state(self.learner, state["learner"])
        self._cache.load_state_dict(state["cache"])
        self.published = state["published"]
        self._seen.extend(state["seen"])
        folder = self._setup.run_folder
        if any((folder / name).exists() for name in (MANIFEST, PREVIOUS)):
            wanted = frozenset(self._seen)
            logged = {prompt.offset: prompt for prompt in completed_prompts(folder) if prompt.offset in wanted}
            for offset in self._seen:
                if offset in logged:
                    self.learner.replay_history(logged[offset])

    def _save(self) -> State:
        return {
            "learner": self.learner.state_dict(),
            "cache": self._cache,
            "published": self.published,
            "seen": list(self._seen),
        }

    def on_prompt_completed(self, finished: CompletedPrompt) -> None:
        cache_ngrams(self._cache, self._models.pair.pieces, finished.emitted)
        self._seen.append(finished.prompt.offset)
        self._take(self.learner.on_prompt_completed(finished))
        self._prompts += 1
        if self._run.committer.is_due():
            self._run.commit()

    def update_if_due(self) -> None:
        """Learn what waits for an update, publish what changed, and commit. Called while no request runs."""
        self._take(self.learner.update_if_due())
        self._run.commit(wait=True)

    def _take(self, events: Iterable[Event]) -> None:
        """Log events. Decoding waits for no update of this process."""
        self._run.events.take(replace(one, waited=0.0) if isinstance(one, Updated) else one for one in events)

    def take_new_weights(self) -> Weights | None:
        """Commit and return the weights in service if they changed enough since the last call, else None.

        Enough is another drafter, a head that was reset by a drift, or one that has learned from as many prompts as
        make an update of the drafter.
        """
        versions, epoch = (self.learner.drafter_version, self.learner.head_version), self.learner.epoch
        too_soon = epoch == self._epoch and self._prompts < self._setup.config.learn.interval
        if (versions == self._given_out and epoch == self._epoch) or too_soon:
            return None
        self._run.commit(wait=True)
        self._given_out, self._epoch, self._prompts = versions, epoch, 0
        return export_weights(self._models.drafter, self._head, *versions, epoch.drifts)

    def drain_events(self) -> list[Event]:
        """Return the events since the last call: updates, drifts, recalls, versions."""
        events, self._events = self._events, []
        return events

    def _on_event(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, VersionPublished):
            self.published = event.version

    def end(self, timeout: float) -> bool:
        """Finish after the end of the stream: publish the last version and finish the log. Returns whether MLflow has
        everything after at most `timeout` seconds.
        """
        self._take(self.learner.end())
        self._run.commit(wait=True)
        self._run.finish()
        return self._run.disconnect(timeout)

    def pause(self, timeout: float) -> bool:
        """Commit and stop; the run can be resumed. Returns as `end`."""
        self._run.commit(wait=True)
        return self._run.disconnect(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()
