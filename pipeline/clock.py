"""The clock of a run, which continues from a checkpoint when the run is resumed."""

from collections.abc import Callable


class Clock:
    """Seconds that a run has been running, summed over its resumptions."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds, self._began = seconds, seconds()

    def __call__(self) -> float:
        """Return the elapsed time in seconds."""
        return self._seconds() - self._began

    def resume(self, elapsed: float) -> None:
        """Set the elapsed time to that of a checkpoint, in seconds."""
        self._began = self._seconds() - elapsed
