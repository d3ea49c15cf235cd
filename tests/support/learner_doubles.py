"""Processes in place of the learner's: they hang, crash, or only receive. They start fast, without torch."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from store.child import Parent

RECEIVED, GO = "received", "go"  # files in the scratch folder


class Report(NamedTuple):
    """A report with the fields of the learner's."""

    handled: int
    events: tuple[()] = ()
    weights: None = None
    published: None = None


def start(double: Callable[..., None], parent: Parent, share: float, scratch: str) -> None:
    """Run a double as the learner is run: the setup comes first."""
    double(parent, parent.receive(), share, scratch)


def crash(parent: Parent, setup: Path, share: float, scratch: str) -> None:
    """Exit at once."""
    os._exit(3)


def crash_once(parent: Parent, setup: Path, share: float, scratch: str) -> None:
    """Exit after the first prompt; the second process receives prompts."""
    if not (setup / GO).exists():
        (setup / GO).touch()
        parent.receive()
        os._exit(3)
    listen(parent, setup, share, scratch)


def hang(parent: Parent, setup: Path, share: float, scratch: str) -> None:
    """Sleep forever."""
    time.sleep(10_000)


def listen(parent: Parent, setup: Path, share: float, scratch: str) -> None:
    """Receive prompts once the file `GO` exists, report their number, and write them to a file."""
    while not (setup / GO).exists():
        time.sleep(0.01)
    received: list[Any] = []
    while (message := parent.receive()) is not None:
        received.append(message)
        parent.send(Report(len(received)))
    (setup / RECEIVED).write_text(repr(received))
