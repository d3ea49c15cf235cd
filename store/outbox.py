"""A queue on disk of messages to a receiver that may be slow or unavailable.

The file is the queue: `post` appends a line and returns; one background thread reads the lines and delivers them in
order. Memory stays bounded however long the receiver is unavailable, and a later process that opens the same file
continues where this one stopped. Lines are JSON of two kinds; any other line, such as one torn by a crash, is skipped:

    {"id": 7, "kind": "publish", "body": {...}}                 a message
    {"ids": [7], "outcome": "delivered", "result": {...}}       its outcome ("failed" has "error" instead)

A process that is killed and resumes from an earlier commit posts the same messages again. Therefore messages can be
bound to commits: a message waits for `release`, and messages after the last commit are discarded when the file is
opened again.
"""

import itertools
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import StrictInt, TypeAdapter

from store.files import sync_folder, write_chunks

LOG = logging.getLogger("omnidraft.registry")

Body = dict[str, Any]  # JSON
AT_ONCE = 256  # most messages in memory, and in one delivery


@dataclass(frozen=True)
class Message:
    """A message, as one line of the file."""

    id: StrictInt  # from 0, in the order of posting
    kind: str
    body: Body


@dataclass(frozen=True)
class Delivery:
    """The outcome of one or more messages, as one line of the file."""

    ids: list[int]
    outcome: str  # "delivered" or "failed"
    result: Body | None = None  # what the delivery returned
    error: str | None = None  # why it failed


_LINE: TypeAdapter[Message | Delivery] = TypeAdapter(Message | Delivery)


@dataclass
class Ledger:
    """The state of a spool file: its lines, without the bodies of messages."""

    posted: int = 0
    next_id: int = 0
    delivered: set[int] = field(default_factory=set)
    known: Body = field(default_factory=dict)  # the results of the deliveries, merged in their order

    @classmethod
    def read(cls, path: Path) -> "Ledger":
        """Read a spool file. A missing file gives an empty ledger; a line torn by a crash is skipped."""
        ledger = cls()
        for line in read_lines(path):
            if isinstance(line, Message):
                ledger.posted, ledger.next_id = ledger.posted + 1, line.id + 1
            elif line.result is not None:
                ledger.known.update(line.result)
                ledger.delivered.update(line.ids)
        return ledger


class OutageError(Exception):
    """The receiver is unavailable; the failure is not due to the message."""


@dataclass(frozen=True)
class RetryPolicy:
    """Retries and waits of an outbox. All values except `attempts` are in seconds."""

    attempts: int = 5  # for a message that the receiver refuses, while the outbox is open
    backoff: float = 1.0  # wait after the first failure; doubles with each further one
    max_backoff: float = 30.0  # maximum of the backoff
    linger: float = 1.0  # wait between two reads of the file, so that small messages are delivered together


