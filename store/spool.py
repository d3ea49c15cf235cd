"""The file behind an outbox: messages, and what became of them.

Lines are JSON, of two kinds:

    {"id": 7, "kind": "publish", "body": {...}}                 posted
    {"ids": [7], "outcome": "delivered", "result": {...}}       what became of it ("failed" has "error" instead)

A line of any other shape, torn by a crash for example, is passed over.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store.files import sync_folder

Body = dict[str, Any]  # JSON
_POSTED: dict[str, type] = {"id": int, "kind": str, "body": dict}
_DELIVERED: dict[str, type] = {"ids": list, "result": dict}
_FAILED: dict[str, type] = {"ids": list, "error": str}


@dataclass(frozen=True)
class Message:
    """One posted line."""

    id: int  # from 0, in the order of posting
    kind: str
    body: Body


@dataclass
class Ledger:
    """What a spool file says when it is read from its start, but for the messages' bodies."""

    posted: int = 0
    next_id: int = 0
    delivered: set[int] = field(default_factory=set)
    known: Body = field(default_factory=dict)  # the results of the deliveries, merged in their order

    @classmethod
    def read(cls, path: Path) -> "Ledger":
        """Raises nothing for a missing file (an empty ledger) or a line torn by a crash (skipped)."""
        ledger = cls()
        for line in _lines(path):
            if "id" in line:
                ledger.posted, ledger.next_id = ledger.posted + 1, line["id"] + 1
            elif "result" in line:
                ledger.known.update(line["result"])
                ledger.delivered.update(line["ids"])
        return ledger


def undelivered(path: Path) -> Iterator[Message]:
    """What was posted to a spool file and not delivered until now, in order."""
    delivered = Ledger.read(path).delivered
    for line in _lines(path):
        if "id" in line and line["id"] not in delivered:
            yield message_of(line)


def discard(path: Path, keep: int) -> None:
    """Forget the messages of a spool file from the id `keep` on, as if they had never been posted. Raises OSError."""
    if Ledger.read(path).next_id <= keep:
        return
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        for line in _lines(path):
            if "ids" in line:
                line["ids"] = [number for number in line["ids"] if number < keep]
            if line.get("id", -1) < keep:
                file.write(line_of(line))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def _lines(path: Path) -> Iterator[Body]:
    if path.exists():
        with path.open("rb") as file:
            yield from map(parsed, file)


def line_of(value: Body) -> bytes:
    """As it is written, with its end."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def message_of(line: Body) -> Message:
    """The message of a line that posted it."""
    return Message(line["id"], line["kind"], line["body"])


def parsed(line: bytes) -> Body:
    """The line's object; an empty one for what is no whole line of ours."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    known = isinstance(value, dict) and any(_has(value, kinds) for kinds in (_POSTED, _DELIVERED, _FAILED))
    return value if known and all(isinstance(number, int) for number in value.get("ids", ())) else {}


def _has(value: Body, kinds: dict[str, type]) -> bool:
    return all(isinstance(value.get(name), kind) for name, kind in kinds.items())
