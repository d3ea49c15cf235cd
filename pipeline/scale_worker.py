"""A decode worker: the stages of every run, over prompts that are given to it in portions. Its log is a partition.

Rows in flight go on from portion to portion, so that continuous batching never drains between two. The log gets whole
prompts; what is not committed when a worker dies is decoded by another one.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from pipeline.admission import make_admission
from pipeline.build import make_recorder
from pipeline.build_learning import piece_cost
from pipeline.build_models import Models, load_models
from pipeline.build_stages import make_drafting
from pipeline.clock import Clock
from pipeline.coach import Finished
from pipeline.coach_remote import RemoteCoach
from pipeline.committing import Committer
from pipeline.config import Config
from pipeline.dealing import Dealing
from pipeline.lane_stages import Stages
from pipeline.loop import Lane, Loop
from pipeline.probe import lessons_of
from pipeline.whole_prompts import WholePrompts
from stages.blocks import Lesson
from stages.fingerprint import fingerprint
from stages.snapshot import Json
from stages.weights import Weights
from store.events import Event, PromptCompleted, PromptReceived, PromptRejected
from store.lock import RunLock
from store.log import RunLog
from store.registry import NoRegistry

WORK_SECONDS = 1.0  # after which a worker reports, whatever it is doing


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker is made of; crosses to another machine.

    Attributes:
        config: of the run, with one target.
        uri: of the MLflow store, for `models:/` names.
        working_folder: what relative names of models begin at, where there is such a folder.
        began: wall clock, in seconds since 1970, at which the run's seconds were 0.
    """

    config: Config
    uri: str
    working_folder: Path
    began: float


@dataclass(frozen=True)
class ForLearner:
    """What a learner must know of the target, which is not with it. See `HostSetup`."""

    piece_cost: float
    probe: tuple[Lesson, ...]


@dataclass(frozen=True)
class Report:
    """What became of prompts since the last report.

    Attributes:
        completed: without their texts.
        committed: offsets of completed prompts that the worker's log now holds for good.
        refused: offset and event of prompts that do not fit the models. They are in no log yet.
    """

    completed: tuple[PromptCompleted, ...]
    committed: tuple[int, ...]
    refused: tuple[tuple[int, PromptRejected], ...]


class PortionLink:
    """A `Link` whose other end comes by now and then: it takes what was posted and leaves what is new."""

    def __init__(self) -> None:
        self._posted: list[Finished] = []
        self._news: Weights | None = None

    def post(self, finished: Finished) -> None:
        """See `Link`. Without texts: nothing is learned from them."""
        self._posted.append(replace(finished, prompt=_without_texts(finished.prompt)))

    def news(self) -> Weights | None:
        """See `Link`."""
        found, self._news = self._news, None
        return found

    def bring(self, news: Weights) -> None:
        """Leave new weights. Those that nobody asked for yet are given up for them."""
        self._news = news

    def collect(self) -> list[Finished]:
        """Take what was posted."""
        posted, self._posted = self._posted, []
        return posted


class _Portions:
    """The stream of a worker: at its end for now when a portion is used up, and going on with the next one."""

    def __init__(self) -> None:
        self.waiting: deque[PromptReceived] = deque()

    def __iter__(self) -> Iterator[PromptReceived]:
        return self

    def __next__(self) -> PromptReceived:
        if not self.waiting:
            raise StopIteration
        return self.waiting.popleft()