class Outbox:
    """Delivers every message at least once, in order, or reports that it did not.

    After an `OutageError` the message is retried until the receiver is available again, and all others wait. Any other
    exception counts as a refusal. A message that is refused `attempts` times is recorded as failed, and the next one
    follows. `close` retries everything undelivered once more.

    Args:
        path: the spool file.
        deliver: called as `deliver(kind, bodies)` on the background thread; `bodies` has one element, or several
            consecutive ones for the kinds in `merged`. Its result (JSON) is stored with the outcome.
        merged: kinds whose consecutive messages are delivered together.
        gates: kinds that are retried until they are accepted, since later messages need them.
        keep: the mark of the last commit, 0 before the first one. Messages from it on are discarded, those below it
            are delivered, and later ones wait for `release`. None for a caller without commits: everything is
            delivered as soon as possible.
    """

    def __init__(
        self,
        path: Path,
        deliver: Callable[[str, list[Body]], Body],
        *,
        merged: frozenset[str] = frozenset(),
        gates: frozenset[str] = frozenset(),
        retry_policy: RetryPolicy,
        keep: int | None = None,
    ) -> None:
        self.path = path
        self.last_error: str | None = None  # the last failure, until the next delivery
        self._deliver, self._merged, self._gates, self._retry_policy = deliver, merged, gates, retry_policy
        self._lock = threading.Lock()  # guards appends: whole lines only
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._holds, self._released = keep is not None, sys.maxsize if keep is None else keep
        if keep is not None:
            discard(path, keep)
        earlier = Ledger.read(path)
        self._delivered, self._posted = earlier.delivered, earlier.posted
        self._refused: set[int] = set()  # ids of messages that were not written, or whose `post` raised
        self._next_id = max(earlier.next_id, keep or 0)
        self._open_files()
        self._thread = threading.Thread(target=self._work, name="outbox", daemon=True)
        self._thread.start()

    def post(self, kind: str, body: Body) -> None:
        """Append one message (tens of microseconds). Raises OSError if the disk is full, ValueError after close."""
        if self._closing.is_set():
            raise ValueError(f"messages must be posted before close, but {kind!r} came after it")
        with self._lock:
            number, self._next_id = self._next_id, self._next_id + 1  # not reused: the line may be on disk
            self._refused.add(number)
            self._write(Message(number, kind, body))
            self._refused.remove(number)
            self._posted += 1

    def mark(self) -> int:
        """Sync all messages so far to disk; return the id of the next message. Raises OSError."""
        with self._lock:
            os.fsync(self._append.fileno())
            return self._next_id

    def release(self, mark: int) -> None:
        """Allow delivery of the messages below `mark`. May be called from any thread.

        Raises ValueError if the outbox was opened without `keep` and delivers everything anyway.
        """
        if not self._holds:
            raise ValueError("an outbox must be opened with keep= (0 for a new file) to release messages by marks")
        self._released = max(self._released, mark)

    def close(self, timeout: float) -> int:
        """Deliver released messages for at most `timeout` seconds; return the number of undelivered ones.

        May be called again.
        """
        self._closing.set()
        self._thread.join(timeout)
        self._abandoned.set()
        return self._posted - len(self._delivered - self._refused)

    def _open_files(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._append = self.path.open("ab", buffering=0)
        self._reader = self.path.open("rb")
        self._torn = self.path.stat().st_size > 0  # perhaps, by a crash
        sync_folder(self.path.parent)

    def _write(self, line: Message | Delivery) -> None:
        """Append a line; add a line end first if the previous line may lack it, since empty lines are skipped."""
        rest = b"\n" * self._torn + _encode(line)
        self._torn = True
        while rest:  # a disk that is nearly full writes a part
            rest = rest[self._append.write(rest) :]
        self._torn = False

    def _work(self) -> None:
        with self._append, self._reader:
            try:
                self._deliver_all()
            except Exception as error:  # the file is still writable, and a later process delivers it
                self.last_error = f"{self.path}: {error}"
                self._closing.wait()

    def _deliver_all(self) -> None:
        self._follow()
        left = (message for message in read_undelivered(self.path) if message.id < self._released)
        while messages := list(itertools.islice(left, AT_ONCE)):
            self._send(messages)

    def _follow(self) -> None:
        while not self._abandoned.is_set():
            last = self._closing.is_set()  # read first, so that no message posted before close is missed
            messages = self._read_released()
            self._send(messages)
            if last and not messages:
                break
            if len(messages) < AT_ONCE:
                self._closing.wait(self._retry_policy.linger)

    def _read_released(self) -> list[Message]:
        """Read the next messages, up to one that is not released or not yet complete."""
        messages: list[Message] = []
        while len(messages) < AT_ONCE:
            place, raw = self._reader.tell(), self._reader.readline()
            line = _parse(raw)
            message = line if isinstance(line, Message) else None
            if not raw.endswith(b"\n") or (message and message.id >= self._released):
                self._reader.seek(place)
                break
            if message and message.id not in self._delivered:
                messages.append(message)
        return messages

    def _send(self, messages: list[Message]) -> None:
        def group_key(message: Message) -> str | int:
            return message.kind if message.kind in self._merged else message.id

        for _, group in itertools.groupby(messages, group_key):
            self._send_group(list(group))

    def _send_group(self, group: list[Message]) -> None:
        """Retry until the messages are delivered, refused for good, or the outbox is abandoned."""
        refused = 0
        for wait in self._backoffs():
            if self._abandoned.is_set():
                return None
            try:
                result = self._deliver(group[0].kind, [message.body for message in group])
            except OutageError as outage:
                self.last_error = f"{group[0].kind}: {outage}"
            except Exception as error:  # any failure: the stream continues and the spool keeps the message
                self.last_error, refused = f"{group[0].kind}: {error}", refused + 1
                if self._closing.is_set() or (
                    refused >= self._retry_policy.attempts and group[0].kind not in self._gates
                ):
                    return self._give_up(group)
            else:
                self.last_error = None
                return self._record_delivery(group, result)
            LOG.debug("not delivered, tried again in %g s: %s", wait, self.last_error)
            (self._abandoned if self._closing.is_set() else self._closing).wait(wait)
        self._abandoned.set()  # an outage at the end
        return None

    def _backoffs(self) -> Iterator[float]:
        """Seconds to wait after each failed attempt; ends when the outbox closes during an outage."""
        for attempt in itertools.count(1):
            last = self._closing.is_set() and attempt >= self._retry_policy.attempts
            yield min(self._retry_policy.backoff * 2 ** min(attempt - 1, 30), self._retry_policy.max_backoff)
            if last:
                return

    def _give_up(self, group: list[Message]) -> None:
        """Record a message as failed for now. Several messages are first retried one by one."""
        if len(group) > 1:
            for message in group:
                self._send_group([message])
        else:
            self._record_outcome(Delivery([group[0].id], "failed", error=str(self.last_error)[:500]))

    def _record_delivery(self, group: list[Message], result: Body) -> None:
        ids = [message.id for message in group]
        self._record_outcome(Delivery(ids, "delivered", result))
        self._delivered.update(ids)

    def _record_outcome(self, outcome: Delivery) -> None:
        try:
            with self._lock:
                self._write(outcome)
        except OSError as error:  # a full disk: a later process will deliver these messages again
            self.last_error = f"{self.path}: {error}"


def read_undelivered(path: Path) -> Iterator[Message]:
    """Return the messages of a spool file that were not delivered, in order."""
    delivered = Ledger.read(path).delivered
    return (line for line in read_lines(path) if isinstance(line, Message) and line.id not in delivered)


def discard(path: Path, keep: int) -> None:
    """Remove the messages of a spool file from the id `keep` on. Raises OSError."""
    if Ledger.read(path).next_id > keep:
        write_chunks(path, map(_encode, _lines_before(path, keep)))


def _lines_before(path: Path, keep: int) -> Iterator[Message | Delivery]:
    for line in read_lines(path):
        if isinstance(line, Delivery):
            yield replace(line, ids=[number for number in line.ids if number < keep])
        elif line.id < keep:
            yield line


def read_lines(path: Path) -> Iterator[Message | Delivery]:
    """Yield all complete lines of a spool file; none if there is no file."""
    if path.exists():
        with path.open("rb") as file:
            yield from filter(None, map(_parse, file))


def _encode(line: Message | Delivery) -> bytes:
    fields = {name: value for name, value in vars(line).items() if value is not None}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _parse(line: bytes) -> Message | Delivery | None:
    """Parse a line; None if it is torn or foreign."""
    try:
        return _LINE.validate_python(json.loads(line))
    except (ValueError, RecursionError):
        return None
