"""A decode worker: runs the stages over prompts that it receives in work items. Its log is a partition.

Sequences in flight continue across work items, so that continuous batching never drains between two. The log holds
whole prompts; prompts that are not committed when a worker dies are decoded by another worker.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from logging import LogRecord
from pathlib import Path
from time import perf_counter

from typing_extensions import override

from pipeline.assembly.admission import Admission
from pipeline.assembly.loop import make_runner
from pipeline.assembly.models import fingerprints, load_models
from pipeline.assembly.probe import examples_of
from pipeline.assembly.stages import make_drafting
from pipeline.assembly.training import piece_cost
from pipeline.config.settings import Config
from pipeline.learner_protocol import CompletedPrompt
from pipeline.learning.remote_learner import LearnerConnection, RemoteLearner
from pipeline.loop import Clock, Loop
from pipeline.reports.vocab_report import PairReport, describe_pairs
from pipeline.run.context import RunContext
from stages.contract.blocks import TrainingExample
from stages.learn.training.weight_update import Weights
from stages.memory.memory_share import MemoryShare
from store.events import Event, PromptCompleted, PromptReceived, PromptRejected
from store.log.manifest import RunKind
from store.log_records import RecordQueue

WORK_SECONDS = 1.0  # longest time that a worker decodes before it reports


@dataclass(frozen=True)
class WorkerSetup:
    """The configuration of a worker; is sent to another machine."""

    config: Config  # of the run, with one target
    uri: str  # of the MLflow store, for `models:/` names
    working_folder: Path  # base of relative names of models, if the folder exists on that machine
    began: float  # wall clock, in seconds since 1970, at which the run's seconds were 0
    log_level: int | None = None  # lowest level of the log records in reports; None leaves logging as it is


@dataclass(frozen=True)
class TargetInfo:
    """Data on the target for the learner, which does not load it."""

    # piece_cost, probe: as of `LearnerConfig`
    piece_cost: float
    probe: tuple[TrainingExample, ...]
    vocabularies: PairReport  # the report on its vocabulary and the drafter's, for the run's folder


@dataclass(frozen=True)
class WorkerReport:
    """Results of a worker's prompts since its last report."""

    completed: tuple[PromptCompleted, ...]  # without their texts
    committed: tuple[int, ...]  # offsets of completed prompts that are durable in the worker's log
    # offset and event of prompts that do not fit the models. They are in no log yet.
    refused: tuple[tuple[int, PromptRejected], ...]
    records: tuple[LogRecord, ...] = ()  # log records of its process since the last report
    memory: MemoryShare = field(default_factory=MemoryShare)  # what its memory learned since the last report


class WorkItemConnection(LearnerConnection):
    """A connection that is polled between work items: completed prompts are taken out, new weights are put in."""

    def __init__(self) -> None:
        self._posted: list[CompletedPrompt] = []
        self._new_weights: Weights | None = None

    @override
    def post(self, finished: CompletedPrompt) -> None:
        """Queue a completed prompt without its texts, which the learner does not need."""
        self._posted.append(replace(finished, prompt=_strip_texts(finished.prompt)))

    @override
    def take_new_weights(self) -> Weights | None:
        found, self._new_weights = self._new_weights, None
        return found

    def put_weights(self, weights: Weights) -> None:
        """They replace weights that were not taken yet."""
        self._new_weights = weights

    def take_completed(self) -> list[CompletedPrompt]:
        posted, self._posted = self._posted, []
        return posted


