"""Looking at a server while it is loaded: its own counters from `/metrics`, and the memory of its processes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil
from prometheus_client.parser import text_string_to_metric_families

WATCHED = {
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
    """How a server stood.

    Attributes:
        at: `time.perf_counter`.
        figures: by the names of `WATCHED`; those that it has.
        memory: resident bytes of its processes together; pages that they share count for each. None when unknown.
    """

    at: float
    figures: dict[str, float] = field(default_factory=dict)
    memory: int | None = None


def read_figures(text: str) -> dict[str, float]:
    """What is watched, of a text in Prometheus's format; figures with several labels are added up."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if name := WATCHED.get(sample.name):
                found[name] = found.get(name, 0.0) + sample.value
    return found


def processes(pid: int) -> list[psutil.Process]:
    """A process and all below it; those that are still there."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    return []


def memory_of(pid: int) -> int:
    """Resident bytes of a process and all below it."""
    total = 0
    for process in processes(pid):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


class Watch:
    """Takes samples until it is closed. An async context manager.

    Args:
        metrics: the text of `/metrics`, or None.
        pid: of the server; None for one that is not ours.
        every: seconds between two samples.
    """

    def __init__(self, metrics: Callable[[], Awaitable[str | None]], pid: int | None, every: float) -> None:
        self._metrics, self._pid, self._every = metrics, pid, every
        self.samples: list[Sample] = []

    async def __aenter__(self) -> "Watch":
        self.samples.append(await self.sample())
        self._task = asyncio.ensure_future(self._go_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.samples.append(await self.sample())

    async def sample(self) -> Sample:
        """How it stands now."""
        text = await self._metrics()
        memory = memory_of(self._pid) if self._pid is not None else None
        return Sample(time.perf_counter(), read_figures(text) if text else {}, memory)

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            self.samples.append(await self.sample())
