"""The gate: an update is served only if no target's held-out lessons say that acceptance would fall."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from stages.blocks import Lesson
from stages.language_model import LanguageModel
from stages.snapshot import Json, SnapshotReader, SnapshotWriter

Score = tuple[float, int]  # sum of the measure over a lesson's positions, and their number
Scores = dict[Lesson, Score]


def mean(scores: Iterable[Score]) -> float | None:
    """Per position; None where there is none."""
    known = list(scores)
    count = sum(number for _, number in known)
    return sum(total for total, _ in known) / count if count else None


def falls(totals: Sequence[tuple[float, int, float]], tolerance: float) -> bool:
    """Whether the second totals lie clearly below the first: by more than the tolerance plus one standard error.

    The error is that of the lessons' own differences. Without it, single lessons at the beginning of a stream refuse
    good updates. Fewer than three lessons tell nothing.

    Args:
        totals: per lesson its first total, its number of positions, its second total.
        tolerance: as a share of the positions.
    """
    lessons, positions = len(totals), sum(number for _, number, _ in totals)
    if lessons < 3 or not positions:
        return False
    fall = sum(first - second for first, _, second in totals) / positions
    squares = sum((first - second - fall * number) ** 2 for first, number, second in totals)
    error = math.sqrt(squares * lessons / (lessons - 1)) / positions
    return not fall <= tolerance + error  # also where it is not finite


class Gate:
    """Held-out lessons per target, and what they say of two sets of weights.

    Args:
        targets: all whose lessons may come.
        window: lessons kept per target, the newest.
        tolerance: by how much the expected acceptance may fall.
        measure: a model's scores of lessons.
    """

    def __init__(
        self,
        targets: Iterable[str],
        window: int,
        tolerance: float,
        measure: Callable[[LanguageModel, Sequence[Lesson]], Scores],
    ) -> None:
        self._held_out: dict[str, deque[Lesson]] = {target: deque(maxlen=window) for target in targets}
        self._tolerance, self._measure = tolerance, measure

    def hold_out(self, lesson: Lesson) -> None:
        """Keep a lesson; it is never trained on."""
        self._held_out[lesson.target].append(lesson)

    @property
    def held_out(self) -> tuple[Lesson, ...]:
        """All that is kept now."""
        return tuple(lesson for window in self._held_out.values() for lesson in window)

    def scores(self, model: LanguageModel, known: Scores, held_out: Sequence[Lesson]) -> Scores:
        """Scores of held-out lessons; `known` are the model's own from before, and are kept up to date."""
        for gone in known.keys() - set(held_out):
            del known[gone]
        known.update(self._measure(model, [lesson for lesson in held_out if lesson not in known]))
        return known

    def losers(self, before: Scores, after: Scores) -> list[str]:
        """Targets whose expected acceptance falls by more than the tolerance and the noise of a small window."""
        return sorted(
            target
            for target in {lesson.target for lesson in before}
            if falls(
                [(*before[lesson], after[lesson][0]) for lesson in before if lesson.target == target], self._tolerance
            )
        )

    def save(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`."""
        return {target: [keep.lesson(lesson) for lesson in window] for target, window in self._held_out.items()}

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        for target, window in self._held_out.items():
            window.clear()
            window.extend(kept.lesson(number) for number in saved[target])
