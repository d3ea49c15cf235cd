"""What is made of a load's measurements."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from pipeline.bench_serve_client import Outcome
from pipeline.bench_serve_load import Load
from pipeline.bench_serve_watch import Sample

QUANTILES = (0.5, 0.9, 0.99)
PARTS = 5  # of a run; the first and the last are compared


@dataclass(frozen=True)
class Spread:
    """Quantiles of some measurements. With `count` 0 they mean nothing and are 0."""

    count: int
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float], zeros: int = 0) -> "Spread":
        """Of these, and so many zeros."""
        found = np.concatenate([np.zeros(zeros), np.asarray(values, float)])
        return cls(len(found), *(np.quantile(found, QUANTILES).tolist() if len(found) else (0.0, 0.0, 0.0)))


@dataclass(frozen=True)
class ClientFigures:
    """What clients experienced. Times in seconds.

    Attributes:
        requests: that were begun and have ended.
        left: of these, those whose clients left in the middle.
        errors: of these, those that failed, by kind.
        refused: answers 429, each obeyed.
        tokens_per_second: of completions that ended in time, over that time.
        first_token: from sending to the first text, of streams.
        between_chunks: of one stream, from text to text.
        between_tokens: of one stream, from token to token as they arrive: those of one chunk come 0 apart.
        per_token: of one stream, from the first text to the last, over its tokens less one (vLLM's TPOT).
        end_to_end: of whole completions, streamed or not.
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
    first_token: Spread
    between_chunks: Spread
    between_tokens: Spread
    per_token: Spread
    end_to_end: Spread


def client_figures(load: Load, clients: int | None = None) -> ClientFigures:
    """Figures of a load; `clients` of a closed loop."""
    until = load.began + load.seconds
    good = [outcome for outcome in load.outcomes if outcome.error is None]
    streams = [outcome for outcome in good if outcome.request.stream and outcome.arrivals]
    whole = [outcome for outcome in good if outcome.finish != "left"]
    in_time = [outcome for outcome in whole if outcome.ended <= until]
    gaps = [gap for outcome in streams for gap in _gaps(outcome)]
    return ClientFigures(
        clients=clients,
        seconds=load.seconds,
        requests=len(load.outcomes),
        left=len(good) - len(whole),
        errors=dict(Counter(outcome.error for outcome in load.outcomes if outcome.error)),
        refused=sum(outcome.refused for outcome in load.outcomes),
        tokens=sum(outcome.tokens or 0 for outcome in whole),
        requests_per_second=len(in_time) / load.seconds,
        tokens_per_second=sum(outcome.tokens or 0 for outcome in in_time) / load.seconds,
        first_token=Spread.of([outcome.arrivals[0] - outcome.began for outcome in streams]),
        between_chunks=Spread.of(gaps),
        between_tokens=Spread.of(gaps, sum(map(_together, streams))),
        per_token=Spread.of([pace for outcome in streams if (pace := _per_token(outcome)) is not None]),
        end_to_end=Spread.of([outcome.ended - outcome.began for outcome in whole]),
    )


def _gaps(outcome: Outcome) -> list[float]:
    return np.diff(outcome.arrivals).tolist()


def _together(outcome: Outcome) -> int:
    """Tokens that came with another."""
    return max(0, (outcome.tokens or 0) - len(outcome.arrivals))


def _per_token(outcome: Outcome) -> float | None:
    if outcome.tokens is None or outcome.tokens < 2:
        return None
    return (outcome.arrivals[-1] - outcome.arrivals[0]) / (outcome.tokens - 1)


@dataclass(frozen=True)
class ServerFigures:
    """How the server stood over time. Pairs are of the first fifth and the last; None where it does not tell.

    Attributes:
        acceptance: accepted over proposed target tokens, lookups included.
        model_acceptance: accepted over judged of the drafter model alone, lately, as the server tells it.
        block_efficiency: emitted tokens over target passes, per row.
        tokens_per_second: as the server counts them.
        memory: median of resident bytes.
        memory_slope: bytes per minute, by least squares over all but the first fifth.
        waiting: most requests in the queue, and their median.
        updates: of the drafter that are in service at the end.
        learner_lag, learner_dropped: completed prompts, at the end.
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


def server_figures(samples: Sequence[Sample]) -> ServerFigures:
    """Figures of at least two samples."""
    waiting = [sample.figures["waiting"] for sample in samples if "waiting" in sample.figures]
    last = samples[-1].figures
    return ServerFigures(
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


def _ends(samples: Sequence[Sample], figure: Callable[[Sequence[Sample]], float | None]) -> tuple[float, float] | None:
    """A figure of the first fifth and of the last, two samples at least."""
    size = max(2, len(samples) // PARTS)
    first, last = figure(samples[:size]), figure(samples[-size:])
    return None if first is None or last is None else (first, last)


def rate(samples: Sequence[Sample], above: str, below: str) -> float | None:
    """By how much one counter grew over how much another did; None if that did not."""
    grown = _grown(samples, below)
    return _grown(samples, above) / grown if grown else None


def _per_second(samples: Sequence[Sample]) -> float | None:
    known = "generated" in samples[-1].figures
    return _grown(samples, "generated") / (samples[-1].at - samples[0].at) if known else None


def _grown(samples: Sequence[Sample], name: str) -> float:
    return samples[-1].figures.get(name, 0.0) - samples[0].figures.get(name, 0.0)


def _slope(samples: Sequence[Sample]) -> float | None:
    """Bytes per minute."""
    if len(samples) < 2:
        return None
    minutes, held = [sample.at / 60 for sample in samples], [float(sample.memory or 0) for sample in samples]
    return float(np.polyfit(minutes, held, 1)[0])
