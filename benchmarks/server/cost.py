"""What learning costs a server under load: equal requests at equal times, with and without a learner, in turn."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from statistics import median

import numpy as np

from benchmarks.server.client import Client, Outcome, draw_arrivals, load_at, load_fully, make_requests
from benchmarks.server.server import OwnServer, parse_metrics
from benchmarks.tables import Table
from pipeline.run.rounds import rotate

OFF = "off"
SHARE = 0.5  # default request rate, as a share of the throughput under full load
CLIENTS = 16  # of the full load


@dataclass(frozen=True)
class ServerRound:
    """Results of one server in one round. Times in seconds."""

    tokens_per_second: float
    first_token: float  # median time from sending to the first text
    chunks_p50: float  # time between two texts of a stream
    chunks_p99: float
    errors: int
    updates: float  # drafter updates in service after the round
    waiting: float  # completed prompts that wait for the learner after the round


TIMES: Mapping[str, Callable[[ServerRound], float]] = {
    "first token, p50": lambda one: one.first_token,
    "between chunks, p50": lambda one: one.chunks_p50,
    "between chunks, p99": lambda one: one.chunks_p99,
}


async def compare(
    servers: Mapping[str, OwnServer],
    prompts: Sequence[str],
    rounds: int,
    seconds: float,
    rate: float | None,
    report: Callable[[str], None],
) -> tuple[float, dict[str, list[ServerRound]]]:
    """Load the servers in turn; the others are suspended, so that their learners do not compute.

    Args:
        servers: running servers by their setting `serve.learn`, `off` among them.
        seconds: of a round, and of the full load before.
        rate: requests per second; None for half of what the server without learning completes under full load.

    Returns:
        the rate, and the rounds of each server.
    """
    for server in servers.values():
        server.pause()
    full: dict[str, list[Outcome]] = {}
    for name, server in servers.items():
        report(f"warming up: {name}")
        async with _resumed(server) as client:
            full[name] = await load_fully(client, make_requests(prompts, 0), CLIENTS, seconds)
    rate = rate or max(SHARE * len(full[OFF]) / seconds, 1 / seconds)
    stream, found = make_requests(prompts, 1), {name: list[ServerRound]() for name in servers}
    for number in range(rounds):
        at = draw_arrivals(rate, seconds, number)
        sent = list(islice(stream, len(at)))
        for name in rotate(list(servers), number):
            report(f"round {number + 1} of {rounds}: {name}, {rate:.2f} requests per second")
            async with _resumed(servers[name]) as client:
                outcomes = await load_at(client, sent, at)
                metrics = parse_metrics(await client.metrics())
            found[name].append(summarize(outcomes, metrics))
    return rate, found


@asynccontextmanager
async def _resumed(server: OwnServer) -> AsyncIterator[Client]:
    """Resume a server and connect to it; suspend it on exit. Connections of earlier rounds would be too old."""
    server.resume()
    async with Client(server.url) as client:
        yield client
    server.pause()


def summarize(outcomes: Sequence[Outcome], metrics: Mapping[str, float]) -> ServerRound:
    """Compute the results of a round."""
    good = [one for one in outcomes if not one.error and one.arrivals]
    gaps = [gap for one in good for gap in one.gaps]
    seconds = max((one.ended for one in good), default=1.0) - min((one.began for one in good), default=0.0)
    p50, p99 = np.quantile(gaps, (0.5, 0.99)).tolist() if gaps else (0.0, 0.0)
    return ServerRound(
        tokens_per_second=sum(one.tokens for one in good) / seconds,
        first_token=median([one.arrivals[0] - one.began for one in good] or [0.0]),
        chunks_p50=p50,
        chunks_p99=p99,
        errors=len(outcomes) - len(good),
        updates=metrics.get("updates", 0.0),
        waiting=metrics.get("waiting", 0.0),
    )


def make_table(rounds: Mapping[str, Sequence[ServerRound]]) -> Table:
    """One row per server: medians over rounds, and the ratio of each time to the server without learning."""
    heads = ("learn", "tokens/s", *(f"{title}, ms" for title in TIMES), "errors", "updates", "waiting for the learner")
    rows = [
        (
            name,
            f"{median(one.tokens_per_second for one in own):.1f}",
            *(_time(own, rounds[OFF], time_of) for time_of in TIMES.values()),
            f"{sum(one.errors for one in own)}",
            f"{own[-1].updates:.0f}",
            f"{own[-1].waiting:.0f}",
        )
        for name, own in rounds.items()
    ]
    notes = ("In brackets: ratio to the server without learning, paired by round, with its range.",)
    return Table(heads, rows, "What learning costs a server under load", notes)


def _time(own: Sequence[ServerRound], off: Sequence[ServerRound], time_of: Callable[[ServerRound], float]) -> str:
    value = f"{median(map(time_of, own)) * 1e3:.1f}"
    ratios = [time_of(one) / time_of(other) for one, other in zip(own, off, strict=True) if time_of(other)]
    return f"{value} ({median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f})" if ratios and own != off else value
