"""`omnidraft versions compare`: two versions on the same prompts with the same random draws, in turn for every prompt.

Nothing learns. Each side begins with the n-grams that its version holds and adds those that it emits, as in
service. By default the drafters alone are compared: every draft has the same length, and nothing is copied,
because a head that drafts less when it is unsure would raise the acceptance without a better drafter. With
`as_served` each version's own head decides, and drafts are copied when that is faster.

A rate is a ratio of sums over prompts. Its interval is the percentile bootstrap's over prompts: these are resampled
with replacement, both sides' numbers of a prompt together, because tokens within a prompt are not independent.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.assembly.admission import Admission
from pipeline.assembly.models import Models, load_drafter, load_models
from pipeline.assembly.probe import TOKENS
from pipeline.assembly.probe import prompts as probe_prompts
from pipeline.config.settings import Config
from pipeline.run.rounds import LoopInRounds, first_difference
from pipeline.sources.stream import open_source
from pipeline.versions.sides import DRAFTERS_ALONE, FROZEN, Side, find_common_target
from stages.engine.models.huggingface import load_tokenizer, logit_difference
from stages.vocabulary.pair import pair
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import CorruptError, SourceError
from store.events import DraftSource, PromptReceived

RESAMPLES = 2000
INTERVAL = 0.95
MIN_PROMPTS = 8  # with fewer, too few different samples can be drawn for an interval
_SEED = 0  # seed of the resampling: the same prompts give the same interval
Numbers = npt.NDArray[np.float64]
ACCEPTANCE = "acceptance_rate"
SPEED = "tokens_per_second"  # its change is a ratio
LOG = logging.getLogger("omnidraft.versions")
WARM_UP = "The first words of a text that is not measured"
FIRST_PROMPTS = 4  # after which progress shows an interval, before there is a verdict
EARLY = 0.995  # level of the interval that may end a comparison early
SAME = 0.02  # a smaller difference of acceptance is none to a user: about 1% of the speed
PROBE = "probe"  # names the fixed probe in place of a source
# How the fixed probe's prompts are completed where nothing else is chosen: as by the probe that scores each version.
AS_PROBED = {"source.chat": False, "sampling.max_new_tokens": TOKENS}
_TITLES = {
    ACCEPTANCE: "acceptance (accepted / judged)",
    "mean_accepted_length": "accepted tokens per drafted pass",
    "block_efficiency": "tokens per target pass",
    SPEED: "tokens per second (median)",
}


@dataclass(frozen=True)
class PassageCounts:
    """Counts of one prompt on one side."""

    tokens: tuple[int, ...]  # emitted target ids
    blocks: int  # target forwards
    model_blocks: int  # blocks without a copied draft
    judged: int  # tokens of the drafter model
    accepted: int
    seconds: float  # wall time, prefill included


@dataclass(frozen=True)
class PairedMetric:
    """A metric of both sides and its change; None where it cannot be computed."""

    first: float | None  # over all prompts; for speed, the median of the prompts
    second: float | None
    change: float | None  # the second less the first or, for speed, the median over prompts of second over first
    low: float | None  # bounds of the change's interval; None for fewer than `MIN_PROMPTS` prompts
    high: float | None


# Numerator and denominator of every rate, summed over prompts.
RATES: dict[str, tuple[Callable[[PassageCounts], float], Callable[[PassageCounts], float]]] = {
    ACCEPTANCE: (lambda one: one.accepted, lambda one: one.judged),
    "mean_accepted_length": (lambda one: one.accepted, lambda one: one.model_blocks),
    "block_efficiency": (lambda one: len(one.tokens), lambda one: one.blocks),
}


def compare_counts(
    first: Sequence[PassageCounts],
    second: Sequence[PassageCounts],
    *,
    level: float = INTERVAL,
    least: int = MIN_PROMPTS,
) -> dict[str, PairedMetric]:
    """Compute all metrics by name. Both sides have the same prompts in the same order, at least one.

    `level`: of the intervals, which fewer than `least` prompts do not have.

    The tokens per second are medians over prompts. The sides took turns, so that both times of a prompt met the same
    load of the machine: their ratio is more reliable than the ratio of the totals, and its median more than its mean.

    >>> one, other = [PassageCounts((1, 2), 2, 2, 2, 0, 1.0)] * 8, [PassageCounts((1, 2), 1, 1, 1, 1, 0.5)] * 8
    >>> compare_counts(one, other)["acceptance_rate"]
    PairedMetric(first=0.0, second=1.0, change=1.0, low=1.0, high=1.0)
    >>> compare_counts(one, other)["tokens_per_second"]
    PairedMetric(first=2.0, second=4.0, change=2.0, low=2.0, high=2.0)
    """
    prompts = len(first)
    resamples = RESAMPLES if prompts >= least else 0  # all samples of one prompt are equal
    drawn = np.random.Generator(np.random.Philox(_SEED)).integers(0, prompts, (resamples, prompts))
    samples = np.vstack([np.arange(prompts), drawn])  # indices of prompts; the first sample is all of them
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {}
        for name, parts in RATES.items():
            sums = [
                [np.array([part(one) for one in side], float)[samples].sum(1) for part in parts]
                for side in (first, second)
            ]
            rates = [above / below for above, below in sums]
            found[name] = _make_metric(rates[0][0], rates[1][0], rates[1] - rates[0], level)
        speeds = [
            np.array([len(one.tokens) for one in side]) / [one.seconds for one in side] for side in (first, second)
        ]
        before, after = (float(np.median(side)) for side in speeds)
        found[SPEED] = _make_metric(before, after, np.median((speeds[1] / speeds[0])[samples], axis=1), level)
    return found


def _make_metric(first: float, second: float, changes: Numbers, level: float) -> PairedMetric:
    """Make a metric of its change over all prompts, which comes first, and over the samples of them."""
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(changes[1:], [tail, 100 - tail]) if len(changes) > 1 else (np.nan, np.nan)
    values = (first, second, changes[0], low, high)
    return PairedMetric(*(float(value) if isfinite(value) else None for value in values))


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison."""

    sides: tuple[str, str]  # labels of both versions
    numbers: tuple[int | None, int | None]  # in the registry; None for folders
    settings: dict[str, Any]  # that reproduce the comparison
    prompts: tuple[str, ...]  # their ids
    metrics: dict[str, PairedMetric]  # by name
    passages: tuple[tuple[PassageCounts, ...], tuple[PassageCounts, ...]]  # of both sides, by prompt
    planned: int = 0  # prompts that would have been completed, had the difference not been sure before

    def to_json(self) -> dict[str, Any]:
        """Convert everything but the tokens to JSON values."""
        counts = [
            {"prompt": prompt}
            | {side: asdict(one) | {"tokens": len(one.tokens)} for side, one in (("first", first), ("second", second))}
            for prompt, first, second in zip(self.prompts, *self.passages, strict=True)
        ]
        return {
            "sides": self.sides,
            "numbers": self.numbers,
            "interval": {"level": INTERVAL, "method": "percentile bootstrap over prompts", "resamples": RESAMPLES},
            "figures": {name: asdict(metric) for name, metric in self.metrics.items()},
            "settings": self.settings,
            "prompts": counts,
        }

    def flatten_metrics(self) -> dict[str, float]:
        """Return the metrics for MLflow, by names such as `acceptance_rate/change`."""
        values = {f"{name}/{part}": value for name, one in self.metrics.items() for part, value in asdict(one).items()}
        return {"prompts": float(len(self.prompts))} | {
            name: value for name, value in values.items() if value is not None
        }


