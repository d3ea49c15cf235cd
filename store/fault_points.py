"""Fault points: named places where a test can kill the process. Off unless the environment variable is set.

`OMNIDRAFT_FAULT="commit: before the manifest=3"` kills the process with SIGKILL, as a power failure would, when that
place is reached for the third time. Each place is a call `fault_point("...")` with its name.
"""

import os
import signal
from collections import Counter

VARIABLE = "OMNIDRAFT_FAULT"

_reached: Counter[str] = Counter()


def fault_point(place: str) -> None:
    """Kill the process if the environment variable names this place and count; otherwise do nothing."""
    setting = os.environ.get(VARIABLE)
    if setting is None:
        return
    name, _, count = setting.rpartition("=")
    _reached[place] += 1
    if name == place and _reached[place] == int(count):
        os.kill(os.getpid(), signal.SIGKILL)
