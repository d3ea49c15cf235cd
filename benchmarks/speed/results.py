"""Computes the results of arms from their rounds: medians, quartiles, paired ratios, and shares of time."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from statistics import fmean, median, quantiles, stdev

from benchmarks.speed.work import MeasuredRound, Work

DISTRIBUTION_ERRORS = 4.0  # standard errors between two means from which the distributions count as different


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of a value over rounds, and the value over all rounds together.

    The median excludes costs that only few rounds have, such as updates; `overall` includes them.
    """

    median: float
    lower: float
    upper: float
    overall: float


@dataclass(frozen=True)
class Mean:
    """A mean over prompts and its standard error, which is None for one prompt."""

    value: float
    error: float | None


@dataclass(frozen=True)
class Breakdown:
    """Time of a pipeline arm as shares of its wall time."""

    # decode, translate, verify: time in the stages
    decode: float
    translate: float
    verify: float
    learning: float  # time in which decoding waits for updates
    learning_beside: float  # time of updates on the learner's thread, in parallel with decoding; not part of the sum
    # log, versions, drift: time for the log and its curves, for publishing, and for drift detection
    log: float
    log_beside: float  # processor time of the log's writer thread, in parallel with decoding; not part of the sum
    versions: float
    drift: float
    rest: float  # all other time, such as prompt handling, the loop, and making events


@dataclass(frozen=True)
class ArmResults:
    """Results of one arm."""

    # tokens, seconds: emitted tokens and wall time of all timed rounds
    tokens: int
    seconds: float
    tokens_per_second: Quartiles  # tokens per second, per round
    ratio: Quartiles  # seconds per token of the reference divided by those of this arm, per round; above 1 is faster
    # number of prompts whose tokens differ from the reference's; None when sampling, where they may
    differing: int | None
    # largest difference of the target's logits between the two tokens at which these texts diverge; near 0 is a
    # near tie. None if no prompt differs.
    widest_difference: float | None
    acceptance_rate: float | None  # accepted / judged tokens; None if nothing was judged or the arm does not report it
    block_efficiency: float | None  # tokens per row and target forward; None for arms that are not ours
    # surprisal under the target's distribution, None when greedy. Arms that sample from the target's distribution
    # agree within errors.
    nats_per_token: Mean | None
    breakdown: Breakdown | None  # None for arms that are not ours


def quartiles(values: Sequence[float], overall: float) -> Quartiles:
    """Median and quartiles of one value or more, with the given value over all rounds."""
    lower, _, upper = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Quartiles(median(values), lower, upper, overall)


def mean(values: Sequence[float]) -> Mean:
    """Mean and standard error of one value or more."""
    return Mean(fmean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else None)


def same_distribution(one: Mean | None, other: Mean | None) -> bool:
    """Test whether two mean surprisals may come from one distribution. True if one was not measured."""
    if one is None or other is None or one.error is None or other.error is None:
        return True
    return abs(one.value - other.value) <= DISTRIBUTION_ERRORS * hypot(one.error, other.error)


def summarize_rounds(
    own: Sequence[MeasuredRound],
    reference: Sequence[MeasuredRound],
    *,
    greedy: bool,
    widest_difference: float | None = None,
) -> ArmResults:
    """Compute the results of an arm relative to the reference arm, round by round, on the same prompts."""
    tokens, seconds = sum(one.emitted for one in own), sum(one.seconds for one in own)
    works = [one.work for one in own if one.work is not None]
    blocks = sum(work.blocks for work in works)
    nats = [nats / len(completion) for one in own for nats, completion in zip(one.nats, one.tokens, strict=False)]
    return ArmResults(
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=quartiles([1 / _pace(one) for one in own], tokens / seconds),
        ratio=ratio_of(own, reference),
        differing=len(differing(own, reference)) if greedy else None,
        widest_difference=widest_difference,
        acceptance_rate=_acceptance(own),
        block_efficiency=tokens / blocks if blocks else None,
        nats_per_token=mean(nats) if nats else None,
        breakdown=_breakdown(works, seconds) if works else None,
    )


def ratio_of(own: Sequence[MeasuredRound], reference: Sequence[MeasuredRound]) -> Quartiles:
    """Seconds per token of the reference divided by those of `own`, per round; above 1 is faster."""
    pairs = [_pace(theirs) / _pace(ours) for ours, theirs in zip(own, reference, strict=True)]
    seconds_per_token = [sum(one.seconds for one in arm) / sum(one.emitted for one in arm) for arm in (reference, own)]
    return quartiles(pairs, seconds_per_token[0] / seconds_per_token[1])


def differing(own: Sequence[MeasuredRound], reference: Sequence[MeasuredRound]) -> list[tuple[int, int]]:
    """Round and position of every prompt whose tokens differ from the reference's."""
    return [
        (number, place)
        for number, (ours, theirs) in enumerate(zip(own, reference, strict=True))
        for place, (one, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True))
        if one != other
    ]


def _pace(one: MeasuredRound) -> float:
    """Seconds per token. A completion has at least one token, since end of sequence counts."""
    return one.seconds / one.emitted


def _acceptance(rounds: Sequence[MeasuredRound]) -> float | None:
    works = [one.work for one in rounds if one.work]
    judged = sum(work.judged for work in works)
    return sum(work.accepted for work in works) / judged if judged else None


def _breakdown(works: Sequence[Work], seconds: float) -> Breakdown:
    parts = ("decode", "translate", "verify", "learning", "log", "versions", "drift")
    shares = {part: sum(getattr(work, part) for work in works) / seconds for part in parts}
    rest = 1 - sum(shares.values())
    parallel = {
        part: sum(getattr(work, part) for work in works) / seconds for part in ("learning_beside", "log_beside")
    }
    return Breakdown(**shares, **parallel, rest=rest)