class DecodeWorker:
    """Used by one thread. Nothing is loaded before `start`.

    Args:
        setup: what it is made of.
        folder: of its partition, with an open log.
    """

    def __init__(self, setup: WorkerSetup, folder: Path) -> None:
        self._setup, self._folder = setup, folder
        self._portions, self._whole, self._link = _Portions(), WholePrompts(), PortionLink()
        self._completed: list[PromptCompleted] = []
        self._refused: list[tuple[int, PromptRejected]] = []
        self._uncovered: list[int] = []  # completed, and in no commit yet
        self._covered: list[int] = []  # in a commit that may still be on its way to the disk

    def start(self) -> Json:
        """Load everything. Returns what the models are known by: the same on every worker of a run.

        Raises:
            OmnidraftError: see `load_models`.
            RunError: the partition is not open any more.
        """
        with suppress(OSError):
            os.chdir(self._setup.working_folder)
        config = self._setup.config
        RunLock(self._folder).take()
        (self._models,) = load_models(config, self._setup.uri, self._folder / ".fetched")
        known_by = [fingerprint(self._models.target), fingerprint(self._models.drafter), self._models.pair.digest]
        self._loop = _loop_of(config, self._models, self._link, self._setup.began)
        self._log = RunLog(self._folder)
        self._committer = Committer(
            config.commit, lambda keep: None, lambda: False, self._log, NoRegistry(), rows=False
        )
        return known_by

    def for_learner(self) -> ForLearner:
        """What the learner must know of the target. Called before the first portion."""
        config = self._setup.config
        probed = config.publish.enabled and config.publish.probe
        return ForLearner(piece_cost(config, [self._models]), tuple(lessons_of(config, self._models)) if probed else ())

    def work(
        self, prompts: Sequence[PromptReceived], news: Weights | None, *, more: bool
    ) -> tuple[Report, list[Finished]]:
        """Take prompts and weights, and decode for a while.

        Args:
            prompts: to be decoded behind those it has.
            news: to be served from the next block on, if any came.
            more: whether more prompts wait for it; it then returns as soon as it has room for them.

        Returns:
            what became of prompts, and those that were completed, with what they teach.
        """
        self._portions.waiting.extend(prompts)
        if news:
            self._link.bring(news)
        until = perf_counter() + WORK_SECONDS

        def pause() -> bool:
            if self._uncovered and self._committer.is_due():
                self._commit()
            return perf_counter() >= until or (more and self._has_room())

        offset = -1
        for event in self._whole(self._loop.until_idle(self._portions, pause)):
            if isinstance(event, PromptReceived):
                offset = event.offset
            elif isinstance(event, PromptRejected):
                self._refused.append((offset, event))
            else:
                self._take(event)
        return self._report(), self._link.collect()

    def leave(self) -> Report:
        """The end: commit what is completed. What is in flight was never logged."""
        self._covered, self._uncovered = [*self._covered, *self._uncovered], []
        self._log.finish()
        return self._report()

    def _has_room(self) -> bool:
        return not self._portions.waiting and sum(map(len, self._loop.lanes.values())) < self._setup.config.batch

    def _take(self, event: Event) -> None:
        self._log.append(event)
        if isinstance(event, PromptCompleted):
            self._completed.append(_without_texts(event))
            self._uncovered.append(event.offset)
            self._committer.completed()

    def _commit(self) -> None:
        """Called while no other commit is on its way."""
        self._covered, self._uncovered = [*self._covered, *self._uncovered], []
        self._committer.commit()

    def _report(self) -> Report:
        committed: list[int] = []
        if not self._log.committing:
            committed, self._covered = self._covered, []
        completed, self._completed = self._completed, []
        refused, self._refused = self._refused, []
        return Report(tuple(completed), tuple(committed), tuple(refused))


def _loop_of(config: Config, models: Models, link: PortionLink, began: float) -> Loop:
    """As `build_loop`, with a coach that stands elsewhere."""
    drafting = make_drafting(config, models, lambda told: None)
    clock = Clock(perf_counter)
    clock.go_on(time.time() - began)
    lane = Lane(
        models.name,
        Stages(drafting.decode, drafting.translate, drafting.verify),
        make_admission(config, models),
        make_recorder(config, models),
        RemoteCoach(link, models.drafter, drafting.head),
        clock,
    )
    return Loop({models.name: lane}, Dealing.of(config), config.batch, clock)


def _without_texts(prompt: PromptCompleted) -> PromptCompleted:
    return replace(prompt, prompt_text="", completion_text="")
