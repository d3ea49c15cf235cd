"""What the process that deals prompts hears of workers and of the learner."""

from dataclasses import dataclass
from typing import Any

from pipeline.scale_learner import Told
from pipeline.scale_worker import ForLearner, Report
from stages.snapshot import Json

Ref = Any  # of an object that is or will be somewhere in the cluster


class GoneError(Exception):
    """What was asked for went with a process or a machine."""


class DeadError(GoneError):
    """The actor that was to give it is dead."""


@dataclass(frozen=True)
class Up:
    """A worker is ready; its models are `known_by` this."""

    worker: str
    known_by: Json


@dataclass(frozen=True)
class Reported:
    """A worker says what became of prompts; if it `left`, all of it is committed, and that was its end."""

    worker: str
    report: Report
    left: bool


@dataclass(frozen=True)
class Lost:
    """A worker or the learner is gone, with all that was on its way to it and from it."""

    name: str
    reason: str


Message = Up | Reported | Lost | ForLearner | Told
