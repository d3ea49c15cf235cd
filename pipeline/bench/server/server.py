"""Starts a server for a load, and samples its counters from `/metrics` and the memory of its processes."""

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil
from prometheus_client.parser import text_string_to_metric_families

from store.errors import RunError

START_SECONDS = 300.0
END_SECONDS = 150.0  # for the server to answer running requests and for the learner to commit
_ADDRESS = re.compile(r" on (http://\S+)/v1\s")
_COMMAND = "from pipeline.cli.app import main; main()"
SAMPLED_METRICS = {
    "vllm:spec_decode_num_draft_tokens_total": "proposed",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:generation_tokens_total": "generated",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "omnidraft:blocks_total": "blocks",
    "omnidraft:emitted_tokens_total": "emitted",
    "omnidraft:acceptance_rate": "model_acceptance",
    "omnidraft:drafter_version": "drafter_version",
    "omnidraft:learner_lag_prompts": "learner_lag",
    "omnidraft:learner_dropped_total": "learner_dropped",
}


@dataclass(frozen=True)
class Sample:
    """State of a server at one time.

    Attributes:
        at: time of `time.perf_counter`.
        figures: values of the metrics in `SAMPLED_METRICS` that the server has, by their short names.
        memory: resident bytes of all its processes; shared pages count for each. None if unknown.
    """

    at: float
    figures: dict[str, float] = field(default_factory=dict)
    memory: int | None = None


def parse_metrics(text: str) -> dict[str, float]:
    """Parse the metrics in `SAMPLED_METRICS` from a text in Prometheus's format; sums over labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if name := SAMPLED_METRICS.get(sample.name):
                found[name] = found.get(name, 0.0) + sample.value
    return found


def processes(pid: int) -> list[psutil.Process]:
    """A process and all its descendants that are still running."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    return []


def memory_of(pid: int) -> int:
    """Resident bytes of a process and all its descendants."""
    total = 0
    for process in processes(pid):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


class ServerMonitor:
    """Samples a server until it is closed. An async context manager.

    Args:
        metrics: returns the text of `/metrics`, or None.
        pid: process id of the server; None if it was not started here.
        every: seconds between two samples.

    Attributes:
        samples: samples taken so far.
    """

    def __init__(self, metrics: Callable[[], Awaitable[str | None]], pid: int | None, every: float) -> None:
        self._metrics, self._pid, self._every = metrics, pid, every
        self.samples: list[Sample] = []

    async def __aenter__(self) -> Self:
        self.samples.append(await self.sample())
        self._task = asyncio.ensure_future(self._sample_repeatedly())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.samples.append(await self.sample())

    async def sample(self) -> Sample:
        """Sample the server now."""
        text = await self._metrics()
        memory = memory_of(self._pid) if self._pid is not None else None
        return Sample(time.perf_counter(), parse_metrics(text) if text else {}, memory)

    async def _sample_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            self.samples.append(await self.sample())


class OwnServer:
    """Starts `omnidraft serve` in a process, waits until it answers, and stops it on exit. A context manager.

    Args:
        options: options for `omnidraft serve`, without `--port` and `--run`.
        folder: an existing, empty folder for its output.
        run_folder: a new or empty folder for its run.

    Raises:
        RunError: the server does not start.

    Attributes:
        url: URL of the server.
        pid: process id of the server.
    """

    def __init__(self, options: Sequence[str], folder: Path, run_folder: Path) -> None:
        self._output = folder / "server.txt"
        command = [sys.executable, "-c", _COMMAND, "serve", "--port", "0", "--run", str(run_folder), *options]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        self.pid = self._process.pid
        self.url = ""

    def __enter__(self) -> Self:
        end = time.monotonic() + START_SECONDS
        while not (found := _ADDRESS.search(self.output())):
            if self._process.poll() is not None or time.monotonic() > end:
                self._end()
                raise RunError(f"the server must start, but printed:\n{self.output()}")
            time.sleep(0.1)
        self.url = found[1]
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        self._end()

    def output(self) -> str:
        """The output of the server so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def pause(self) -> None:
        """Suspend the server and its learner, so that another server can be measured."""
        self._for_all_processes(psutil.Process.suspend)

    def resume(self) -> None:
        """Resume the server and its learner."""
        self._for_all_processes(psutil.Process.resume)

    def _for_all_processes(self, act: Callable[[psutil.Process], object]) -> None:
        for process in processes(self.pid):
            with suppress(psutil.NoSuchProcess):
                act(process)

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._for_all_processes(psutil.Process.kill)
            self._process.wait()
