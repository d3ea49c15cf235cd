"""The loop's side of a learner that runs in another process or on another machine."""

from collections.abc import Iterable
from typing import Protocol

from typing_extensions import override

from pipeline.learner_protocol import CompletedPrompt
from pipeline.learning.local_learner import FollowingLearner
from stages.drafting.head import AcceptanceHead
from stages.engine.models.language_model import LanguageModel
from stages.learn.training.weight_update import Weights, apply_weights
from store.events import Event


class LearnerConnection(Protocol):
    """Connection to a `LearnerService`. The thread that decodes calls both methods; neither blocks."""

    def post(self, finished: CompletedPrompt) -> None:
        """Send a completed prompt. It may be dropped when the learner is too slow, so that decoding never waits."""
        ...

    def take_new_weights(self) -> Weights | None:
        """Return the newest weights received since the last call; None if there are none."""
        ...


class RemoteLearner(FollowingLearner):
    """Posts completed prompts, and takes new weights into service between blocks. Yields no events: the other end keeps
    a log of its own, publishes, detects drift, and keeps the weights in its checkpoint.

    Args:
        adopts: whether new weights are served; without, they are only looked at from far ("shadow").
    """

    def __init__(
        self,
        connection: LearnerConnection,
        drafter: LanguageModel,
        head: AcceptanceHead,
        drafter_version: int = 0,
        head_version: int = 0,
        *,
        adopts: bool = True,
    ) -> None:
        super().__init__(drafter_version, head_version)
        self._connection, self._drafter, self._head, self._adopts = connection, drafter, head, adopts

    @override
    def on_prompt_completed(self, finished: CompletedPrompt) -> Iterable[Event]:
        self._connection.post(finished)
        return ()

    @override
    def apply_new_weights(self) -> Iterable[Event]:
        weights = self._connection.take_new_weights()
        if weights and self._adopts:
            apply_weights(weights, self._drafter, self._head)
            self._versions, self._drifts = (weights.drafter_version, weights.head_version), weights.drifts
        return ()
