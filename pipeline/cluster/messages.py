"""Messages from the workers and the learner to the process that dispatches prompts."""

from dataclasses import dataclass

from pipeline.cluster.learner import LearnerReport
from pipeline.cluster.worker import TargetInfo, WorkerReport

Ref = object  # reference to an object that is or will be in the cluster; only the backend knows its type


class GoneError(Exception):
    """An object was lost with its process or machine."""


class DeadError(GoneError):
    """The actor that was to make the object is dead."""


@dataclass(frozen=True)
class WorkerReady:
    """A worker has loaded its models."""

    worker: str
    model_fingerprints: tuple[str, str, str]


@dataclass(frozen=True)
class WorkReported:
    """A worker's report on its prompts. In the `final` one all of them are committed, and the worker has ended."""

    worker: str
    report: WorkerReport
    final: bool


@dataclass(frozen=True)
class ActorLost:
    """A worker or the learner is lost, with all calls to it that were pending."""

    name: str
    reason: str


Message = WorkerReady | WorkReported | ActorLost | TargetInfo | LearnerReport
