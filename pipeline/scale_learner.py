"""The learner of a run with several workers: a `LearnerHost` that is handed completed prompts in portions."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from pipeline.coach import Finished
from pipeline.learner_host import HostSetup, LearnerHost
from stages.weights import Weights
from store.events import Event, Recalled, Updated

HEAD_SECONDS = 5.0  # between two broadcasts for the head alone, which changes with every prompt


@dataclass(frozen=True)
class Told:
    """What the learner says of a portion.

    Attributes:
        events: of its log, in order.
        news: whether new weights come with it.
    """

    events: tuple[Event, ...]
    news: bool


class Learner:
    """Used by one thread. Nothing is loaded before `start`.

    Args:
        setup: of the host.
        working_folder: what relative names of models begin at, where there is such a folder.
    """

    def __init__(self, setup: HostSetup, working_folder: Path) -> None:
        self._setup, self._working_folder = setup, working_folder
        self._broadcast = -HEAD_SECONDS

    def start(self) -> tuple[Told, Weights | None]:
        """Load everything, go on from the last commit, and say what is in service there.

        Raises:
            RunError: another learner is still at work on the run.
        """
        with suppress(OSError):
            os.chdir(self._working_folder)
        self._host = LearnerHost(self._setup, lambda told: None).__enter__()
        return self._told(urgent=True)

    def learn(self, portion: Sequence[Finished]) -> tuple[Told, Weights | None]:
        """Completed prompts, in the order of arrival. New weights are committed before they are returned."""
        for finished in portion:
            self._host.completed(finished)
        return self._told(urgent=False)

    def _told(self, *, urgent: bool) -> tuple[Told, Weights | None]:
        events = tuple(self._host.told())
        urgent = urgent or any(map(_changes_the_drafter, events)) or perf_counter() - self._broadcast >= HEAD_SECONDS
        weights = self._host.news() if urgent else None
        if weights:
            self._broadcast = perf_counter()
        return Told(events, weights is not None), weights

    def end(self, summary: Mapping[str, float], artifacts: Sequence[Path], timeout: float) -> int:
        """See `LearnerHost.end`."""
        return self._host.end(summary, artifacts, timeout)

    def pause(self, timeout: float) -> int:
        """See `LearnerHost.pause`."""
        return self._host.pause(timeout)


def _changes_the_drafter(event: Event) -> bool:
    return (isinstance(event, Updated) and event.part == "drafter" and event.served) or (
        isinstance(event, Recalled) and event.version is not None
    )
