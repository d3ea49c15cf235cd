"""What is done about a drift: begin the head anew, take back an earlier version, or nothing."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Protocol

from stages.blocks import Lesson
from stages.distill import Distill
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from store.events import Drifted, Event, Recalled

RECENT = 32  # lessons kept to score versions on


class Answer(Protocol):
    """Called by the lane in stream order."""

    def note(self, lesson: Lesson) -> None:
        """A prompt was completed. Called before it is learned from and before a drift that it brings to light."""
        ...

    def to(self, drifted: Drifted) -> Iterator[Event]:
        """A fall was noticed and is to be acted upon."""
        ...

    def save(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`."""
        ...

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        ...


class _WithoutState:
    """For answers that keep nothing."""

    def save(self, keep: SnapshotWriter) -> Json:
        """Nothing to keep."""
        return None

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """Nothing was kept."""


class NoAnswer(_WithoutState):
    """Let the drift be: the drafter goes on learning as before."""

    def note(self, lesson: Lesson) -> None:
        """Nothing to keep."""

    def to(self, drifted: Drifted) -> Iterator[Event]:
        """Nothing."""
        return iter(())


class Restart(_WithoutState):
    """Begin the head anew and let learning start at its shortest interval again.

    Args:
        restart: does it, and returns an update that was under way and is dropped.
    """

    def __init__(self, restart: Callable[[], Iterable[Event]]) -> None:
        self._restart = restart

    def note(self, lesson: Lesson) -> None:
        """Nothing to keep."""

    def to(self, drifted: Drifted) -> Iterator[Event]:
        """No event beside the drift's own, but for a dropped update."""
        yield from self._restart()


@dataclass(frozen=True)
class Shelf:
    """Where earlier versions lie and how they are read.

    Attributes:
        folders: number and folder of this target's versions, oldest first.
        read: what `DrafterTrainer.adopt` takes, of a version's folder.
        read_head: puts a version's head into service.
    """

    folders: Callable[[], Sequence[tuple[int, Path]]]
    read: Callable[[Path], list]
    read_head: Callable[[Path], None]


class Recall:
    """Restart, and score earlier versions on the prompts since the change: the best is taken back if it wins clearly.

    Versions are scored by what the gate measures: the acceptance to expect on the text that the target emitted.

    Args:
        distill: of the lane.
        shelf: the earlier versions.
        margin: by how much the best must beat the drafter in service.
        most: versions scored: the floor and the newest.
    """

    def __init__(self, distill: Distill, shelf: Shelf, margin: float, most: int) -> None:
        self._distill, self._shelf, self._margin, self._most = distill, shelf, margin, most
        self._recent: deque[Lesson] = deque(maxlen=RECENT)

    def note(self, lesson: Lesson) -> None:
        """Keep it for scoring."""
        self._recent.append(replace(lesson, labels=()))  # the rest holds no tensors

    def save(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`."""
        return [keep.lesson(lesson) for lesson in self._recent]

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        self._recent.extend(kept.lesson(number) for number in saved)

    def to(self, drifted: Drifted) -> Iterator[Event]:
        """Restart, then compare. No update is under way then, so that the trainer is free to score."""
        yield from self._distill.restart()
        since = [lesson for lesson in self._recent if lesson.offset >= drifted.changed_at]
        folders = list(self._shelf.folders())
        if len(folders) > self._most:
            folders = [folders[0], *folders[len(folders) - self._most + 1 :]]
        if since and folders:
            yield self._choose(drifted, since, folders)

    def _choose(self, drifted: Drifted, since: Sequence[Lesson], folders: Sequence[tuple[int, Path]]) -> Recalled:
        started = perf_counter()
        trainer = self._distill.drafter.trainer
        present = trainer.expected(None, since) or 0.0
        scores = [(trainer.expected(self._shelf.read(folder), since) or 0.0, number) for number, folder in folders]
        best, number = max(scores)  # of equals the newest
        taken = best > present + self._margin and self._take(dict(folders)[number], drifted.target)
        return Recalled(
            offset=drifted.offset,
            target=drifted.target,
            version=number if taken else None,
            candidates=len(folders),
            prompts=len(since),
            acceptance_present=present,
            acceptance_best=best,
            seconds=perf_counter() - started,
        )

    def _take(self, folder: Path, target: str) -> bool:
        """Put a version into service, unless other targets that share the weights would lose by it."""
        trainer, weights = self._distill.drafter.trainer, self._shelf.read(folder)
        if trainer.losers(weights, target):
            return False
        trainer.adopt(weights)
        self._shelf.read_head(folder)
        return True