def make_comparison_config(
    config: Config, *, target: str | None, sides: tuple[Side, Side], as_served: bool, probe: str | None = None
) -> Config:
    """Make the settings of a comparison: without learning, one prompt at a time."""
    chosen = {"targets": (target or find_common_target(*sides),), "sources": (probe or PROBE,)}
    return config.with_overrides({**chosen, **FROZEN, **({} if as_served else DRAFTERS_ALONE)})


def read_prompts(config: Config, probe: str | None) -> list[PromptReceived]:
    """Read the prompts of a source, up to `source.limit`, or the fixed probe's; skip rows that are no prompts.

    The probe's kinds take turns: a comparison may end early, and must not have seen docs alone.
    """
    if probe is None:
        kinds = [list(own) for _, own in groupby(probe_prompts(), key=lambda one: one.dataset)]
        return list(chain(*zip(*kinds, strict=True)))[: config.source.limit]
    source = open_source(probe, config.source, seed=config.seed)
    found = [event for event in source.read(0) if isinstance(event, PromptReceived)]
    if not found:
        raise SourceError(f"a probe must hold prompts, but '{probe}' has none; see --set source.prompt_field")
    return found


def make_arms(config: Config, sides: tuple[Side, Side], uri: str, scratch: Path) -> tuple[LoopInRounds, LoopInRounds]:
    """Make both sides' loops over one copy of the target, each with its own caches."""
    settings = config.with_overrides({"drafter": str(sides[0].folder)})
    (first,) = load_models(settings, uri, scratch / "fetched")
    models = first, replace_drafter(config, first, sides[1].folder)
    for side, own in zip(sides, models, strict=True):
        if own.pair.digest != side.manifest["pair"]:
            LOG.warning("the n-gram cache of %s is left out: it was made for other vocabularies", side.label)
    arms = [LoopInRounds(own, config, scratch / "run") for own in models]
    return arms[0], arms[1]


