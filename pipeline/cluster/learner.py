"""The learner of a run with several workers: a `LearnerService` that receives completed prompts in work items."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from logging import LogRecord
from pathlib import Path
from time import perf_counter

from pipeline.learner_protocol import CompletedPrompt
from pipeline.learner_service.service import LearnerConfig, LearnerService
from stages.learn.training.weight_update import Weights
from store.events import Event, Recalled, Updated
from store.log_records import RecordQueue

HEAD_SECONDS = 5.0  # between two broadcasts of the head alone, which changes with every prompt


@dataclass(frozen=True)
class LearnerReport:
    """The learner's report on a work item."""

    events: tuple[Event, ...]  # of its log, in order
    has_weights: bool  # whether new weights come with it
    records: tuple[LogRecord, ...] = ()  # log records of its process since the last report


class LearnerActor:
    """Used by one thread. Nothing is loaded before `start`. The arguments are as of `WorkerSetup`."""

    def __init__(self, config: LearnerConfig, working_folder: Path, log_level: int | None = None) -> None:
        self._config, self._working_folder, self._records = config, working_folder, RecordQueue(log_level)
        self._broadcast = -HEAD_SECONDS

    def start(self) -> tuple[LearnerReport, Weights | None]:
        """Load the models and resume from the last commit. Returns a first report and the weights in service."""
        with suppress(OSError):
            os.chdir(self._working_folder)
        self._service = LearnerService(self._config).__enter__()
        return self._take_report(urgent=True)

    def learn(self, work_item: Sequence[CompletedPrompt]) -> tuple[LearnerReport, Weights | None]:
        """Learn from completed prompts in the order of arrival. New weights are committed before they are returned."""
        for finished in work_item:
            self._service.on_prompt_completed(finished)
        return self._take_report(urgent=False)

    def _take_report(self, *, urgent: bool) -> tuple[LearnerReport, Weights | None]:
        events = tuple(self._service.drain_events())
        urgent = urgent or any(map(_changes_the_drafter, events)) or perf_counter() - self._broadcast >= HEAD_SECONDS
        weights = self._service.take_new_weights() if urgent else None
        if weights:
            self._broadcast = perf_counter()
        return LearnerReport(events, weights is not None, self._records.drain()), weights

    def end(self, timeout: float) -> bool:
        return self._service.end(timeout)

    def pause(self, timeout: float) -> bool:
        return self._service.pause(timeout)


def _changes_the_drafter(event: Event) -> bool:
    return (isinstance(event, Updated) and event.part == "drafter" and event.served) or (
        isinstance(event, Recalled) and event.version is not None
    )
