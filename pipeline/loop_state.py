"""The loop in a checkpoint, and its clock.

Field names of the classes are stored in checkpoints and keep old words; docs/glossary.md lists the current ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipeline.learner_protocol import Epoch
from pipeline.recorder import PromptCounters
from stages.contract.snapshot import Saved


class Clock:
    """Seconds that a run has been running, summed over its resumptions.

    Args:
        seconds: a monotonic clock.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds, self._began = seconds, seconds()

    def __call__(self) -> float:
        """Return the elapsed time in seconds."""
        return self._seconds() - self._began

    def resume(self, elapsed: float) -> None:
        """Set the elapsed time to that of a checkpoint, in seconds."""
        self._began = self._seconds() - elapsed


@dataclass(frozen=True)
class InFlightState:
    """A prompt in flight in a checkpoint."""

    row: int  # number of its sequence in the checkpoint
    tally: PromptCounters  # its counters so far
    notes: Saved  # its training example so far


@dataclass(frozen=True)
class TargetRunnerState:
    """A runner in a checkpoint. Checkpoints of older releases have no epoch (see `Epoch`)."""

    flights: tuple[InFlightState, ...]
    stages: tuple[Saved, ...]
    coach: Saved
    epoch: Epoch | None = None

    @property
    def learner(self) -> Saved:
        """The state of the learner."""
        return self.coach


@dataclass(frozen=True)
class LoopState:
    """The loop in a checkpoint: elapsed seconds, and its runners by target."""

    seconds: float
    lanes: Mapping[str, TargetRunnerState]

    @property
    def runners(self) -> Mapping[str, TargetRunnerState]:
        """The runners by target."""
        return self.lanes
