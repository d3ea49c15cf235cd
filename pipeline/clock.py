"""The time of a run, in seconds since it began."""

from collections.abc import Callable


class Clock:
    """Seconds since the run began, without those in which it did not run.

    Args:
        seconds: a monotonic clock.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds, self._began = seconds, seconds()

    def __call__(self) -> float:
        """Now."""
        return self._seconds() - self._began

    def go_on(self, elapsed: float) -> None:
        """So many seconds had passed."""
        self._began = self._seconds() - elapsed
