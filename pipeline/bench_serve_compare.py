"""What learning beside serving costs: the same requests at the same times, with a learner and without, in turn."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from statistics import median

from pipeline.bench_serve_client import Client
from pipeline.bench_serve_figures import ClientFigures, client_figures
from pipeline.bench_serve_load import closed_loop, open_loop
from pipeline.bench_serve_mix import Mix, Request, arrivals, requests
from pipeline.bench_serve_server import OwnServer
from pipeline.bench_serve_watch import read_figures

OFF = "off"
BAR = 1.25  # of the p99 of the time between tokens, with learning over without
SHARE = 0.5  # of the throughput under full load, where no rate is given


@dataclass(frozen=True)
class Rounds:
    """How much is measured.

    Attributes:
        number, seconds: of rounds, each of which every arm plays.
        warm_up: seconds of full load before them, per arm.
        clients: of the full load.
        rate: requests per second; None for half of what the arm without learning completes under full load.
    """

    number: int
    seconds: float
    warm_up: float
    clients: int
    rate: float | None = None


@dataclass(frozen=True)
class ArmRound:
    """What one arm did in one round. `learned`: updates in service, and completed prompts that wait, afterwards."""

    figures: ClientFigures
    updates: float | None
    learner_lag: float | None


@dataclass(frozen=True)
class Ratio:
    """Of one figure of an arm to that of the arm without learning, in the same rounds."""

    median: float
    low: float
    high: float
    rounds: list[float]

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> "Ratio":
        """Of paired figures."""
        found = [one / other if other else float("nan") for one, other in zip(ours, theirs, strict=True)]
        return cls(median(found), min(found), max(found), found)


@dataclass(frozen=True)
class Comparison:
    """All rounds of all arms, by the setting `serve.learn`.

    Attributes:
        rate: requests per second.
        ratios: of every arm that learns, by figure; of times, so 1 is no cost.
    """

    rate: float
    rounds: dict[str, list[ArmRound]]
    ratios: dict[str, dict[str, Ratio]]


FIGURES: Mapping[str, Callable[[ClientFigures], float]] = {
    "between tokens, p99": lambda found: found.between_tokens.p99,
    "between chunks, p99": lambda found: found.between_chunks.p99,
    "between chunks, p50": lambda found: found.between_chunks.p50,
    "per token, p50": lambda found: found.per_token.p50,
    "first token, p99": lambda found: found.first_token.p99,
}


async def compare(
    servers: Mapping[str, OwnServer],
    prompts: Sequence[str],
    mix: Mix,
    seed: int,
    rounds: Rounds,
    progress: Callable[[str], None],
) -> Comparison:
    """Load the servers in turn; those that are not are paused, so that their learners compute nothing meanwhile.

    Args:
        servers: by the setting `serve.learn`, `off` among them; running.
        progress: is told what goes on.
    """
    for server in servers.values():
        server.pause()
    full: dict[str, ClientFigures] = {}
    for name, server in servers.items():
        progress(f"warming up: {name}")
        full[name] = await _warm_up(server, requests(prompts, mix, seed), rounds)
    rate = rounds.rate or max(SHARE * full[OFF].requests_per_second, 1 / rounds.seconds)
    stream = requests(prompts, mix, seed + 1)
    found: dict[str, list[ArmRound]] = {name: [] for name in servers}
    for number in range(rounds.number):
        at = arrivals(rate, rounds.seconds, seed + number)
        asked = list(islice(stream, len(at)))
        for name in _rotated(list(servers), number):
            progress(f"round {number + 1} of {rounds.number}: {name}, {rate:.2f} requests per second")
            found[name].append(await _play(servers[name], asked, at, rounds.seconds))
    return Comparison(rate, found, ratios(found))


def ratios(rounds: Mapping[str, Sequence[ArmRound]]) -> dict[str, dict[str, Ratio]]:
    """Of every arm but `off`, to it."""
    off = [one.figures for one in rounds[OFF]]
    return {
        name: {
            title: Ratio.of([figure(one.figures) for one in own], [figure(one) for one in off])
            for title, figure in FIGURES.items()
        }
        for name, own in rounds.items()
        if name != OFF
    }


def _rotated(names: list[str], number: int) -> list[str]:
    first = number % len(names)
    return names[first:] + names[:first]


@asynccontextmanager
async def _awake(server: OwnServer) -> AsyncIterator[Client]:
    """A client of a server that goes on for so long. Connections of earlier rounds would be too old."""
    server.resume()
    async with Client(server.url) as client:
        yield client
    server.pause()


async def _warm_up(server: OwnServer, asked: Iterator[Request], rounds: Rounds) -> ClientFigures:
    async with _awake(server) as client:
        load = await closed_loop(client.ask, asked, rounds.clients, rounds.warm_up)
    return client_figures(load, rounds.clients)


async def _play(server: OwnServer, asked: Sequence[Request], at: Sequence[float], seconds: float) -> ArmRound:
    async with _awake(server) as client:
        load = await open_loop(client.ask, asked, at, seconds)
        told = read_figures(await client.metrics() or "")
    return ArmRound(client_figures(load), told.get("drafter_version"), told.get("learner_lag"))
