"""Lessons kept against forgetting: an even sample of the whole stream in bounded memory."""

from random import Random

from stages.blocks import Lesson
from stages.snapshot import Json, SnapshotReader, SnapshotWriter, random_state


class Reservoir:
    """At any time every lesson ever added is in it with the same chance (Vitter's algorithm R).

    A queue of the newest would hold nothing of a domain that the stream left long ago.

    Args:
        size: most lessons kept; 0 keeps none.
        random: of the choices.
    """

    def __init__(self, size: int, random: Random) -> None:
        self._size, self._random = size, random
        self._kept: list[Lesson] = []
        self._seen = 0

    def add(self, lesson: Lesson) -> None:
        """Keep it, perhaps in another's place."""
        self._seen += 1
        if len(self._kept) < self._size:
            self._kept.append(lesson)
        elif (place := self._random.randrange(self._seen)) < self._size:
            self._kept[place] = lesson

    def draw(self, number: int) -> list[Lesson]:
        """Different lessons, at most so many."""
        return self._random.sample(self._kept, min(number, len(self._kept)))

    def save(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`."""
        kept = [keep.lesson(lesson) for lesson in self._kept]
        return {"kept": kept, "seen": self._seen, "random": self._random.getstate()}

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        self._kept, self._seen = [kept.lesson(number) for number in saved["kept"]], saved["seen"]
        self._random.setstate(random_state(saved["random"]))