class DecodeWorker:
    """Used by one thread. Nothing is loaded before `start`. `folder` is that of its partition, with an open log."""

    def __init__(self, setup: WorkerSetup, folder: Path) -> None:
        self._setup, self._folder = setup, folder
        self._waiting, self._connection = deque[PromptReceived](), WorkItemConnection()
        self._records = RecordQueue(setup.log_level)
        self._completed: list[PromptCompleted] = []
        self._refused: list[tuple[int, PromptRejected]] = []
        self._uncommitted: list[int] = []  # offsets of completed prompts that are in no commit yet
        self._committing: list[int] = []  # offsets in a commit that may not be durable yet

    def start(self) -> tuple[str, str, str]:
        """Load the models. Returns their fingerprints, which must be the same on every worker of a run."""
        with suppress(OSError):
            os.chdir(self._setup.working_folder)
        config = self._setup.config
        self._run, self._exit = RunContext(self._folder, RunKind.WORKER), ExitStack()
        self._exit.enter_context(self._run.open())
        (self._models,) = load_models(config, self._setup.uri, self._folder / ".fetched")
        model_fingerprints = fingerprints(self._models)
        admission = Admission(config, self._models)
        drafting = make_drafting(config, self._models, preamble=admission.find_preamble())
        self._memory = drafting.decode.memory
        self._memory.start_sharing()
        models, clock = self._models, Clock(perf_counter)
        clock.resume(time.time() - self._setup.began)
        learner = RemoteLearner(self._connection, models.drafter, drafting.head)
        runner = make_runner(models, drafting, admission.admit, learner, clock, text=config.log.text)
        self._loop = Loop({models.name: runner}, config.router, config.batch, clock)
        self._run.commit_by(config.commit.seconds, lambda: None, self._on_event, text=config.log.text)
        return model_fingerprints

    def describe_target(self) -> TargetInfo:
        """Describe the target for the learner. Called before the first work item."""
        config = self._setup.config
        (vocabularies,) = describe_pairs([self._models])
        probe = tuple(examples_of(config, self._models)) if config.publish.enabled else ()
        return TargetInfo(piece_cost(config.draft.costs, [self._models]), probe, vocabularies)

    def work(
        self,
        prompts: Sequence[PromptReceived],
        weights: Weights | None,
        memory: MemoryShare | None = None,
        *,
        more: bool,
    ) -> tuple[WorkerReport, list[CompletedPrompt]]:
        """Take prompts and weights, and decode for a while. Returns a report on the prompts, and the completed prompts
        with their training examples.

        Args:
            prompts: to decode after those that it has.
            weights: put into service before the next block; None if there are no new ones.
            memory: what the memories of other workers learned.
            more: whether more prompts wait; it then returns as soon as the batch has space.
        """
        self._waiting.extend(prompts)
        if weights:
            self._connection.put_weights(weights)
        if memory:
            self._memory.add_share(memory)
        until = perf_counter() + WORK_SECONDS

        def pause() -> bool:
            if self._uncommitted and self._run.committer.is_due():
                self._commit()
            has_space = sum(map(len, self._loop.runners.values())) < self._setup.config.batch
            return perf_counter() >= until or (more and not self._waiting and has_space)

        offset = -1
        for event in self._loop.until_idle(self._take_prompts(), pause):
            if isinstance(event, PromptReceived):
                offset = event.offset
            elif isinstance(event, PromptRejected):
                self._refused.append((offset, event))
            else:
                self._run.events.take([event])
        return self._take_report(), self._connection.take_completed()

    def _take_prompts(self) -> Iterator[PromptReceived]:
        while self._waiting:
            yield self._waiting.popleft()

    def finish(self) -> WorkerReport:
        """Commit the completed prompts and end. Sequences in flight were never logged."""
        self._committing, self._uncommitted = [*self._committing, *self._uncommitted], []
        self._run.finish()
        return self._take_report()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, PromptCompleted):
            self._completed.append(_strip_texts(event))
            self._uncommitted.append(event.offset)

    def _commit(self) -> None:
        """Called while no other commit is pending."""
        self._committing, self._uncommitted = [*self._committing, *self._uncommitted], []
        self._run.commit()

    def _take_report(self) -> WorkerReport:
        committed: list[int] = []
        if not self._run.log.committing:
            committed, self._committing = self._committing, []
        completed, self._completed = self._completed, []
        refused, self._refused = self._refused, []
        lists = tuple(completed), tuple(committed), tuple(refused)
        return WorkerReport(*lists, self._records.drain(), self._memory.take_share())


def _strip_texts(prompt: PromptCompleted) -> PromptCompleted:
    return replace(prompt, prompt_text="", completion_text="")
