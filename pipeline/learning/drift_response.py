"""Responses to drift: reset the acceptance head, also restore an earlier version, or do nothing."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from typing_extensions import override

from stages.contract.blocks import TrainingExample
from stages.contract.snapshot import Saved, SnapshotReader, SnapshotWriter
from stages.distill import Distill
from stages.training.update import Chooser
from store.events import Drifted, Event, Recalled

if TYPE_CHECKING:
    from torch import Tensor

EXAMPLES_KEPT = 32  # examples kept to score versions on


class DriftResponse:
    """The interface of responses, called by the learner in stream order. This implementation does nothing."""

    def observe(self, example: TrainingExample) -> None:
        """Receive a completed prompt, before it is learned from and before `respond` if it revealed a drift."""

    def respond(self, drifted: Drifted) -> Iterable[Event]:
        """Respond to a drop of the acceptance rate outside the cooldown."""
        return ()

    def forget(self, chosen: Chooser) -> None:
        """Drop some of the received prompts."""

    def save(self, writer: SnapshotWriter) -> Saved:
        """Return the state for a checkpoint."""
        return None

    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        """Continue from a state that `save` returned."""


class NoResponse(DriftResponse):
    """Only log the drift; the drafter continues to learn as before."""


class ResetHead(DriftResponse):
    """Reset the acceptance head and return to the shortest update interval.

    Args:
        restart: `Distiller.reset_head`. It discards an update that is running, and returns the event of that.
    """

    def __init__(self, restart: Callable[[], Iterable[Event]]) -> None:
        self._restart = restart

    @override
    def respond(self, drifted: Drifted) -> Iterator[Event]:
        """Reset the head. Yields the update that was discarded, if one was running."""
        yield from self._restart()


@dataclass(frozen=True)
class VersionSource:
    """Access to earlier versions of a target.

    Attributes:
        folders: number and folder of this target's versions, oldest first.
        read: what `DrafterTrainer.adopt` takes, of a version's folder.
        read_head: puts a version's head into service.
    """

    folders: Callable[[], Sequence[tuple[int, Path]]]
    read: Callable[[Path], "list[Tensor]"]
    read_head: Callable[[Path], None]


class Recall(DriftResponse):
    """Reset the head, then score earlier versions on the prompts since the change and restore the best if it is
    clearly better than the drafter in service.

    The score is the gate's measure: the expected acceptance on the text that the target emitted.

    Args:
        distill: of the runner.
        versions: the earlier versions.
        margin: by how much the best must beat the drafter in service.
        most: maximum number of versions scored: the baseline and the newest.
    """

    def __init__(self, distill: Distill, versions: VersionSource, margin: float, most: int) -> None:
        self._distill, self._versions, self._margin, self._most = distill, versions, margin, most
        self._recent: deque[TrainingExample] = deque(maxlen=EXAMPLES_KEPT)

    @override
    def observe(self, example: TrainingExample) -> None:
        """Keep the example for scoring."""
        self._recent.append(replace(example, labels=()))  # the rest holds no tensors

    @override
    def forget(self, chosen: Chooser) -> None:
        """Drop some of the examples."""
        kept = [example for example in self._recent if not chosen(example)]
        self._recent.clear()
        self._recent.extend(kept)

    @override
    def save(self, writer: SnapshotWriter) -> tuple[int, ...]:
        return tuple(writer.example(example) for example in self._recent)

    @override
    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        self._recent.extend(reader.example(number) for number in reader.decode(tuple[int, ...], saved))

    @override
    def respond(self, drifted: Drifted) -> Iterator[Event]:
        """Reset, then compare. The reset ends a running update, so the trainer is free to score versions."""
        yield from self._distill.reset_head()
        since = [example for example in self._recent if example.offset >= drifted.changed_at]
        folders = list(self._versions.folders())
        if len(folders) > self._most:
            folders = [folders[0], *folders[len(folders) - self._most + 1 :]]
        if since and folders:
            yield self._choose(drifted, since, folders)

    def _choose(
        self, drifted: Drifted, since: Sequence[TrainingExample], folders: Sequence[tuple[int, Path]]
    ) -> Recalled:
        started = perf_counter()
        trainer = self._distill.drafter.trainer
        present = trainer.measure_acceptance(None, since) or 0.0
        scores = [
            (trainer.measure_acceptance(self._versions.read(folder), since) or 0.0, number)
            for number, folder in folders
        ]
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
        """Restore a version, unless the acceptance of another target that shares the weights would drop."""
        trainer, weights = self._distill.drafter.trainer, self._versions.read(folder)
        if trainer.find_losers(weights, target):
            return False
        trainer.adopt(weights)
        self._versions.read_head(folder)
        return True
