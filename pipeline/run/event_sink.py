"""The sink of a run's events: each goes to the log and the display, in this order."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from pipeline.recorder import without_text
from store.events import BlockDone, Event, PromptCompleted, PromptRejected, TokenDecision
from store.log.run_log import RunLog


class WholePrompts:
    """Delays the events of a prompt's blocks until the prompt is completed.

    So a log holds whole prompts only, whenever it is committed. If sequences in flight are not in the checkpoint, a
    prompt that was in flight is decoded again after a resume, and nothing of its first attempt is in the log.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[Event]] = defaultdict(list)  # by offset

    def __call__(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events that are due, in order. May be called again with the events that follow."""
        for event in events:
            if isinstance(event, TokenDecision | BlockDone):
                self._held[event.offset].append(event)
                continue
            if isinstance(event, PromptCompleted):
                yield from self._held.pop(event.offset, ())
            yield event


class EventSink:
    """Receives every event of a run, in order. Used by one thread.

    Args:
        text: whether the log may quote rejected source rows.
        whole: whether the log receives the events of a prompt only when it is completed.
    """

    def __init__(
        self,
        log: RunLog,
        show: Callable[[Event], None] = lambda event: None,
        *,
        text: bool = True,
        whole: bool = False,
    ) -> None:
        self._log, self._show = log, show
        self._text, self._whole = text, WholePrompts() if whole else None
        self.dirty = False  # whether anything was logged since the caller set it to False

    def take(self, events: Iterable[Event]) -> None:
        """Consume the events, each as it happens."""
        for event in events:
            if isinstance(event, PromptRejected) and not self._text:
                event = without_text(event)
            self._keep(self._whole([event]) if self._whole else (event,))
            self._show(event)

    def _keep(self, events: Iterable[Event]) -> None:
        for event in events:
            self._log.append(event)
            self.dirty = True

    def close(self) -> None:
        """Close the log at its last commit; later events are discarded."""
        self._log.close()
