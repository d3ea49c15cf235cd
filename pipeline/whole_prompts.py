"""Whole prompts: what is logged of a prompt is logged when it is completed, all together.

So a log that is committed at any time holds whole prompts only. Where rows in flight are not kept over a death, a
prompt that was in flight begins anew, and nothing of its first attempt was ever logged.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from store.events import BlockDone, Event, PromptCompleted, TokenDecision


class WholePrompts:
    """Passes events on, those of a prompt's blocks when it is completed: right before its `PromptCompleted`."""

    def __init__(self) -> None:
        self._held: dict[int, list[Event]] = defaultdict(list)  # by offset

    def __call__(self, events: Iterable[Event]) -> Iterator[Event]:
        """Pass on what comes next; may be called again for what comes later."""
        for event in events:
            if isinstance(event, TokenDecision | BlockDone):
                self._held[event.offset].append(event)
                continue
            if isinstance(event, PromptCompleted):
                yield from self._held.pop(event.offset, ())
            yield event