def replace_drafter(config: Config, models: Models, folder: Path) -> Models:
    """Return models with the same target, on its own rows, and another drafter."""
    drafter = load_drafter(config, str(folder), str(models.target.device))
    drafter.prove_forward()
    tokenizer = load_tokenizer(str(folder))
    drafter_vocabulary = Vocabulary(tokenizer, str(folder))
    return replace(
        models,
        target=models.target.share_weights(),
        drafter=drafter,
        drafter_vocabulary=drafter_vocabulary,
        drafter_tokenizer=tokenizer,
        drafter_folder=folder,
        pair=pair(models.target_vocabulary, drafter_vocabulary, config.vocabulary.special),
    )


def compare(
    config: Config,
    sides: tuple[Side, Side],
    prompts: Sequence[PromptReceived],
    uri: str,
    scratch: Path,
    progress: Callable[[int, str], None],
) -> Comparison:
    """Complete the prompts on both sides, in the order A B, B A, A B, ..., until the difference of acceptance is sure.

    All must fit the models. Every `MIN_PROMPTS` prompts the interval is looked at, at a level at which looking several
    times does not find what is not there (Haybittle and Peto's rule).

    Args:
        config: as from `make_comparison_config`.
        sides: two versions.
        prompts: one or more.
        uri: URI of the registry, for targets that are registered models.
        scratch: an empty folder.
        progress: called with the number of completed prompts, and the acceptance so far.
    """
    arms = make_arms(config, sides, uri, scratch)
    for arm in arms:
        arm.complete([PromptReceived(len(prompts), "warm-up", "warm-up", 1, WARM_UP)])
    passages: tuple[list[PassageCounts], list[PassageCounts]] = [], []
    for done, prompt in enumerate(prompts, 1):
        for place in (0, 1) if done % 2 else (1, 0):
            passages[place].append(_complete_prompt(arms[place], prompt))
        if config.sampling.temperature == 0:
            _require_equal(config, arms[0], prompt, passages[0][-1].tokens, passages[1][-1].tokens)
        progress(done, _format_change(compare_counts(*passages, least=FIRST_PROMPTS)[ACCEPTANCE]))
        if done % MIN_PROMPTS == 0 and is_sure(compare_counts(*passages, level=EARLY)[ACCEPTANCE]):
            break
    settings = config.model_dump(mode="json", exclude={"drafter", "run", "learn", "publish", "commit", "log"})
    first, second = (tuple(side) for side in passages)
    return Comparison(
        (sides[0].label, sides[1].label),
        (sides[0].number, sides[1].number),
        settings,
        tuple(prompt.prompt_id for prompt in prompts[:done]),
        compare_counts(first, second),
        (first, second),
        len(prompts),
    )


