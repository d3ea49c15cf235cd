"""A coach that stands somewhere else: in another process, or on another machine."""

from collections.abc import Iterator
from typing import Protocol

from pipeline.coach import Finished
from stages.head import AcceptanceHead
from stages.language_model import LanguageModel
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from stages.weights import Weights, put_into_service
from store.events import Event, PromptCompleted


class Link(Protocol):
    """The way to a `LearnerHost`. Both methods are called by the thread that decodes and return at once."""

    def post(self, finished: Finished) -> None:
        """Send a completed prompt. Whether it arrives is not promised: learning may fall behind, decoding may not."""
        ...

    def news(self) -> Weights | None:
        """The newest weights, if any came since the last call."""
        ...


class RemoteCoach:
    """Posts completed prompts, and takes new weights into service between blocks. Yields no events: the other end keeps
    a log of its own.

    Args:
        link: the way there.
        drafter, head: in service here.
        drafter_version, head_version: of what is in service here.
        adopts: whether new weights are served; without, they are only looked at from far ("shadow").
    """

    def __init__(
        self,
        link: Link,
        drafter: LanguageModel,
        head: AcceptanceHead,
        drafter_version: int = 0,
        head_version: int = 0,
        *,
        adopts: bool = True,
    ) -> None:
        self._link, self._drafter, self._head, self._adopts = link, drafter, head, adopts
        self.drafter_version, self.head_version = drafter_version, head_version
        self.busy = False

    def floor(self) -> Iterator[Event]:
        """The other end publishes it."""
        return iter(())

    def completed(self, finished: Finished) -> Iterator[Event]:
        """Post it."""
        self._link.post(finished)
        return iter(())

    def news(self) -> Iterator[Event]:
        """Serve what has come."""
        weights = self._link.news()
        if weights and self._adopts:
            put_into_service(weights, self._drafter, self._head)
            self.drafter_version, self.head_version = weights.drafter_version, weights.head_version
        return iter(())

    def end(self) -> Iterator[Event]:
        """The other end learns on."""
        return iter(())

    def wait(self) -> bool:
        """Nothing is computed here."""
        return False

    def save(self, keep: SnapshotWriter) -> Json:
        """See `Coach`. Which versions are in service; their weights are in the checkpoint of the other end."""
        return {"versions": [self.drafter_version, self.head_version]}

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `Coach`. What is in service was said when it was made."""

    def watch_again(self, completed: PromptCompleted) -> None:
        """The other end watches."""
