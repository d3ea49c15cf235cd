"""A share of one core for work that must not get in the way."""

import time
from collections.abc import Callable


class Budget:
    """Keeps the processor time of this process to a share of the wall time, by sleeping between pieces of work.

    Time that was not used is not saved up: each `begin` counts anew.

    Args:
        share: of one core, above 0; 1 or more never sleeps.
        used: processor seconds of the process.
        now: a monotonic clock, in seconds.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        share: float,
        used: Callable[[], float] = time.process_time,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._share, self._used_now, self._now, self._sleep = share, used, now, sleep
        self.begin()

    def begin(self) -> None:
        """Work begins after a time in which there was none."""
        self._used, self._began = self._used_now(), self._now()

    def breathe(self) -> None:
        """Between two pieces of work: sleep until the work so far is no more than the share of the time so far."""
        owed = (self._used_now() - self._used) / self._share - (self._now() - self._began)
        if owed > 0:
            self._sleep(owed)
        self.begin()
