"""Computes the results of a load from its measurements."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from pipeline.bench.server.client import LoadOutcomes, Outcome
from pipeline.bench.server.server import Sample

QUANTILES = (0.5, 0.9, 0.99)
PARTS = 5  # parts of a load, of which the first and the last are compared


@dataclass(frozen=True)
class Percentiles:
    """Quantiles of `count` measurements; all 0 if there are none."""

    count: int
    p50: float
    p90: float
    p99: float

    @classmethod
    def from_values(cls, values: Sequence[float], zeros: int = 0) -> "Percentiles":
        """Quantiles of the values and of `zeros` additional zeros."""
        found = np.concatenate([np.zeros(zeros), np.asarray(values, float)])
        return cls(len(found), *(np.quantile(found, QUANTILES).tolist() if len(found) else (0.0, 0.0, 0.0)))


@dataclass(frozen=True)
class ClientResults:
    """Results seen by clients. Times in seconds.

    Attributes:
        clients: number of concurrent clients; None for an open loop.
        seconds: length of the measured interval.
        requests: number of requests sent and ended.
        left: number of these whose clients disconnected midway.
        errors: number of these that failed, by kind.
        refused: number of answers 429, each followed by another attempt.
        tokens: number of tokens of whole completions.
        requests_per_second, tokens_per_second: rates of completions that ended within the interval.
        first_token: time from sending to the first text of a stream (TTFT).
        between_chunks: time between two texts of a stream.
        between_tokens: time between two tokens of a stream as they arrive, 0 within a chunk (ITL).
        per_token: time from the first text of a stream to the last, over its tokens less one (vLLM's TPOT).
        end_to_end: time of whole completions, streamed or not.
    """

    clients: int | None
    seconds: float
    requests: int
    left: int
    errors: dict[str, int]
    refused: int
    tokens: int
    requests_per_second: float
    tokens_per_second: float
    first_token: Percentiles
    between_chunks: Percentiles
    between_tokens: Percentiles
    per_token: Percentiles
    end_to_end: Percentiles


def summarize_clients(load: LoadOutcomes, clients: int | None = None) -> ClientResults:
    """Compute the results of a load. `clients` is the number of clients of a closed loop."""
    until = load.began + load.seconds
    good = [outcome for outcome in load.outcomes if outcome.error is None]
    streams = [outcome for outcome in good if outcome.request.stream and outcome.arrivals]
    whole = [outcome for outcome in good if outcome.finish != "left"]
    in_time = [outcome for outcome in whole if outcome.ended <= until]
    gaps = [gap for outcome in streams for gap in _gaps(outcome)]
    return ClientResults(
        clients=clients,
        seconds=load.seconds,
        requests=len(load.outcomes),
        left=len(good) - len(whole),
        errors=dict(Counter(outcome.error for outcome in load.outcomes if outcome.error)),
        refused=sum(outcome.refused for outcome in load.outcomes),
        tokens=sum(outcome.tokens or 0 for outcome in whole),
        requests_per_second=len(in_time) / load.seconds,
        tokens_per_second=sum(outcome.tokens or 0 for outcome in in_time) / load.seconds,
        first_token=Percentiles.from_values([outcome.arrivals[0] - outcome.began for outcome in streams]),
        between_chunks=Percentiles.from_values(gaps),
        between_tokens=Percentiles.from_values(gaps, sum(map(_together, streams))),
        per_token=Percentiles.from_values([pace for outcome in streams if (pace := _per_token(outcome)) is not None]),
        end_to_end=Percentiles.from_values([outcome.ended - outcome.began for outcome in whole]),
    )


def _gaps(outcome: Outcome) -> list[float]:
    return np.diff(outcome.arrivals).tolist()


def _together(outcome: Outcome) -> int:
    """Number of tokens that arrived in the chunk of another one."""
    return max(0, (outcome.tokens or 0) - len(outcome.arrivals))


def _per_token(outcome: Outcome) -> float | None:
    if outcome.tokens is None or outcome.tokens < 2:
        return None
    return (outcome.arrivals[-1] - outcome.arrivals[0]) / (outcome.tokens - 1)


@dataclass(frozen=True)
class ServerResults:
    """Results computed from the server's metrics. Pairs compare the first fifth with the last; None if not reported.

    Attributes:
        acceptance: accepted / proposed target tokens, lookups included.
        model_acceptance: recent accepted / judged tokens of the drafter model, as the server reports it.
        block_efficiency: emitted tokens per target pass and row.
        tokens_per_second: generated tokens per second, as the server counts them.
        memory: median of resident bytes.
        memory_slope: growth in bytes per minute, by least squares over all but the first fifth.
        waiting: maximum and median of queued requests.
        updates: number of drafter updates in service at the end.
        learner_lag, learner_dropped: completed prompts waiting for the learner, and dropped by it, at the end.
    """

    acceptance: tuple[float, float] | None
    model_acceptance: tuple[float, float] | None
    block_efficiency: tuple[float, float] | None
    tokens_per_second: tuple[float, float] | None
    memory: tuple[float, float] | None
    memory_slope: float | None
    waiting: tuple[float, float] | None
    updates: float | None
    learner_lag: float | None
    learner_dropped: float | None


def summarize_server(samples: Sequence[Sample]) -> ServerResults:
    """Compute the results of two samples or more."""
    waiting = [sample.figures["waiting"] for sample in samples if "waiting" in sample.figures]
    last = samples[-1].figures
    return ServerResults(
        acceptance=_ends(samples, lambda part: rate(part, "accepted", "proposed")),
        model_acceptance=_ends(samples, lambda part: part[-1].figures.get("model_acceptance")),
        block_efficiency=_ends(samples, lambda part: rate(part, "emitted", "blocks")),
        tokens_per_second=_ends(samples, _per_second),
        memory=_ends(samples, lambda part: float(median(sample.memory or 0 for sample in part)) or None),
        memory_slope=_slope([sample for sample in samples[len(samples) // PARTS :] if sample.memory]),
        waiting=(max(waiting), median(waiting)) if waiting else None,
        updates=last.get("drafter_version"),
        learner_lag=last.get("learner_lag"),
        learner_dropped=last.get("learner_dropped"),
    )


def _ends(samples: Sequence[Sample], value: Callable[[Sequence[Sample]], float | None]) -> tuple[float, float] | None:
    """A value of the first fifth and of the last, each at least two samples."""
    size = max(2, len(samples) // PARTS)
    first, last = value(samples[:size]), value(samples[-size:])
    return None if first is None or last is None else (first, last)


def rate(samples: Sequence[Sample], above: str, below: str) -> float | None:
    """Growth of the counter `above` divided by that of `below`; None if `below` did not grow."""
    grown = _grown(samples, below)
    return _grown(samples, above) / grown if grown else None


def _per_second(samples: Sequence[Sample]) -> float | None:
    known = "generated" in samples[-1].figures
    return _grown(samples, "generated") / (samples[-1].at - samples[0].at) if known else None


def _grown(samples: Sequence[Sample], name: str) -> float:
    return samples[-1].figures.get(name, 0.0) - samples[0].figures.get(name, 0.0)


def _slope(samples: Sequence[Sample]) -> float | None:
    """Growth of memory in bytes per minute; None for less than two samples."""
    if len(samples) < 2:
        return None
    minutes, held = [sample.at / 60 for sample in samples], [float(sample.memory or 0) for sample in samples]
    return float(np.polyfit(minutes, held, 1)[0])
