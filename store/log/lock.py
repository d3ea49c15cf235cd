"""The lock that lets one process at a time write a run's folder."""

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from store.errors import RunError
from store.files import write_whole

LOCK, OWNER = ".lock", ".owner.json"


@dataclass(frozen=True)
class Owner:
    """The process that writes a run."""

    pid: int
    host: str
    since: str  # ISO 8601, UTC

    @classmethod
    def me(cls) -> Self:
        return cls(os.getpid(), socket.gethostname(), datetime.now(UTC).isoformat(timespec="seconds"))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class RunLock:
    """The lock that a process holds while it writes a run; a context manager. Creates the folder if needed.

    The system releases the lock of a process that dies in any way, so nothing has to be cleaned up.
    """

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        self._lock = FileLock(run_folder / LOCK)

    def take(self) -> None:
        """Acquire the lock, unless this object holds it already."""
        if self._lock.is_locked:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            write_whole(self._folder / OWNER, json.dumps(asdict(Owner.me())).encode())
        except Timeout:
            owner = _read_owner(self._folder) or "another process"
            raise RunError(
                f"{self._folder} must not be written by two processes, but {owner} is writing it; wait for it, "
                "end it, or name another folder with --run"
            ) from None
        except OSError as error:
            self._lock.release()
            reason = error.strerror or error
            raise RunError(f"the run's folder {self._folder} must be writable: {reason}; see --run") from error

    def __enter__(self) -> Self:
        self.take()
        return self

    def release(self) -> None:
        if self._lock.is_locked:
            with suppress(OSError):
                (self._folder / OWNER).unlink()
            self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.release()


def is_being_written(run_folder: Path) -> bool | None:
    """Whether a process of this machine writes the run; None for a copy of a run, which has no lock.

    The lock itself is not touched, since even a short attempt to acquire it could refuse a writer. The number of a
    process that was killed may belong to another process by now; then this is wrong.
    """
    owner = _read_owner(run_folder)
    if owner is None:
        return False if (run_folder / LOCK).exists() else None
    if owner.host != socket.gethostname():
        return None
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        pass
    return True


def _read_owner(run_folder: Path) -> Owner | None:
    try:
        return Owner(**json.loads((run_folder / OWNER).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
