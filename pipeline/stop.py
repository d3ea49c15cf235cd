"""Ending a run early: the first signal asks, the second interrupts."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Stop:
    """Whether the user wants the run to end.

    Attributes:
        asked: the first signal came; the run ends behind the blocks that are under way.
        waiting: the run waits for its source, so that a signal may interrupt at once.
    """

    asked: bool = False
    waiting: bool = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """A signal's handler. The second signal interrupts whatever goes on."""
        again, self.asked = self.asked, True
        if again or self.waiting:
            raise KeyboardInterrupt

    def until(self, events: Iterator[T]) -> Iterator[T]:
        """The events of a source that may keep us waiting, up to the signal."""
        while True:
            try:
                self.waiting = True
                event = None if self.asked else next(events, None)
                self.waiting = False
            except KeyboardInterrupt:
                self.waiting = False
                return
            if event is None:
                return
            yield event


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Ctrl-C and SIGTERM ask the stream to end; a second one interrupts at once."""
    stop = Stop()
    before = {number: signal.signal(number, stop.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
