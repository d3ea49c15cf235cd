"""One process at a time writes a run's folder."""

import json
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from store.errors import RunError
from store.files import write_whole

LOCK, OWNER = ".lock", ".owner.json"


class RunLock:
    """Held while a process writes a run; a context manager. Makes the folder if need be.

    The system releases the lock of a process that dies, however it dies: there is nothing to clean up after it.

    Raises:
        RunError: another process holds it; its number and host are named. Or the folder cannot be made.
    """

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        self._lock = FileLock(run_folder / LOCK)

    def take(self) -> None:
        """Take it, unless it is held already."""
        if self._lock.is_locked:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
            write_whole(self._folder / OWNER, json.dumps(owner).encode())
        except Timeout:
            raise RunError(
                f"{self._folder} must not be written by two processes, but {self._owner()} is writing it; wait for it, "
                "end it, or name another folder with --run"
            ) from None
        except OSError as error:
            self._lock.release()
            reason = error.strerror or error
            raise RunError(f"the run's folder {self._folder} must be writable: {reason}; see --run") from error

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            (self._folder / OWNER).unlink()
        self._lock.release()

    def _owner(self) -> str:
        try:
            owner = json.loads((self._folder / OWNER).read_bytes())
            return f"process {owner['pid']} on {owner['host']} (since {owner['since']})"
        except (OSError, ValueError, KeyError):
            return "another process"
