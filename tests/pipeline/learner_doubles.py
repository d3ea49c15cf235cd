"""Other processes in the place of the learner: they hang, die, or only listen. They begin at once: no torch."""

import os
import pickle
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

HEARD, GO = "heard", "go"  # files in the scratch folder


class Report(NamedTuple):
    """As the learner's."""

    handled: int
    told: tuple[()] = ()
    weights: None = None
    published: None = None


def dies(connection: Connection, setup: Path, share: float, scratch: str, hurry: object = None) -> None:
    """At once."""
    os._exit(3)


def dies_once(connection: Connection, setup: Path, share: float, scratch: str, hurry: object = None) -> None:
    """When it has heard one prompt; the second life listens."""
    if not (setup / GO).exists():
        (setup / GO).touch()
        connection.recv_bytes()
        os._exit(3)
    listens(connection, setup, share, scratch)


def hangs(connection: Connection, setup: Path, share: float, scratch: str, hurry: object = None) -> None:
    """For good."""
    time.sleep(10_000)


def listens(connection: Connection, setup: Path, share: float, scratch: str, hurry: object = None) -> None:
    """Writes down what it hears once it may, and reports how much that was."""
    while not (setup / GO).exists():
        time.sleep(0.01)
    heard: list[Any] = []
    while message := connection.recv_bytes():
        heard.append(pickle.loads(message))
        connection.send_bytes(pickle.dumps(Report(len(heard))))
    (setup / HEARD).write_text(repr(heard))
