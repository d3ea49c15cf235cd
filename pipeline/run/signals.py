"""Early end of a run by signals: the first requests a stop, the second interrupts."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Stop:
    """A request to stop the run."""

    requested: bool = False  # the first signal came; the run ends after the current block
    waiting: bool = False  # the run waits for its source, so that a signal may interrupt at once

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. The second one raises KeyboardInterrupt."""
        again, self.requested = self.requested, True
        if again or self.waiting:
            raise KeyboardInterrupt

    def take_until_signal(self, events: Iterator[T]) -> Iterator[T]:
        """Yield the events of a source that may block, until a stop is requested."""
        while True:
            try:
                self.waiting = True
                event = None if self.requested else next(events, None)
                self.waiting = False
            except KeyboardInterrupt:
                self.waiting = False
                return
            if event is None:
                return
            yield event


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Install handlers: Ctrl-C and SIGTERM request a stop, a second one interrupts at once.

    Signals reach the main thread alone: on any other thread no handler is installed, and the stream runs to its end.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.handle_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
