"""Functions that the tests of child processes run in children. They import nothing heavy."""

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from store.child import Child, ChildCalls, ChildError, Parent
from store.errors import UsageError

LOG = logging.getLogger("omnidraft.test")


def echo(parent: Parent) -> None:
    """Return every message; end with None."""
    while (message := parent.receive()) is not None:
        parent.send(message)


def echo_once(message: str) -> object:
    """Let a child return a message."""
    child = Child(echo, name="echo")
    child.send(message)
    answer = child.receive(60.0)
    child.close()
    return answer


def hang(parent: Parent) -> None:
    """Report that it runs, and wait."""
    parent.send("running")
    time.sleep(10_000)


def ignore_all(parent: Parent) -> None:
    """Report its number once the signals of a terminal were sent to it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    parent.send(os.getpgid(0))


def fail(parent: Parent, error: BaseException) -> None:
    raise error


class UnpicklableError(Exception):
    """An error that no other process can read."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def fail_unpicklable(parent: Parent) -> None:
    """Raise an error that cannot be sent."""
    raise UnpicklableError("one", "two")


def exit_with(parent: Parent, status: int) -> None:
    os._exit(status)


def write_log(parent: Parent) -> None:
    LOG.debug("too low")
    LOG.warning("number %d", 7, extra={"unsent": 3, "path": Path("a")})
    warnings.warn("careful", stacklevel=1)
    parent.send("done")


def send_object(parent: Parent) -> None:
    """Send an object whose reading would run code."""
    parent.send(Path("a"))


def crash_after(parent: Parent, numbers: int) -> None:
    """Send some numbers and crash."""
    for number in range(numbers):
        parent.send(number)
    os._exit(3)


def read_environment(parent: Parent) -> None:
    """Send the names of the variables, and the priority."""
    parent.send((sorted(os.environ), os.nice(0)))


def make_answer(prefix: str) -> Callable[[Any], Any]:
    """Return a function that does what a request names."""

    def answer(request: tuple[str, Any]) -> Any:
        kind, value = request
        match kind:
            case "echo":
                return value
            case "pid":
                return os.getpid()
            case "loop":
                Path(value).touch()
                while True:
                    pass
            case "raise":
                raise ValueError(value)
            case "exit":
                os._exit(value)
            case "object":
                return Path(value)
        return prefix + str(value)

    return answer


def fail_to_start(reason: str) -> Callable[[Any], Any]:
    """Raise instead of returning a function."""
    raise UsageError(reason)


def start_another(parent: Parent) -> None:
    """Start two children, report their numbers, and wait."""
    child, calls = Child(hang, name="inner"), ChildCalls(make_answer, "", name="inner-calls")
    child.receive()
    parent.send((child.pid, calls.call(("pid", None), 60.0)))
    try:
        calls.call(("loop", os.devnull), 10_000.0)
    except ChildError:
        time.sleep(10_000)
