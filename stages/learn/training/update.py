"""An update of the drafter: its configuration, its examples, its gate and its outcome.

The gate passes an update only if the expected acceptance falls on no target's held-out examples.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from torch import Tensor

from stages.contract.blocks import TrainingExample
from stages.contract.snapshot import State, random_state
from stages.engine.models.language_model import LanguageModel
from store.events import Updated

Score = tuple[float, int]  # sum of the measure over an example's positions, and their number
Scores = dict[TrainingExample, Score]
Chooser = Callable[[TrainingExample], bool]  # of examples that are to be forgotten
# Labels of the acceptance head, by target: the features of pieces that the drafter would have drafted at the tokens of
# texts (L, F), and the probabilities of their acceptance (L,).
Lessons = Mapping[str, tuple[Tensor, Tensor]]
FEWEST = 3  # held-out examples of a target that can refuse an update


def to_lessons(saved: State) -> Lessons:
    """Return the lessons of a checkpoint."""
    return {target: (features_LF, acceptance_L) for target, (features_LF, acceptance_L) in saved.items()}


class Pace:
    """When updates may compute: here at any time, which always costs something."""

    slept = 0.0  # seconds so far

    @property
    def is_free(self) -> bool:
        """Whether nothing else needs the processor now."""
        return False

    def yield_cpu(self) -> None:
        """Sleep as long as something else needs the processor. Called between two steps of work."""


@dataclass(frozen=True)
class TrainingConfig:
    """Configuration of drafter updates."""

    # rate, weight_decay: AdamW's
    rate: float
    weight_decay: float
    steps: int  # gradient steps of an update
    clip: float  # maximum norm of a gradient
    replay: int  # size of the replay buffer; an update takes as many old examples as it has fresh ones
    gate_window: int  # held-out examples per target
    gate_tolerance: float  # largest drop in expected acceptance at which the candidate is still served
    seed: int  # of the sampling of old examples


@dataclass(frozen=True)
class Step:
    """The outcome of an update."""

    loss: float  # of the first gradient step, before the weights change
    positions: int  # supervised positions of one gradient step
    pieces: int  # input pieces of one gradient step
    # before, after, baseline: mean score of the served drafter, of the candidate and of the baseline (the drafter as
    # loaded) over all targets' held-out examples; None without held-out examples or without a measurement
    before: float | None
    after: float | None
    baseline: float | None
    served: bool  # whether the candidate's weights are now in service
    reason: str  # why they are, or are not


def make_event(
    step: Step,
    last: TrainingExample,
    loss_name: str,
    drafter_version: int,
    *,
    seconds: float,
    waited: float,
    tokens_gained: float | None = None,
) -> Updated:
    """Make the event of an update, given the last example that it trained on."""
    return Updated(
        offset=last.offset,
        target=last.target,
        part="drafter",
        loss_name=loss_name,
        loss=step.loss,
        positions=step.positions,
        acceptance_before=step.before,
        acceptance_after=step.after,
        acceptance_baseline=step.baseline,
        tokens_gained=tokens_gained,
        served=step.served,
        reason=step.reason,
        seconds=seconds,
        waited=waited,
        drafter_version=drafter_version,
        head_version=0,
    )


@dataclass(frozen=True)
class Assignment:
    """The examples that one update trains on, and those that its gate scores. Holds no tensors."""

    examples: tuple[TrainingExample, ...]
    held_out: tuple[TrainingExample, ...]


@dataclass(frozen=True)
class Attempt:
    """A computed update that is not settled yet."""

    step: Step  # its outcome; `served` if the gate passed it. If not, the candidate's weights are reset.
    scores: Scores  # those of the candidate, by held-out example
    moments: dict[str, Any]  # the optimiser's state before the update
    lessons: Lessons = field(default_factory=dict)


class Reservoir:
    """Replay buffer against forgetting: a uniform sample of the whole stream (Vitter's algorithm R).

    A queue of the newest examples would hold none of a domain that the stream left long ago.
    """

    def __init__(self, size: int, random: Random) -> None:
        self._size, self._random = size, random
        self._examples: list[TrainingExample] = []
        self._seen = 0

    def add(self, example: TrainingExample) -> None:
        """Add an example with the probability of algorithm R, in place of a random one when full."""
        self._seen += 1
        if len(self._examples) < self._size:
            self._examples.append(example)
        elif (place := self._random.randrange(self._seen)) < self._size:
            self._examples[place] = example

    @property
    def examples(self) -> tuple[TrainingExample, ...]:
        return tuple(self._examples)

    def forget(self, chosen: Chooser) -> None:
        self._examples = [example for example in self._examples if not chosen(example)]

    def sample(self, number: int) -> list[TrainingExample]:
        """Draw distinct examples, at most `number`."""
        return self._random.sample(self._examples, min(number, len(self._examples)))

    def state_dict(self) -> State:
        return {"examples": self._examples, "seen": self._seen, "random": self._random.getstate()}

    def load_state_dict(self, state: State) -> None:
        self._examples, self._seen = list(state["examples"]), state["seen"]
        self._random.setstate(random_state(state["random"]))


def mean_score(scores: Iterable[Score]) -> float | None:
    """Return the mean per position; None without positions."""
    known = list(scores)
    count = sum(number for _, number in known)
    return sum(total for total, _ in known) / count if count else None


def is_significant_fall(totals: Sequence[tuple[float, int, float]], tolerance: float) -> bool:
    """Check whether the second totals are below the first by more than the tolerance plus one standard error.

    The error is that of the differences per example. Without it, single examples at the beginning of a stream refuse
    good updates. Fewer than `FEWEST` examples are never significant.

    Args:
        totals: per example its first total, its number of positions, its second total.
    """
    examples, positions = len(totals), sum(number for _, number, _ in totals)
    if examples < FEWEST or not positions:
        return False
    fall = sum(first - second for first, _, second in totals) / positions
    squares = sum((first - second - fall * number) ** 2 for first, number, second in totals)
    error = math.sqrt(squares * examples / (examples - 1)) / positions
    return not fall <= tolerance + error  # also where it is not finite


class Gate:
    """Compares two sets of weights on held-out examples of every target."""

    def __init__(
        self,
        targets: Iterable[str],
        window: int,
        tolerance: float,
        measure: Callable[[LanguageModel, Sequence[TrainingExample]], Scores],
    ) -> None:
        self._held_out: dict[str, deque[TrainingExample]] = {target: deque(maxlen=window) for target in targets}
        self._tolerance, self._measure = tolerance, measure

    @property
    def targets(self) -> int:
        return len(self._held_out)

    def hold_out(self, example: TrainingExample) -> None:
        """Add a held-out example; it is never trained on."""
        self._held_out[example.target].append(example)

    def forget(self, chosen: Chooser) -> None:
        for window in self._held_out.values():
            kept = [example for example in window if not chosen(example)]
            window.clear()
            window.extend(kept)

    @property
    def held_out(self) -> tuple[TrainingExample, ...]:
        return tuple(example for window in self._held_out.values() for example in window)

    def update_scores(self, model: LanguageModel, known: Scores, held_out: Sequence[TrainingExample]) -> Scores:
        """Score held-out examples; `known`, the model's earlier scores, is updated in place and returned."""
        for dropped in known.keys() - set(held_out):
            del known[dropped]
        known.update(self._measure(model, [example for example in held_out if example not in known]))
        return known

    def find_losers(self, before: Scores, after: Scores, baseline: Scores | None = None) -> list[str]:
        """Return the targets whose expected acceptance falls by more than the tolerance and the noise of the window.

        With scores of the baseline, a fall below it is never taken for noise: many small ones would add up.
        """
        return sorted(
            target
            for target in {example.target for example in before}
            if self._loses([one for one in before if one.target == target], before, after, baseline)
        )

    def _loses(
        self, examples: Sequence[TrainingExample], before: Scores, after: Scores, baseline: Scores | None
    ) -> bool:
        if is_significant_fall([(*before[one], after[one][0]) for one in examples], self._tolerance):
            return True
        if baseline is None or len(examples) < FEWEST:
            return False
        least, old, new = (sum(scores[one][0] for one in examples) for scores in (baseline, before, after))
        return new < min(least, old)

    def state_dict(self) -> State:
        return {target: list(window) for target, window in self._held_out.items()}

    def load_state_dict(self, state: State) -> None:
        for target, window in self._held_out.items():
            window.clear()
            window.extend(state[target])
