"""A learner's process as a program of its own, where `multiprocessing` may start none: in a daemonic process.

`DetachedContext` has the parts of a `multiprocessing` context that `LearnerProcess` uses. The program inherits one end
of a pipe, reads its task from its standard input, and ends when that is closed: with the process that started it.
"""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import mkstemp
from typing import Any


@dataclass(frozen=True)
class FileFlag:
    """A flag that several processes see: set once a file is gone."""

    path: Path

    def set(self) -> None:
        """Set the flag. May be called again."""
        self.path.unlink(missing_ok=True)

    def is_set(self) -> bool:
        """Return whether it is set."""
        return not self.path.exists()


class DetachedProcess:
    """A function that runs in a program of its own.

    Args:
        target: found by its name there.
        args: a connection, whose end is inherited, and what can be pickled.
        name, daemon: as of `multiprocessing.Process`; not used.
    """

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], name: str, *, daemon: bool) -> None:
        self._connection: Connection = args[0]
        self._task = pickle.dumps((target, args[1:]))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the program and send it the task."""
        number = self._connection.fileno()
        command = [sys.executable, "-m", "pipeline.learner_service.detached", str(number)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(number,))
        assert self._process.stdin is not None
        self._process.stdin.write(self._task)
        self._process.stdin.flush()

    def kill(self) -> None:
        """End the program at once."""
        if self._process:
            self._process.kill()

    def join(self) -> None:
        """Wait for the end of the program."""
        if self._process:
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()


class DetachedContext:
    """Makes what a learner's process consists of; see the module."""

    Process = DetachedProcess

    def Event(self) -> FileFlag:  # noqa: N802  # as of `multiprocessing`
        """Return a flag that is not set."""
        number, path = mkstemp(prefix="omnidraft-flag-")
        os.close(number)
        return FileFlag(Path(path))

    def Pipe(self) -> tuple[Any, Any]:  # noqa: N802  # as of `multiprocessing`
        """Return the two ends of a connection."""
        return Pipe()


def main() -> None:
    """Run the task that comes on standard input, over the connection whose number is the argument."""
    target, args = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_exit_with_starter, name="starter-monitor", daemon=True).start()
    target(Connection(int(sys.argv[1])), *args)


def _exit_with_starter() -> None:
    while os.read(0, 1):  # not through `sys.stdin`, whose lock a thread must not hold when the interpreter ends
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
