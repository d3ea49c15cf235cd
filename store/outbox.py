"""Messages to a slow or absent receiver, kept on disk until they are delivered.

The file is the queue: `post` appends a line and returns, one background thread reads the lines and delivers them in
order. So memory stays bounded however long the receiver is away, and a later process that opens the same file goes
on where this one stopped. `store.spool` has the lines.

Where what posts may be killed and go on from an earlier commit, it posts the same again. So a message then counts only
with a commit: it waits for `release`, and those behind the last commit are discarded when the file is opened again.
"""

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from store.files import sync_folder
from store.spool import Body, Ledger, Message, discard, line_of, message_of, parsed, undelivered

AT_ONCE = 256  # messages that are in memory, and may travel, together


class OutageError(Exception):
    """The receiver is out of order, so that it is not the message's fault that it could not be delivered."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for what. All in seconds but `attempts`."""

    attempts: int = 5  # per message that the receiver refuses, while the outbox is open
    backoff: float = 1.0  # after the first failure; doubles with each
    longest: float = 30.0  # that the backoff grows to
    linger: float = 1.0  # between two looks at the file, so that small messages travel together


class Outbox:
    """Delivers every message at least once, in order, or says that it did not.

    `deliver(kind, bodies)` is called in the background thread only; `bodies` has one element, or several
    consecutive ones for the kinds in `merged`. What it returns (JSON) is kept with the outcome. When it raises
    `OutageError`, the message is tried again until the receiver is back, and all others wait. Whatever else it raises
    counts as a refusal. A message that is refused `attempts` times is noted as failed and the next one has its turn,
    except for the kinds in `gates`: those are tried until they pass, since what follows needs them. `close` tries
    everything undelivered once more.

    `keep`: the mark of the last commit, 0 before the first one. Messages from it on are discarded, those below it are
    delivered, and what is posted from now on waits for `release`. None if nothing of the kind is kept: then
    everything is delivered as soon as may be.
    """

    def __init__(
        self,
        path: Path,
        deliver: Callable[[str, list[Body]], Body],
        *,
        merged: frozenset[str] = frozenset(),
        gates: frozenset[str] = frozenset(),
        patience: Patience,
        keep: int | None = None,
    ):
        self.path = path
        self.trouble: str | None = None  # the last failure, until something is delivered again
        self._deliver, self._merged, self._gates, self._patience = deliver, merged, gates, patience
        self._lock = threading.Lock()  # over what is posted: whole lines only
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._holds, self._released = keep is not None, sys.maxsize if keep is None else keep
        if keep is not None:
            discard(path, keep)
        earlier = Ledger.read(path)
        self._delivered, self._posted = earlier.delivered, earlier.posted
        self._refused: set[int] = set()  # ids of those that the disk did not take, or not to the caller's knowledge
        self._next_id = max(earlier.next_id, keep or 0)
        self._open_files()
        self._thread = threading.Thread(target=self._work, name="outbox", daemon=True)
        self._thread.start()

    def post(self, kind: str, body: Body) -> None:
        """Append one message: tens of microseconds. Raises OSError when the disk is full, ValueError after close."""
        if self._closing.is_set():
            raise ValueError(f"messages must be posted before close, but {kind!r} came after it")
        with self._lock:
            number, self._next_id = self._next_id, self._next_id + 1  # used up, since all but the line end may be there
            self._refused.add(number)
            self._write({"id": number, "kind": kind, "body": body})
            self._refused.remove(number)
            self._posted += 1

    def mark(self) -> int:
        """Bring what was posted onto the disk. The id of the next message: above all those so far. Raises OSError."""
        with self._lock:
            os.fsync(self._append.fileno())
            return self._next_id

    def release(self, mark: int) -> None:
        """Let the messages below `mark` be delivered. From any thread.

        Raises ValueError for an outbox that holds nothing back since it was opened without `keep`.
        """
        if not self._holds:
            raise ValueError("an outbox must be opened with keep= (0 for a new file) to release messages by marks")
        self._released = max(self._released, mark)

    def close(self, timeout: float) -> int:
        """Deliver what is left and released, for at most `timeout` seconds; the number of messages left undelivered.

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

    def _write(self, value: Body) -> None:
        """Append a line, behind a line end if the one before may lack it: an empty line is skipped."""
        rest = b"\n" * self._torn + line_of(value)
        self._torn = True
        while rest:  # a disk that is nearly full takes a part
            rest = rest[self._append.write(rest) :]
        self._torn = False

    def _work(self) -> None:
        with self._append, self._reader:
            try:
                self._deliver_all()
            except Exception as error:  # the file can be written still, and a later process delivers it
                self.trouble = f"{self.path}: {error}"
                self._closing.wait()

    def _deliver_all(self) -> None:
        self._follow()
        left = (message for message in undelivered(self.path) if message.id < self._released)
        while messages := list(itertools.islice(left, AT_ONCE)):
            self._send(messages)

    def _follow(self) -> None:
        while not self._abandoned.is_set():
            last = self._closing.is_set()  # asked before reading, so that nothing posted before close is overlooked
            messages = self._read_released()
            self._send(messages)
            if last and not messages:
                break
            if len(messages) < AT_ONCE:
                self._closing.wait(self._patience.linger)

    def _read_released(self) -> list[Message]:
        """The next messages of the file, up to one that is held back or just being written."""
        messages: list[Message] = []
        while len(messages) < AT_ONCE:
            place, raw = self._reader.tell(), self._reader.readline()
            line = parsed(raw)
            if not raw.endswith(b"\n") or line.get("id", -1) >= self._released:
                self._reader.seek(place)
                break
            if "id" in line and line["id"] not in self._delivered:
                messages.append(message_of(line))
        return messages

    def _send(self, messages: list[Message]) -> None:
        def together(message: Message) -> str | int:
            return message.kind if message.kind in self._merged else message.id

        for _, group in itertools.groupby(messages, together):
            self._send_group(list(group))

    def _send_group(self, group: list[Message]) -> None:
        """Try until the messages are delivered, refused for good, or there shall be no further attempt."""
        refused = 0
        for wait in self._waits():
            if self._abandoned.is_set():
                return
            try:
                result = self._deliver(group[0].kind, [message.body for message in group])
            except OutageError as outage:
                self.trouble = f"{group[0].kind}: {outage}"
            except Exception as error:  # whatever the receiver does, the stream goes on and the spool keeps the message
                self.trouble, refused = f"{group[0].kind}: {error}", refused + 1
                if self._closing.is_set() or (refused >= self._patience.attempts and group[0].kind not in self._gates):
                    return self._give_up(group)
            else:
                self.trouble = None
                return self._note_delivered(group, result)
            (self._abandoned if self._closing.is_set() else self._closing).wait(wait)
        self._abandoned.set()  # an outage at the end
        return None

    def _waits(self) -> Iterator[float]:
        """Seconds to wait after each failed attempt; ends when the outbox closes during an outage."""
        for attempt in itertools.count(1):
            last = self._closing.is_set() and attempt >= self._patience.attempts
            yield min(self._patience.backoff * 2 ** min(attempt - 1, 30), self._patience.longest)
            if last:
                return

    def _give_up(self, group: list[Message]) -> None:
        """For now. Of several, those that are not to blame are delivered one by one."""
        if len(group) > 1:
            for message in group:
                self._send_group([message])
        else:
            self._note({"ids": [group[0].id], "outcome": "failed", "error": str(self.trouble)[:500]})

    def _note_delivered(self, group: list[Message], result: Body) -> None:
        ids = [message.id for message in group]
        self._note({"ids": ids, "outcome": "delivered", "result": result})
        self._delivered.update(ids)

    def _note(self, outcome: Body) -> None:
        try:
            with self._lock:
                self._write(outcome)
        except OSError as error:  # a full disk: what was delivered is going to be delivered again by a later process
            self.trouble = f"{self.path}: {error}"
