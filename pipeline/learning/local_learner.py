"""Learners in the loop's process: one that trains, and one that only detects drift."""

from collections.abc import Iterator

from typing_extensions import override

from pipeline.learner_protocol import CompletedPrompt, Epoch, Learner
from pipeline.learning.drift import DriftMonitor
from pipeline.learning.drift_response import DriftResponse
from pipeline.learning.publisher import Publisher
from stages.contract.blocks import TrainingExample
from stages.contract.snapshot import State
from stages.distill import Distill, Distiller
from stages.learn.training.drafter_trainer import DrafterTrainer
from stages.learn.training.update import Chooser
from store.events import Event, PromptCompleted


class LocalLearner(Learner):
    """Trains in the loop's process. Its methods run on the loop's thread; updates may run on a thread of their own."""

    learns_parts = True

    def __init__(self, distill: Distiller, drift: DriftMonitor, response: DriftResponse, publisher: Publisher) -> None:
        self.distill, self.publisher = distill, publisher
        self._drift, self._response = drift, response
        self._drifts = 0  # drifts that were acted upon

    @property
    @override
    def drafter_version(self) -> int:
        return self.distill.drafter_version

    @property
    @override
    def head_version(self) -> int:
        return self.distill.head_version

    @property
    @override
    def busy(self) -> bool:
        return self.distill.busy

    @property
    @override
    def epoch(self) -> Epoch:
        return Epoch(self.distill.drafter_version, self._drifts)

    @override
    def wants_example(self, offset: int) -> bool:
        return self.distill.wants_example(offset)

    @override
    def publish_baseline(self) -> Iterator[Event]:
        yield from self.publisher.publish_baseline()

    @override
    def learn_part(self, example: TrainingExample) -> Iterator[Event]:
        yield from self._response.observe(example)
        yield from self.distill.learn(example)

    @override
    def on_prompt_completed(self, finished: CompletedPrompt) -> Iterator[Event]:
        """Detect drift and respond to it, then learn, then publish a version if one is due."""
        if finished.example:
            yield from self._response.observe(finished.example)
        drifted = self._drift.observe(finished.prompt)
        if drifted:
            yield drifted
            if drifted.acted_upon:
                self._drifts += 1
                yield from self.publisher.publish_on_drift(drifted)
                yield from self._response.respond(drifted)
        if example := finished.example:
            yield from self.distill.learn(example)
        yield from self.publisher.publish_if_due(finished.prompt)

    def update_if_due(self) -> Iterator[Event]:
        """Learn what waits for an update, and publish what changed, while nothing else needs the processor."""
        yield from self.distill.update_if_due()
        yield from self.publisher.publish_idle()

    def forget(self, chosen: Chooser) -> int:
        """Forget prompts and what was learned from them in closed form. Returns the number that was found."""
        self._response.forget(chosen)
        return self.distill.drafter.forget(chosen) if isinstance(self.distill, Distill) else 0

    @property
    def trainer(self) -> DrafterTrainer | None:
        """What trains the drafter, possibly for several targets; None if nothing does."""
        return self.distill.drafter.trainer if isinstance(self.distill, Distill) else None

    @override
    def end(self) -> Iterator[Event]:
        """Apply an update that is running, end a trial of an earlier version, and publish the result."""
        yield from self.distill.end()
        yield from self._response.end()
        yield from self.publisher.end()

    @override
    def wait(self) -> bool:
        return self.distill.wait()

    @override
    def state_dict(self) -> State:
        return {
            "distill": self.distill.state_dict(),
            "response": self._response.state_dict(),
            "publisher": self.publisher.state_dict(),
            "drifts": self._drifts,
        }

    @override
    def load_state_dict(self, state: State) -> None:
        self.distill.load_state_dict(state["distill"])
        self.publisher.load_state_dict(state["publisher"])
        self._response.load_state_dict(state["response"])  # after the versions that it may read
        self._drifts = state["drifts"]

    @override
    def replay_history(self, completed: PromptCompleted) -> None:
        self._drift.observe(completed)


class FollowingLearner(Learner):
    """Base of learners that do not train: the caller applies weights and passes their versions. So its checkpoint
    only names them, and one kind of it may resume with that of another.
    """

    def __init__(self, drafter_version: int = 0, head_version: int = 0) -> None:
        self._versions, self._drifts = (drafter_version, head_version), 0

    @property
    @override
    def drafter_version(self) -> int:
        return self._versions[0]

    @property
    @override
    def head_version(self) -> int:
        return self._versions[1]

    @property
    @override
    def epoch(self) -> Epoch:
        return Epoch(self.drafter_version, self._drifts)

    @override
    def state_dict(self) -> State:
        return {"versions": self._versions}


class NoLearner(FollowingLearner):
    """Trains nothing; drift is detected and logged."""

    def __init__(self, drift: DriftMonitor, drafter_version: int = 0, head_version: int = 0) -> None:
        super().__init__(drafter_version, head_version)
        self._drift = drift

    @override
    def on_prompt_completed(self, finished: CompletedPrompt) -> Iterator[Event]:
        drifted = self._drift.observe(finished.prompt)
        if drifted:
            yield drifted

    @override
    def replay_history(self, completed: PromptCompleted) -> None:
        self._drift.observe(completed)