def _complete_prompt(arm: LoopInRounds, prompt: PromptReceived) -> PassageCounts:
    done = arm.complete([prompt])
    by_model = [block for block in done.blocks if block.drafter is DraftSource.MODEL]
    judged, accepted = sum(block.judged for block in by_model), sum(block.accepted for block in by_model)
    return PassageCounts(done.tokens[0], len(done.blocks), len(by_model), judged, accepted, done.seconds)


def _require_equal(
    config: Config, arm: LoopInRounds, prompt: PromptReceived, one: Sequence[int], other: Sequence[int]
) -> None:
    """Require that both greedy texts are equal: they are the target's own with any drafter."""
    if one == other:
        return
    place = first_difference(one, other)
    tie = ""
    if place is not None:
        tokens, _ = Admission(config, arm.models).encode(prompt)
        text = [*tokens, *one[:place]]
        margin = abs(logit_difference(arm.models.target.model, text, one[place], other[place]))
        tie = f"; there the target's logits of the two tokens are {margin:.2g} apart, and about 0 is a tie of rounding"
    raise CorruptError(
        f"at temperature 0 both versions must give the target's text, but that of prompt {prompt.prompt_id} parts at "
        f"token {place}{tie}; try --set dtype=float32"
    )


def is_sure(change: PairedMetric) -> bool:
    """Return whether an interval leaves no doubt: it excludes no difference, or all that would matter."""
    if change.low is None or change.high is None:
        return False
    return change.low > 0 or change.high < 0 or max(-change.low, change.high) < SAME


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the rows of the table."""
    return [(_TITLES[name], *_format_cells(name, metric)) for name, metric in comparison.metrics.items()]


def _format_cells(name: str, metric: PairedMetric) -> tuple[str, ...]:
    digits, sign = (1, "") if name == SPEED else (3, "+")
    sides = tuple("-" if value is None else f"{value:.{digits}f}" for value in (metric.first, metric.second))
    unit = "x" if name == SPEED else ""
    change = "-" if metric.change is None else f"{metric.change:{sign}.3f}{unit}"
    known = metric.low is not None and metric.high is not None
    return (*sides, change, f"{metric.low:{sign}.3f} to {metric.high:{sign}.3f}" if known else "-")


def _format_change(metric: PairedMetric) -> str:
    """A change of the acceptance with its interval, such as `acceptance +0.268 (+0.233 to +0.303)`."""
    if metric.change is None or metric.low is None or metric.high is None:
        return ""
    return f"acceptance {metric.change:+.3f} ({metric.low:+.3f} to {metric.high:+.3f})"


def describe_result(comparison: Comparison) -> str:
    """Say in one sentence whether the difference of acceptance is real."""
    first, second = comparison.sides
    metric, count = comparison.metrics[ACCEPTANCE], len(comparison.prompts)
    of = f" of {comparison.planned}" if comparison.planned > count else ""
    on = f"on {count}{of} prompt{'s' if count > 1 else ''}"
    change = _format_change(metric)
    if metric.change is None:
        return f"Nothing was judged on one side {on}: the acceptance cannot be compared."
    if count < MIN_PROMPTS:
        return f"Too few prompts for an interval: {count}, and it takes {MIN_PROMPTS} or more."
    if metric.low is None or metric.high is None:
        return f"Too little was judged on one side {on}: the change of acceptance has no interval."
    if metric.low <= 0 <= metric.high:
        return f"No real difference between {first} and {second}: {change} {on}."
    return f"{second} is {'better' if metric.change > 0 else 'worse'} than {first}: {change} {on}."
