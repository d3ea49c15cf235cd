"""Starts a server in a process of its own, suspends it while another is measured, and reads its counters."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil
from prometheus_client.parser import text_string_to_metric_families

from store.errors import RunError

START_SECONDS = 300.0
END_SECONDS = 150.0  # for the server to answer running requests and for the learner to commit
_ADDRESS = re.compile(r" on (http://\S+)/v1\s")
_COMMAND = "from pipeline.cli.app import main; main()"
METRICS = {"omnidraft:drafter_version": "updates", "omnidraft:learner_lag_prompts": "waiting"}


def parse_metrics(text: str) -> dict[str, float]:
    """Parse the metrics in `METRICS` from a text in Prometheus's format; sums over labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if name := METRICS.get(sample.name):
                found[name] = found.get(name, 0.0) + sample.value
    return found


class OwnServer:
    """Starts `omnidraft serve`, waits until it answers, and stops it on exit. A context manager.

    Args:
        options: options for `omnidraft serve`, without `--port` and `--run`.
        folder: a new folder for its output and its run.

    Raises:
        RunError: the server does not start.
    """

    def __init__(self, options: Sequence[str], folder: Path) -> None:
        folder.mkdir(parents=True)
        self._output = folder / "server.txt"
        command = [sys.executable, "-c", _COMMAND, "serve", "--port", "0", "--run", str(folder / "run"), *options]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        self.url = ""

    def __enter__(self) -> Self:
        end = time.monotonic() + START_SECONDS
        while not (found := _ADDRESS.search(self._read_output())):
            if self._process.poll() is not None or time.monotonic() > end:
                self._end()
                raise RunError(f"the server must start, but printed:\n{self._read_output()}")
            time.sleep(0.1)
        self.url = found[1]
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        self._end()

    def _read_output(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def pause(self) -> None:
        """Suspend the server and its learner, so that another server can be measured."""
        self._for_all_processes(psutil.Process.suspend)

    def resume(self) -> None:
        """Resume the server and its learner."""
        self._for_all_processes(psutil.Process.resume)

    def _for_all_processes(self, act: Callable[[psutil.Process], object]) -> None:
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self._process.pid)
            for process in (first, *first.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    act(process)

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._for_all_processes(psutil.Process.kill)
            self._process.wait()
