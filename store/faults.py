"""Places where a test may kill the process, to see that nothing is lost. Off unless the environment asks for it.

`OMNIDRAFT_FAULT="commit: before the manifest=3"` kills the process, as a power cut would, when that place is reached
for the third time. The places are named where they are: `reach("...")`.
"""

import os
import signal
from collections import Counter

VARIABLE = "OMNIDRAFT_FAULT"

_reached: Counter[str] = Counter()


def reach(place: str) -> None:
    """Nothing, or the end of the process, without any goodbye."""
    asked = os.environ.get(VARIABLE)
    if asked is None:
        return
    name, _, count = asked.rpartition("=")
    _reached[place] += 1
    if name == place and _reached[place] == int(count):
        os.kill(os.getpid(), signal.SIGKILL)
