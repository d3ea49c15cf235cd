"""The interface between a `TargetRunner` and its learner.

    completed -> drift? -> distill -> version?

A learner runs in the loop's process (`LocalLearner`), or elsewhere and serves several loops: then each loop has a
`RemoteLearner`, connected to one `LearnerService`. Methods that return an iterable of events do their work while it is
consumed; the events are those to be logged, in order.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from stages.contract.blocks import TrainingExample
from stages.contract.snapshot import State
from store.events import Event, PromptCompleted


@dataclass(frozen=True)
class CompletedPrompt:
    """A completed prompt as the learner receives it."""

    prompt: PromptCompleted  # the event
    example: TrainingExample | None  # its training example; None if nothing may be learned from it
    emitted: tuple[int, ...] = ()  # target tokens of its completion; empty if its text must not be kept


class Epoch(NamedTuple):
    """Changes whenever a pause of drafting must end and the drafter be tried again."""

    drafter_version: int  # updates in service; changes when an update is applied or an earlier version is restored
    drifts: int  # drifts that were acted upon; each resets the acceptance head


class Learner(ABC):
    """What a `TargetRunner` calls, between blocks only. Defaults are of one that computes and keeps nothing."""

    @property
    @abstractmethod
    def drafter_version(self) -> int:
        """Drafter updates in service."""

    @property
    @abstractmethod
    def head_version(self) -> int:
        """Gradient steps and resets of the head in service."""

    @property
    @abstractmethod
    def epoch(self) -> Epoch:
        """Epoch of the weights in service."""

    @abstractmethod
    def on_prompt_completed(self, finished: CompletedPrompt) -> Iterable[Event]:
        """Process a prompt that was completed and logged."""

    learns_parts = False  # whether `learn_part` is to be called; else an example has the whole answer

    def learn_part(self, example: TrainingExample) -> Iterable[Event]:
        """Learn from a part of an answer that goes on. Its last part comes with the completed prompt."""
        return ()

    def wants_example(self, offset: int) -> bool:
        """Return whether the soft targets of a prompt that is admitted now, at this offset, are to be recorded."""
        return True

    def apply_new_weights(self) -> Iterable[Event]:
        """Apply weights that were learned elsewhere since the last block. Called before every block; never blocks."""
        return ()

    @property
    def busy(self) -> bool:
        """Whether an update is being computed in parallel with decoding; a snapshot would have to wait for it."""
        return False

    def publish_baseline(self) -> Iterable[Event]:
        """Publish the drafter as it was loaded. Called before the first prompt."""
        return ()

    def end(self) -> Iterable[Event]:
        """Apply and publish what is left after the last prompt. May be called again."""
        return ()

    def wait(self) -> bool:
        """Block until no background update is running, and return whether one was. Nothing is applied.

        For callers that need exclusive use of the CPU.
        """
        return False

    def state_dict(self) -> State:
        """Return the state for a checkpoint. The state of the drift detector is not in it; see `replay_history`."""
        return None

    def load_state_dict(self, state: State) -> None:  # noqa: B027 (nothing to load)
        """Continue from a state."""

    def replay_history(self, completed: PromptCompleted) -> None:  # noqa: B027 (no detector)
        """Feed a prompt of the log to the drift detector. Called after `restore`, once per logged prompt, in order."""
