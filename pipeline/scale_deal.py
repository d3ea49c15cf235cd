"""Which prompt is with which worker: every one is logged once, whoever dies.

A prompt is *waiting*, then *held* by one worker until that worker has committed it. When a worker is lost, what it had
committed counts, and the rest waits again.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable

from store.events import PromptReceived


class Deal:
    """The prompts that were taken from the sources and are not yet committed."""

    def __init__(self) -> None:
        self._waiting: deque[PromptReceived] = deque()
        self._held: dict[str, dict[int, PromptReceived]] = defaultdict(dict)  # by worker and offset
        self._completed: dict[str, set[int]] = defaultdict(set)  # of those, what is decoded but not committed

    def put(self, prompt: PromptReceived) -> None:
        """One more from the sources."""
        self._waiting.append(prompt)

    @property
    def waiting(self) -> int:
        """Prompts that no worker has."""
        return len(self._waiting)

    def give(self, worker: str, most: int) -> list[PromptReceived]:
        """At most so many that wait, oldest first, now held by this worker."""
        given = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        self._held[worker].update((prompt.offset, prompt) for prompt in given)
        return given

    def open_at(self, worker: str) -> int:
        """Prompts that this worker holds and has not decoded."""
        return len(self._held[worker]) - len(self._completed[worker])

    def holds(self, worker: str) -> bool:
        """Whether this worker has prompts that are not settled."""
        return bool(self._held[worker])

    def completed(self, worker: str, offsets: Iterable[int]) -> None:
        """It has decoded them."""
        self._completed[worker].update(offsets)

    def settled(self, worker: str, offsets: Iterable[int]) -> None:
        """They are committed in its log, or were refused: nobody need look at them again."""
        for offset in offsets:
            self._held[worker].pop(offset, None)
            self._completed[worker].discard(offset)

    def lost(self, worker: str, committed: Collection[int]) -> int:
        """The worker is gone, and this is what its log holds. Returns how many of its prompts wait again."""
        held = self._held.pop(worker, {})
        self._completed.pop(worker, None)
        again = [prompt for offset, prompt in held.items() if offset not in committed]
        self._waiting = deque(sorted([*again, *self._waiting], key=_offset))
        return len(again)

    @property
    def to_decode(self) -> int:
        """Prompts that wait or are held and not decoded."""
        return len(self._waiting) + sum(map(self.open_at, list(self._held)))

    @property
    def offsets(self) -> list[int]:
        """Of all that are not settled, in stream order."""
        held = [offset for prompts in self._held.values() for offset in prompts]
        return sorted([prompt.offset for prompt in self._waiting] + held)


def _offset(prompt: PromptReceived) -> int:
    return prompt.offset
