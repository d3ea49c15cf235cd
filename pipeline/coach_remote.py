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
        adopts: whether new weights are served; without, they are only looked at from far ("shadow").
    """

    def __init__(self, link: Link, drafter: LanguageModel, head: AcceptanceHead, *, adopts: bool = True) -> None:
        self._link, self._drafter, self._head, self._adopts = link, drafter, head, adopts
        self.drafter_version = self.head_version = 0
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
        """Nothing: the other end has a checkpoint, and sends what is newest when it begins."""
        return None

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """Nothing was kept."""

    def watch_again(self, completed: PromptCompleted) -> None:
        """The other end watches."""
