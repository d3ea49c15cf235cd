"""The sink of a run's events: each goes to the log and the display, in this order."""

from collections import defaultdict
from collections.abc import Callable, Iterable

from pipeline.recorder import without_text
from store.events import BlockDone, Event, PromptCompleted, PromptRejected, TokenDecision
from store.log.run_log import RunLog


class EventSink:
    """Receives every event of a run, in order. Used by one thread.

    Args:
        text: whether the log may quote rejected source rows.
        whole: whether the log receives the events of a prompt's blocks only when it is completed. So it holds whole
            prompts only, whenever it is committed: if sequences in flight are not in the checkpoint, such a prompt is
            decoded again after a resume, and nothing of its first attempt is in the log.
    """

    def __init__(
        self,
        log: RunLog,
        show: Callable[[Event], None] = lambda event: None,
        *,
        text: bool = True,
        whole: bool = False,
    ) -> None:
        self._log, self._show, self._text, self._whole = log, show, text, whole
        self._held: dict[int, list[Event]] = defaultdict(list)  # by offset, of prompts in flight
        self.dirty = False  # whether anything was logged since the caller set it to False

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, PromptRejected) and not self._text:
                event = without_text(event)
            if self._whole and isinstance(event, TokenDecision | BlockDone):
                self._held[event.offset].append(event)
            else:
                held = self._held.pop(event.offset, []) if isinstance(event, PromptCompleted) else []
                for due in (*held, event):
                    self._log.append(due)
                self.dirty = True
            self._show(event)

    def close(self) -> None:
        """Close the log at its last commit; later events are discarded."""
        self._log.close()
