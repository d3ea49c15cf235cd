"""Processes in place of the learner's: they hang, crash, or only receive. They start fast, without torch."""

import os
import pickle
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

RECEIVED, GO = "received", "go"  # files in the scratch folder


class Report(NamedTuple):
    """A report with the fields of the learner's."""

    handled: int
    events: tuple[()] = ()
    weights: None = None
    published: None = None


def crash(
    connection: Connection, setup: Path, share: float, scratch: str, unlimited: object = None, level: int = 0
) -> None:
    """Exit at once."""
    os._exit(3)


def crash_once(
    connection: Connection, setup: Path, share: float, scratch: str, unlimited: object = None, level: int = 0
) -> None:
    """Exit after the first prompt; the second process receives prompts."""
    if not (setup / GO).exists():
        (setup / GO).touch()
        connection.recv_bytes()
        os._exit(3)
    listen(connection, setup, share, scratch)


def hang(
    connection: Connection, setup: Path, share: float, scratch: str, unlimited: object = None, level: int = 0
) -> None:
    """Sleep forever."""
    time.sleep(10_000)


def listen(
    connection: Connection, setup: Path, share: float, scratch: str, unlimited: object = None, level: int = 0
) -> None:
    """Receive prompts once the file `GO` exists, report their number, and write them to a file."""
    while not (setup / GO).exists():
        time.sleep(0.01)
    received: list[Any] = []
    while message := connection.recv_bytes():
        received.append(pickle.loads(message))
        connection.send_bytes(pickle.dumps(Report(len(received))))
    (setup / RECEIVED).write_text(repr(received))
