"""Measures the cost of learning while serving: equal requests at equal times, with and without a learner, in turn."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from statistics import median

from pipeline.bench.server.client import Client, LoadRequest, Workload, arrivals, closed_loop, open_loop, requests
from pipeline.bench.server.results import ClientResults, summarize_clients
from pipeline.bench.server.server import OwnServer, parse_metrics
from pipeline.run.rounds import rotate

OFF = "off"
BAR = 1.25  # required ratio of the p99 time between tokens, with learning over without
SHARE = 0.5  # default request rate, as a share of the throughput under full load


@dataclass(frozen=True)
class Rounds:
    """Number and length of rounds.

    Attributes:
        number: number of rounds; every arm runs in each.
        seconds: length of a round.
        warm_up: seconds of full load per arm before the rounds.
        clients: concurrent clients of the full load.
        rate: requests per second; None for half of what the arm without learning completes under full load.
    """

    number: int
    seconds: float
    warm_up: float
    clients: int
    rate: float | None = None


@dataclass(frozen=True)
class ArmRound:
    """Results of one arm in one round.

    Attributes:
        figures: results seen by clients.
        updates: number of drafter updates in service after the round.
        learner_lag: completed prompts that wait for the learner after the round.
    """

    figures: ClientResults
    updates: float | None
    learner_lag: float | None


@dataclass(frozen=True)
class Ratio:
    """Ratio of a result of an arm to that of the arm without learning, paired by round."""

    median: float
    low: float
    high: float
    rounds: list[float]

    @classmethod
    def from_pairs(cls, ours: Sequence[float], theirs: Sequence[float]) -> "Ratio":
        """Median, minimum and maximum of the ratios of paired values."""
        found = [one / other if other else float("nan") for one, other in zip(ours, theirs, strict=True)]
        return cls(median(found), min(found), max(found), found)


@dataclass(frozen=True)
class LearningCost:
    """Results of all rounds.

    Attributes:
        rate: requests per second.
        rounds: rounds of each arm, by its setting `serve.learn`.
        ratios: ratios of each arm with learning to the arm without, by name of the time; 1 is no cost.
    """

    rate: float
    rounds: dict[str, list[ArmRound]]
    ratios: dict[str, dict[str, Ratio]]


TIMES: Mapping[str, Callable[[ClientResults], float]] = {
    "between tokens, p99": lambda found: found.between_tokens.p99,
    "between chunks, p99": lambda found: found.between_chunks.p99,
    "between chunks, p50": lambda found: found.between_chunks.p50,
    "per token, p50": lambda found: found.per_token.p50,
    "first token, p99": lambda found: found.first_token.p99,
}


async def compare(
    servers: Mapping[str, OwnServer],
    prompts: Sequence[str],
    workload: Workload,
    seed: int,
    rounds: Rounds,
    progress: Callable[[str], None],
) -> LearningCost:
    """Load the servers in turn. The other servers are suspended, so that their learners do not compute.

    Args:
        servers: running servers by their setting `serve.learn`, which must include `off`.
        prompts: texts of prompts.
        workload: shares of the kinds of requests.
        seed: random seed of the requests and of their times.
        rounds: number and length of rounds.
        progress: called with a description of each step.
    """
    for server in servers.values():
        server.pause()
    full: dict[str, ClientResults] = {}
    for name, server in servers.items():
        progress(f"warming up: {name}")
        full[name] = await _warm_up(server, requests(prompts, workload, seed), rounds)
    rate = rounds.rate or max(SHARE * full[OFF].requests_per_second, 1 / rounds.seconds)
    stream = requests(prompts, workload, seed + 1)
    found: dict[str, list[ArmRound]] = {name: [] for name in servers}
    for number in range(rounds.number):
        at = arrivals(rate, rounds.seconds, seed + number)
        sent = list(islice(stream, len(at)))
        for name in rotate(list(servers), number):
            progress(f"round {number + 1} of {rounds.number}: {name}, {rate:.2f} requests per second")
            found[name].append(await _play(servers[name], sent, at, rounds.seconds))
    return LearningCost(rate, found, ratios(found))


def ratios(rounds: Mapping[str, Sequence[ArmRound]]) -> dict[str, dict[str, Ratio]]:
    """Ratios of every arm to the arm `off`, by name of the time."""
    off = [one.figures for one in rounds[OFF]]
    return {
        name: {
            title: Ratio.from_pairs([time_of(one.figures) for one in own], [time_of(one) for one in off])
            for title, time_of in TIMES.items()
        }
        for name, own in rounds.items()
        if name != OFF
    }


@asynccontextmanager
async def _resumed_client(server: OwnServer) -> AsyncIterator[Client]:
    """Resume a server and connect to it; suspend it on exit. Connections of earlier rounds would be too old."""
    server.resume()
    async with Client(server.url) as client:
        yield client
    server.pause()


async def _warm_up(server: OwnServer, sent: Iterator[LoadRequest], rounds: Rounds) -> ClientResults:
    async with _resumed_client(server) as client:
        load = await closed_loop(client.send, sent, rounds.clients, rounds.warm_up)
    return summarize_clients(load, rounds.clients)


async def _play(server: OwnServer, sent: Sequence[LoadRequest], at: Sequence[float], seconds: float) -> ArmRound:
    async with _resumed_client(server) as client:
        load = await open_loop(client.send, sent, at, seconds)
        metrics = parse_metrics(await client.metrics() or "")
    return ArmRound(summarize_clients(load), metrics.get("drafter_version"), metrics.get("learner_lag"))
