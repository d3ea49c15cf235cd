"""Measures a server under load from outside, and the cost of learning while serving (`omnidraft bench-serve`).

`client.py` makes and sends requests, `server.py` starts a server and samples its metrics, `results.py` computes the
results, `verify.py` compares greedy answers with plain decoding. This module connects them.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.bench.server.client import Client, LoadOutcomes, Workload, closed_loop, requests
from pipeline.bench.server.learning_cost import OFF, LearningCost, Rounds, compare
from pipeline.bench.server.results import ClientResults, ServerResults, summarize_clients, summarize_server
from pipeline.bench.server.server import OwnServer, Sample, ServerMonitor
from pipeline.bench.server.verify import Reference, Verification, verify
from pipeline.config.settings import Config
from pipeline.reports.machine import load_average
from pipeline.sources.stream import open_sources, stream
from stages.engine.forward_pass.measurements import processor_name
from store.errors import SourceError
from store.events import PromptReceived

EVERY = 2.0  # seconds between two samples of the server, each of which costs it some milliseconds
Progress = Callable[[str], None]


@dataclass(frozen=True)
class LoadPlan:
    """Size of a load.

    Attributes:
        clients: number of concurrent clients, each sending its next request after the previous answer.
        seconds: measured seconds in which requests are sent.
        warm_up: seconds of the same load before, not measured.
        workload: shares of the kinds of requests.
        seed: random seed of the requests.
    """

    clients: int
    seconds: float
    warm_up: float
    workload: Workload
    seed: int


@dataclass(frozen=True)
class LoadReport:
    """Results of a load.

    Attributes:
        machine: processor, cores and load average of the machine.
        model: name of the model in the server's interface.
        clients: results seen by clients.
        server: results computed from the server's metrics.
        samples: samples of the server over time; `at` in seconds from the start of the load.
        verified: comparison of greedy answers; None if they were not compared.
    """

    machine: dict[str, Any]
    model: str
    clients: ClientResults
    server: ServerResults
    samples: list[Sample]
    verified: Verification | None


def prompts_of(config: Config) -> list[str]:
    """The texts of all prompts of the configured sources.

    Raises:
        SourceError: the sources have no prompt.
    """
    sources = open_sources(config.sources, config.source, seed=config.seed)
    texts = [event.text for event in stream(sources) if isinstance(event, PromptReceived)]
    if not texts:
        raise SourceError(f"the sources must have prompts, but {', '.join(config.sources)} has none")
    return texts


def machine_of() -> dict[str, Any]:
    """Processor, number of cores and load average of this machine."""
    return {"processor": processor_name(), "cores": os.cpu_count(), "load": load_average()}


@dataclass(frozen=True)
class LoadResult:
    """Outcomes of a finished load, the server's model, and samples taken during the load."""

    model: str
    load: LoadOutcomes
    samples: list[Sample]


def load_server(
    url: str, key: str | None, pid: int | None, prompts: Sequence[str], plan: LoadPlan, progress: Progress
) -> LoadResult:
    """Load a running server.

    Args:
        url: URL of the server.
        key: API key of the server; None for none.
        pid: process id of the server, to sample its memory; None if it was not started here.
        prompts: texts of prompts.
        plan: size of the load.
        progress: called with a description of each step.

    Raises:
        RunError: the server does not answer.
    """
    sent = requests(prompts, plan.workload, plan.seed)

    async def load() -> LoadResult:
        async with Client(url, key) as client:
            progress(f"warming up for {plan.warm_up:g} s")
            await closed_loop(client.send, sent, plan.clients, plan.warm_up)
            progress(f"{plan.clients} clients for {plan.seconds:g} s")
            async with ServerMonitor(client.metrics, pid, EVERY) as monitor:
                outcomes = await closed_loop(client.send, sent, plan.clients, plan.seconds)
        return LoadResult(client.model, outcomes, monitor.samples)

    return asyncio.run(load())


def report_of(loaded: LoadResult, machine: dict[str, Any], clients: int, verified: Verification | None) -> LoadReport:
    """The report of a load. Samples after the last request was sent are left out."""
    load = loaded.load
    samples = [
        replace(sample, at=sample.at - load.began)
        for sample in loaded.samples
        if sample.at <= load.began + load.seconds + EVERY
    ]
    results = summarize_clients(load, clients), summarize_server(samples)
    return LoadReport(machine, loaded.model, *results, samples, verified)


def verify_load(config: Config, scratch: Path, loaded: LoadResult, progress: Progress) -> Verification:
    """Compare the greedy answers of a load with plain decoding by the target that `config` names."""
    progress("loading the target")
    return verify(
        loaded.load.outcomes,
        Reference(config, scratch),
        lambda done, all_: progress(f"decoding plainly: {done} of {all_} prompts"),
    )


def compare_learning(
    options: Sequence[str],
    folder: Path,
    prompts: Sequence[str],
    workload: Workload,
    seed: int,
    rounds: Rounds,
    progress: Progress,
) -> LearningCost:
    """Start one server without learning and two with learning (`live`, `shadow`), and load them in turn.

    Args:
        options: options for `omnidraft serve`, without `--learn`.
        folder: an existing, empty folder for the runs of the servers.
        prompts: texts of prompts.
        workload: shares of the kinds of requests.
        seed: random seed of the requests.
        rounds: number and length of rounds.
        progress: called with a description of each step.

    Raises:
        RunError: a server does not start.
    """
    with ExitStack() as opened:
        servers: dict[str, OwnServer] = {}
        for learn in (OFF, "live", "shadow"):
            progress(f"starting a server: {learn}")
            (folder / learn).mkdir()
            server = OwnServer([*options, "--learn", learn], folder / learn, folder / learn / "run")
            servers[learn] = opened.enter_context(server)
        return asyncio.run(compare(servers, prompts, workload, seed, rounds, progress))
