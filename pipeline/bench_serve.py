"""`omnidraft bench-serve`: load on a server, measured from outside, and what learning beside serving costs.

`bench_serve_mix.py` says what is asked, `bench_serve_client.py` asks, `bench_serve_load.py` how often,
`bench_serve_watch.py` looks at the server meanwhile, `bench_serve_figures.py` reckons, `bench_serve_verify.py`
compares greedy answers with the target's own; this file puts them together.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.bench_serve_client import Client
from pipeline.bench_serve_compare import OFF, Comparison, Rounds, compare
from pipeline.bench_serve_figures import ClientFigures, ServerFigures, client_figures, server_figures
from pipeline.bench_serve_load import Load, closed_loop
from pipeline.bench_serve_mix import Mix, requests
from pipeline.bench_serve_server import OwnServer
from pipeline.bench_serve_verify import Reference, Verified, verify
from pipeline.bench_serve_watch import Sample, Watch
from pipeline.config import Config
from pipeline.source import open_sources, stream
from stages.measured import processor
from store.errors import SourceError
from store.events import PromptReceived

EVERY = 2.0  # seconds between two looks at the server, each of which takes it some milliseconds
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How the load is.

    Attributes:
        clients: at the same time, each of which waits for its answer.
        seconds: in which they ask.
        warm_up: seconds of the same load before them, unmeasured.
    """

    clients: int
    seconds: float
    warm_up: float
    mix: Mix
    seed: int


@dataclass(frozen=True)
class Report:
    """All that was found.

    Attributes:
        machine: what the figures depend on.
        model: as the server calls it.
        samples: of the server over time, `at` in seconds from the first.
        verified: None where answers were not compared.
    """

    machine: dict[str, Any]
    model: str
    clients: ClientFigures
    server: ServerFigures
    samples: list[Sample]
    verified: Verified | None


def prompts_of(config: Config) -> list[str]:
    """The texts of all prompts of the sources.

    Raises:
        SourceError: there are none.
    """
    sources = open_sources(config.sources, config.source, seed=config.seed)
    texts = [event.text for event in stream(sources) if isinstance(event, PromptReceived)]
    if not texts:
        raise SourceError(f"the sources must have prompts, but {', '.join(config.sources)} has none")
    return texts


def machine_of() -> dict[str, Any]:
    """What the figures depend on beside the settings. `load`: processes that wanted a core in the last minute."""
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {"processor": processor(), "cores": os.cpu_count(), "load": load}


@dataclass(frozen=True)
class Loaded:
    """A load that is over, with the server's model and how it stood meanwhile."""

    model: str
    load: Load
    samples: list[Sample]


def load_server(
    url: str, key: str | None, pid: int | None, prompts: Sequence[str], plan: Plan, progress: Progress
) -> Loaded:
    """Load a server that runs.

    Args:
        url: of the server.
        key: that it asks for.
        pid: of its process, if it is ours; its memory is looked at.
        progress: is told what goes on.

    Raises:
        RunError: it does not answer.
    """
    return asyncio.run(_load_server(url, key, pid, prompts, plan, progress))


async def _load_server(
    url: str, key: str | None, pid: int | None, prompts: Sequence[str], plan: Plan, progress: Progress
) -> Loaded:
    asked = requests(prompts, plan.mix, plan.seed)
    async with Client(url, key) as client:
        progress(f"warming up for {plan.warm_up:g} s")
        await closed_loop(client.ask, asked, plan.clients, plan.warm_up)
        progress(f"{plan.clients} clients for {plan.seconds:g} s")
        async with Watch(client.metrics, pid, EVERY) as watch:
            load = await closed_loop(client.ask, asked, plan.clients, plan.seconds)
    return Loaded(client.model, load, watch.samples)


def report_of(loaded: Loaded, machine: dict[str, Any], clients: int, verified: Verified | None) -> Report:
    """The report of a load. The server's figures are of the time in which requests were begun."""
    load = loaded.load
    samples = [
        replace(sample, at=sample.at - load.began)
        for sample in loaded.samples
        if sample.at <= load.began + load.seconds + EVERY
    ]
    figures = client_figures(load, clients), server_figures(samples)
    return Report(machine, loaded.model, *figures, samples, verified)


def verified_by(config: Config, scratch: Path, loaded: Loaded, progress: Progress) -> Verified:
    """Compare the greedy answers with plain decoding by the target that `config` names."""
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
    mix: Mix,
    seed: int,
    rounds: Rounds,
    progress: Progress,
) -> Comparison:
    """Start a server without learning and two with it, and load them in turn.

    Args:
        options: of `omnidraft serve`, but not how it learns.
        folder: existing and empty, for their runs.

    Raises:
        RunError: one of them does not start.
    """
    with ExitStack() as opened:
        servers: dict[str, OwnServer] = {}
        for learn in (OFF, "live", "shadow"):
            progress(f"starting a server: {learn}")
            (folder / learn).mkdir()
            server = OwnServer([*options, "--learn", learn], folder / learn, folder / learn / "run")
            servers[learn] = opened.enter_context(server)
        return asyncio.run(compare(servers, prompts, mix, seed, rounds, progress))
