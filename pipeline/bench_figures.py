"""What rounds of arms mean: medians with their spread, ratios paired by round, and where the time went."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from statistics import fmean, median, quantiles, stdev

from pipeline.bench_arms import Round, Work
from pipeline.bench_limit import Costs, limit_of

LAW_ERRORS = 4.0  # standard errors between two means that no chance explains


@dataclass(frozen=True)
class Spread:
    """Of one figure per round: the median, the quartiles, and the figure over all rounds together.

    The median leaves out what few rounds pay for, such as updates; `overall` does not.
    """

    median: float
    lower: float
    upper: float
    overall: float


@dataclass(frozen=True)
class Mean:
    """A mean over prompts and its standard error; None when it is of one prompt."""

    value: float
    error: float | None


@dataclass(frozen=True)
class Breakdown:
    """Where the seconds of a pipeline arm went, as shares of its wall time.

    Attributes:
        decode, translate, verify: the stages.
        learning: standing still for updates.
        learning_beside: computing updates on their own thread meanwhile; it slows the others down, but is no part of
            the sum.
        log, versions, drift: the log and its curves, publishing, and the watch for drift; measured where they are kept.
        log_beside: writing the log on its own thread meanwhile; no part of the sum either.
        rest: all else, such as reading the prompts, the loop, and making events.
        translation_per_target_step: translation over the bare cost of a target pass of one token per row.
    """

    decode: float
    translate: float
    verify: float
    learning: float
    learning_beside: float
    log: float
    log_beside: float
    versions: float
    drift: float
    rest: float
    translation_per_target_step: float


@dataclass(frozen=True)
class Efficiency:
    """A pipeline arm against its limit.

    Attributes:
        value: the limit's seconds over the arm's, reading the prompts counted in both.
        blocks: the limit without the reading, over the same seconds.
        reading, drafting, verifying: seconds of the limit over all rounds.
    """

    value: Spread
    blocks: float
    reading: float
    drafting: float
    verifying: float


@dataclass(frozen=True)
class Figures:
    """What one arm showed.

    Attributes:
        tokens, seconds: emitted, over all timed rounds.
        tokens_per_second: per round.
        ratio: the reference's seconds per token over this arm's, per round; above 1 is faster.
        differing: prompts whose tokens are not the reference's; None when sampling, where they may differ.
        widest_difference: of these, the largest difference of the target's logits between the two tokens where the
            texts part; about 0 is a near tie. None where no prompt differs.
        acceptance_rate: accepted / judged; None where nothing was judged or the arm does not tell.
        block_efficiency: tokens per row and target forward; None for arms that are not ours.
        nats_per_token: surprisal under the target's law, None when greedy. Arms that keep the law agree within errors.
        efficiency, breakdown: None for arms that are not ours.
    """

    tokens: int
    seconds: float
    tokens_per_second: Spread
    ratio: Spread
    differing: int | None
    widest_difference: float | None
    acceptance_rate: float | None
    block_efficiency: float | None
    nats_per_token: Mean | None
    efficiency: Efficiency | None
    breakdown: Breakdown | None


def spread(values: Sequence[float], overall: float) -> Spread:
    """Median and quartiles of one value or more."""
    lower, _, upper = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Spread(median(values), lower, upper, overall)


def mean(values: Sequence[float]) -> Mean:
    """Mean and standard error of one value or more."""
    return Mean(fmean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else None)


def same_law(one: Mean | None, other: Mean | None) -> bool:
    """Whether two mean surprisals may come from one law; True where that was not measured."""
    if one is None or other is None or one.error is None or other.error is None:
        return True
    return abs(one.value - other.value) <= LAW_ERRORS * hypot(one.error, other.error)


def figures(
    own: Sequence[Round],
    reference: Sequence[Round],
    costs: Costs | None,
    *,
    greedy: bool,
    widest_difference: float | None = None,
) -> Figures:
    """Compare an arm with the reference arm, round by round. Both have the same prompts in the same order.

    Args:
        own, reference: of the two arms.
        costs: of bare forward passes; None where no arm is ours.
        greedy: whether equal tokens are expected.
        widest_difference: as in `Figures`.
    """
    tokens, seconds = sum(one.emitted for one in own), sum(one.seconds for one in own)
    works = [one.work for one in own if one.work is not None]
    blocks = sum(work.blocks for work in works)
    nats = [nats / len(completion) for one in own for nats, completion in zip(one.nats, one.tokens, strict=False)]
    return Figures(
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=spread([1 / _pace(one) for one in own], tokens / seconds),
        ratio=ratio_of(own, reference),
        differing=len(differing(own, reference)) if greedy else None,
        widest_difference=widest_difference,
        acceptance_rate=_acceptance(own),
        block_efficiency=tokens / blocks if blocks else None,
        nats_per_token=mean(nats) if nats else None,
        efficiency=_efficiency(own, works, costs) if works and costs else None,
        breakdown=_breakdown(works, seconds, costs) if works and costs else None,
    )


def ratio_of(own: Sequence[Round], reference: Sequence[Round]) -> Spread:
    """The reference's seconds per token over the own ones, per round; above 1 is faster."""
    pairs = [_pace(theirs) / _pace(ours) for ours, theirs in zip(own, reference, strict=True)]
    seconds_per_token = [sum(one.seconds for one in arm) / sum(one.emitted for one in arm) for arm in (reference, own)]
    return spread(pairs, seconds_per_token[0] / seconds_per_token[1])


def differing(own: Sequence[Round], reference: Sequence[Round]) -> list[tuple[int, int]]:
    """Round and place of every prompt whose tokens are not the reference's."""
    return [
        (number, place)
        for number, (ours, theirs) in enumerate(zip(own, reference, strict=True))
        for place, (one, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True))
        if one != other
    ]


def _pace(one: Round) -> float:
    """Seconds per token. A completion has at least one token: the end of the sequence is one."""
    return one.seconds / one.emitted


def _acceptance(rounds: Sequence[Round]) -> float | None:
    works = [one.work for one in rounds if one.work]
    judged = sum(work.judged for work in works)
    return sum(work.accepted for work in works) / judged if judged else None


def _efficiency(own: Sequence[Round], works: Sequence[Work], costs: Costs) -> Efficiency:
    limits = [limit_of(work, costs) for work in works]
    seconds = sum(one.seconds for one in own)
    reading, drafting, verifying = (
        sum(parts) for parts in zip(*((one.reading, one.drafting, one.verifying) for one in limits), strict=True)
    )
    shares = [limit.seconds / one.seconds for limit, one in zip(limits, own, strict=True)]
    overall = (reading + drafting + verifying) / seconds
    return Efficiency(spread(shares, overall), (drafting + verifying) / seconds, reading, drafting, verifying)


def _breakdown(works: Sequence[Work], seconds: float, costs: Costs) -> Breakdown:
    parts = ("decode", "translate", "verify", "learning", "log", "versions", "drift")
    shares = {part: sum(getattr(work, part) for work in works) / seconds for part in parts}
    steps = [step for work in works for step in work.steps]
    one_token_each = sum(costs.target_pass(len(step.proposed), len(step.proposed)) for step in steps)
    translation = sum(work.translate for work in works) / one_token_each
    rest = 1 - sum(shares.values())
    beside = {part: sum(getattr(work, part) for work in works) / seconds for part in ("learning_beside", "log_beside")}
    return Breakdown(**shares, **beside, rest=rest, translation_per_target_step=translation)
