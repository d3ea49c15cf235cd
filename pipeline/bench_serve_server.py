"""A server of ours for the load generator: `omnidraft serve` in a process of its own, on a free port."""

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from pipeline.bench_serve_watch import processes
from store.errors import RunError

START_SECONDS = 300.0
END_SECONDS = 150.0  # to answer what runs, and to let the learner commit
_ADDRESS = re.compile(r" on (http://\S+)/v1\s")
_COMMAND = "from pipeline.cli import main; main()"


class OwnServer:
    """A context manager: it is started, waited for, and in the end told to end.

    Args:
        options: of `omnidraft serve`, apart from `--port` and `--run`.
        folder: existing and empty, for what it says.
        run_folder: of its run, new or empty.

    Raises:
        RunError: it does not start.

    Attributes:
        url: where it answers.
        pid: of its process.
    """

    def __init__(self, options: Sequence[str], folder: Path, run_folder: Path) -> None:
        self._said = folder / "server.txt"
        command = [sys.executable, "-c", _COMMAND, "serve", "--port", "0", "--run", str(run_folder), *options]
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(command, stdout=said, stderr=said)
        self.pid = self._process.pid
        self.url = ""

    def __enter__(self) -> Self:
        end = time.monotonic() + START_SECONDS
        while not (found := _ADDRESS.search(self.said())):
            if self._process.poll() is not None or time.monotonic() > end:
                self._end()
                raise RunError(f"the server must start, but said:\n{self.said()}")
            time.sleep(0.1)
        self.url = found[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resume()
        self._end()

    def said(self) -> str:
        """What it has said so far."""
        return self._said.read_text(encoding="utf-8", errors="replace")

    def pause(self) -> None:
        """Let it and its learner do nothing at all, so that another can be measured."""
        for process in processes(self.pid):
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        """Let it go on."""
        for process in processes(self.pid):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            for process in processes(self.pid):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()
