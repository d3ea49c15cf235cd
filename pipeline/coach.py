"""The coach of a lane: what follows a completed prompt.

    completed -> drift? -> distill -> version?

It stands beside the loop in one process (`LocalCoach`), or somewhere else and looks after many loops: then each has a
`RemoteCoach` (pipeline/coach_remote.py), and the other end is a `LearnerHost` (pipeline/learner_host.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.answer import Answer
from pipeline.drift import DriftWatch
from pipeline.publish import Publisher
from stages.blocks import Lesson
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from store.events import Event, PromptCompleted, Updated


@dataclass(frozen=True)
class Finished:
    """A completed prompt as the coach sees it.

    Attributes:
        prompt: the event.
        lesson: what it teaches; None where nothing is to be learned from it.
        emitted: the target tokens of its completion; none where nothing may be kept of it.
    """

    prompt: PromptCompleted
    lesson: Lesson | None
    emitted: tuple[int, ...] = ()


class Learning(Protocol):
    """Distillation whose progress is counted."""

    def __call__(self, batch: Sequence[Lesson]) -> list[tuple[Updated, ...]]:
        """Learn from finished prompts, in stream order; per lesson the updates that it brought."""
        ...

    @property
    def drafter_version(self) -> int:
        """Drafter updates served so far."""
        ...

    @property
    def head_version(self) -> int:
        """Steps and resets of the head so far."""
        ...

    @property
    def busy(self) -> bool:
        """Whether something is being computed beside decoding, which a snapshot would have to wait for."""
        ...

    def wait(self) -> bool:
        """Wait until nothing is computed beside decoding, for who must have the machine alone, and say whether anything
        was. Nothing is adopted."""
        ...

    def end(self) -> tuple[Updated, ...]:
        """Behind the last lesson: wait for an update that is under way and adopt it. May be called again."""
        ...

    def save(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`."""
        ...

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        ...


class Coach(Protocol):
    """Called by the lane, between blocks. Each method yields the events that it is to log, in order."""

    @property
    def drafter_version(self) -> int:
        """Drafter updates in service."""
        ...

    @property
    def head_version(self) -> int:
        """Steps and resets of the head in service."""
        ...

    @property
    def busy(self) -> bool:
        """As `Learning.busy`."""
        ...

    def floor(self) -> Iterator[Event]:
        """Before the first prompt."""
        ...

    def completed(self, finished: Finished) -> Iterator[Event]:
        """A prompt was completed and logged."""
        ...

    def news(self) -> Iterator[Event]:
        """Before a block: take into service what was learned elsewhere in the meantime. Never waits."""
        ...

    def end(self) -> Iterator[Event]:
        """Behind the last prompt."""
        ...

    def wait(self) -> bool:
        """As `Learning.wait`."""
        ...

    def save(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`. What the drift watch knows is in the log."""
        ...

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        ...

    def watch_again(self, completed: PromptCompleted) -> None:
        """A prompt of the log, for the drift watch to know again what it knew; what it says was said then."""
        ...


class LocalCoach:
    """In the process of the loop, on its thread.

    Args:
        distill: learns the drafter and the head that are in service.
        drift: watches the acceptance rate.
        answer: what is done about a drift.
        publisher: writes versions.
    """

    def __init__(self, distill: Learning, drift: DriftWatch, answer: Answer, publisher: Publisher) -> None:
        self.distill, self.publisher = distill, publisher
        self._drift, self._answer = drift, answer

    @property
    def drafter_version(self) -> int:
        """See `Coach`."""
        return self.distill.drafter_version

    @property
    def head_version(self) -> int:
        """See `Coach`."""
        return self.distill.head_version

    @property
    def busy(self) -> bool:
        """See `Coach`."""
        return self.distill.busy

    def floor(self) -> Iterator[Event]:
        """Publish the drafter as it was loaded."""
        yield from self.publisher.floor()

    def completed(self, finished: Finished) -> Iterator[Event]:
        """Watch for drift, learn, publish."""
        if finished.lesson:
            self._answer.note(finished.lesson)
        drifted = self._drift.observe(finished.prompt)
        if drifted:
            yield drifted
            if drifted.acted_upon:
                yield from self.publisher.at(drifted)
                yield from self._answer.to(drifted)
        for updates in self.distill([finished.lesson] if finished.lesson else []):
            yield from updates
        yield from self.publisher.after(finished.prompt)

    def news(self) -> Iterator[Event]:
        """Nothing: `completed` adopts."""
        return iter(())

    def end(self) -> Iterator[Event]:
        """Adopt what is under way and publish it."""
        yield from self.distill.end()
        yield from self.publisher.end()

    def wait(self) -> bool:
        """See `Coach`."""
        return self.distill.wait()

    def save(self, keep: SnapshotWriter) -> Json:
        """See `Coach`."""
        return {
            "distill": self.distill.save(keep),
            "answer": self._answer.save(keep),
            "publisher": self.publisher.save(),
        }

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `Coach`."""
        self.distill.restore(saved["distill"], kept)
        self._answer.restore(saved["answer"], kept)
        self.publisher.restore(saved["publisher"])

    def watch_again(self, completed: PromptCompleted) -> None:
        """See `Coach`."""
        self._drift.observe(completed)


class WatchingCoach:
    """Nobody learns: drifts are noticed, and that is all.

    Args:
        drift: watches the acceptance rate.
        drafter_version, head_version: of what is in service, for good.
    """

    busy = False

    def __init__(self, drift: DriftWatch, drafter_version: int = 0, head_version: int = 0) -> None:
        self._drift, self.drafter_version, self.head_version = drift, drafter_version, head_version

    def floor(self) -> Iterator[Event]:
        """Nothing is published."""
        return iter(())

    def completed(self, finished: Finished) -> Iterator[Event]:
        """Watch for drift."""
        drifted = self._drift.observe(finished.prompt)
        if drifted:
            yield drifted

    def news(self) -> Iterator[Event]:
        """There is none."""
        return iter(())

    def end(self) -> Iterator[Event]:
        """Nothing is under way."""
        return iter(())

    def wait(self) -> bool:
        """Nothing is computed."""
        return False

    def save(self, keep: SnapshotWriter) -> Json:
        """See `Coach`. As a `RemoteCoach`: a server may go on with another of the two."""
        return {"versions": [self.drafter_version, self.head_version]}

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `Coach`. What is in service was said when it was made."""

    def watch_again(self, completed: PromptCompleted) -> None:
        """See `Coach`."""
        self._drift.observe(completed)
