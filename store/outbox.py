"""Messages to a slow or absent receiver, kept on disk until they are delivered.

The file is the queue: `post` appends a line and returns, one background thread reads the lines and delivers them in
order. So memory stays bounded however long the receiver is away, and a later process that opens the same file goes
on where this one stopped. Lines are JSON, of two kinds:

    {"id": 7, "kind": "publish", "body": {...}}                 posted
    {"ids": [7], "outcome": "delivered", "result": {...}}       what became of it ("failed" has "error" instead)
"""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Body = dict[str, Any]  # JSON


@dataclass(frozen=True)
class Patience:
    """How long to wait for what. All in seconds but `attempts`."""

    attempts: int = 5  # per message, while the outbox is open
    backoff: float = 1.0  # after the first failure; doubles with each
    longest: float = 30.0  # that the backoff grows to
    linger: float = 1.0  # between two looks at the file, so that small messages travel together


@dataclass(frozen=True)
class Message:
    """One posted line."""

    id: int  # from 0, in the order of posting
    kind: str
    body: Body


@dataclass
class Ledger:
    """What a spool file says when it is read from its start."""

    messages: dict[int, Message] = field(default_factory=dict)  # posted and not delivered, in order
    results: list[Body] = field(default_factory=list)  # of the deliveries, in order
    next_id: int = 0

    @classmethod
    def read(cls, path: Path) -> "Ledger":
        """Raises nothing for a missing file (an empty ledger) or a line torn by a crash (skipped)."""
        ledger = cls()
        if path.exists():
            with path.open("rb") as file:
                for line in file:
                    ledger._take(_parsed(line))
        return ledger

    def _take(self, line: Body) -> None:
        if "id" in line:
            self.messages[line["id"]] = Message(line["id"], line["kind"], line["body"])
            self.next_id = line["id"] + 1
        elif line.get("outcome") == "delivered":
            self.results.append(line["result"])
            for number in line["ids"]:
                self.messages.pop(number, None)


class Outbox:
    """Delivers every message at least once, in order, or says that it did not.

    `deliver(kind, bodies)` is called in the background thread only; `bodies` has one element, or several
    consecutive ones for the kinds in `merged`. What it returns (JSON) is kept with the outcome; whatever it raises
    counts as a failed attempt. A message that fails `attempts` times is noted as failed and the next one has its
    turn, except for the kinds in `gates`: those are tried until they pass, since what follows needs them. `close`
    tries everything undelivered once more.
    """

    def __init__(
        self,
        path: Path,
        deliver: Callable[[str, list[Body]], Body],
        *,
        merged: frozenset[str] = frozenset(),
        gates: frozenset[str] = frozenset(),
        patience: Patience,
    ):
        self.path = path
        self.trouble: str | None = None  # the last failure, until something is delivered again
        self._deliver, self._merged, self._gates, self._patience = deliver, merged, gates, patience
        self._lock = threading.Lock()  # over the file: whole lines only
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        earlier = Ledger.read(path)
        self.results = earlier.results
        self._backlog, self._next_id = list(earlier.messages.values()), earlier.next_id
        self._open_files()
        self._thread = threading.Thread(target=self._work, name="outbox", daemon=True)
        self._thread.start()

    def post(self, kind: str, body: Body) -> None:
        """Append one message: tens of microseconds. Raises OSError when the disk is full, ValueError after close."""
        if self._closing.is_set():
            raise ValueError(f"messages must be posted before close, but {kind!r} came after it")
        with self._lock:
            message = {"id": self._next_id, "kind": kind, "body": body}
            self._next_id += 1
            self._append.write(_line(message))

    def close(self, timeout: float) -> int:
        """Deliver what is left, for at most `timeout` seconds; the number left undelivered. May be called again."""
        self._closing.set()
        self._thread.join(timeout)
        self._abandoned.set()
        return len(Ledger.read(self.path).messages)

    def undelivered(self, kind: str) -> list[Body]:
        """The bodies of that kind that were posted and never delivered, in order."""
        return [message.body for message in Ledger.read(self.path).messages.values() if message.kind == kind]

    def _open_files(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._append = self.path.open("ab", buffering=0)
        self._reader = self.path.open("rb")
        self._reader.seek(0, 2)
        if self._reader.tell() > 0:
            self._append.write(b"\n")  # ends a line that a crash may have torn; an empty line is skipped

    def _work(self) -> None:
        with self._append, self._reader:
            self._send(self._backlog)
            self._follow()
            self._send(list(Ledger.read(self.path).messages.values()))

    def _follow(self) -> None:
        while not self._abandoned.is_set():
            last = self._closing.is_set()  # asked before reading, so that nothing posted before close is overlooked
            messages = self._read_posted()
            self._send(messages)
            if last and not messages:
                break
            self._closing.wait(self._patience.linger)

    def _read_posted(self, most: int = 4096) -> list[Message]:
        with self._lock:
            lines = [_parsed(line) for line in itertools.islice(self._reader, most)]
        return [Message(line["id"], line["kind"], line["body"]) for line in lines if "id" in line]

    def _send(self, messages: list[Message]) -> None:
        def together(message: Message) -> str | int:
            return message.kind if message.kind in self._merged else message.id

        for _, group in itertools.groupby(messages, together):
            if self._abandoned.is_set():
                return
            self._send_group(list(group))

    def _send_group(self, group: list[Message]) -> None:
        kind, ids = group[0].kind, [message.id for message in group]
        for wait in self._waits(kind):
            try:
                result = self._deliver(kind, [message.body for message in group])
            except Exception as error:  # whatever the receiver does, the stream goes on and the spool keeps the message
                self.trouble = f"{kind}: {error}"
                self._closing.wait(wait)
            else:
                self.trouble = None
                self._note({"ids": ids, "outcome": "delivered", "result": result})
                return
        self._note({"ids": ids, "outcome": "failed", "error": str(self.trouble)[:500]})

    def _waits(self, kind: str) -> Iterator[float]:
        """Seconds to wait after each failed attempt; ends when there shall be no further one."""
        for attempt in itertools.count(1):
            more = kind in self._gates or attempt < self._patience.attempts
            yield min(self._patience.backoff * 2 ** (attempt - 1), self._patience.longest) if more else 0.0
            if not more or self._closing.is_set():
                return

    def _note(self, outcome: Body) -> None:
        with self._lock:
            self._append.write(_line(outcome))


def _line(value: Body) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _parsed(line: bytes) -> Body:
    """The line's object; an empty one for what is no whole line of ours."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
