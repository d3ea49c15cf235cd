"""What an update of the drafter is given and what comes of it."""

from dataclasses import dataclass
from typing import Any

from stages.blocks import Lesson
from stages.gate import Scores


@dataclass(frozen=True)
class Training:
    """How to train.

    Attributes:
        rate, weight_decay: AdamW's.
        steps: gradient steps of an update.
        clip: largest norm of a gradient.
        replay: lessons kept against forgetting; an update takes as many old ones as it has fresh ones.
        gate_window: held-out lessons that the gate looks at.
        gate_tolerance: by how much the candidate's expected acceptance may fall behind and still be served.
        seed: of the choice of old lessons.
    """

    rate: float
    weight_decay: float
    steps: int
    clip: float
    replay: int
    gate_window: int
    gate_tolerance: float
    seed: int


@dataclass(frozen=True)
class Step:
    """What came of an update.

    Attributes:
        loss: of the first gradient step, before learning.
        positions: taught positions of one gradient step.
        pieces: read per gradient step.
        before, after, floor: what the gate measured of the served drafter, of the candidate and of the drafter as
            loaded, over all targets' held-out lessons; None where nothing is held out, or nothing was measured.
        served: whether the candidate's weights are now in service.
        reason: why, or why not.
    """

    loss: float
    positions: int
    pieces: int
    before: float | None
    after: float | None
    floor: float | None
    served: bool
    reason: str


@dataclass(frozen=True)
class Assignment:
    """What one update learns from and is judged by. Holds no tensors."""

    lessons: tuple[Lesson, ...]
    held_out: tuple[Lesson, ...]


@dataclass(frozen=True)
class Attempt:
    """What was computed of an update.

    Attributes:
        step: what would come of it; `served` if the gate lets it pass. If not, the candidate is as before.
        scores: the candidate's, by held-out lesson.
        moments: the optimiser's state before.
    """

    step: Step
    scores: Scores
    moments: dict[str, Any]
