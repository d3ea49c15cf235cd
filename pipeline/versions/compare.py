"""`omnidraft versions compare`: two versions on the same prompts with the same random draws, in turn for every prompt.

Nothing learns. Each side begins with the n-grams that its version holds and adds those that it emits, as in
service. By default the drafters alone are compared: every draft has the same length, and nothing is copied,
because a head that drafts less when it is unsure would raise the acceptance without a better drafter. With
`as_served` each version's own head decides, and drafts are copied when that is faster.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.assembly.admission import Admission
from pipeline.assembly.probe import prompts as probe_prompts
from pipeline.config.settings import Config
from pipeline.run.rounds import LoopInRounds, first_difference
from pipeline.sources.stream import open_source
from pipeline.versions.sides import Side, find_common_target, make_arms
from pipeline.versions.statistics import (
    INTERVAL,
    MIN_PROMPTS,
    RESAMPLES,
    SPEED,
    PairedMetric,
    PassageCounts,
    compare_counts,
)
from stages.engine.models.huggingface import logit_difference
from store.errors import CorruptError, SourceError, UsageError
from store.events import DraftSource, PromptReceived

WARM_UP = "The first words of a text that is not measured"

PROBE = "probe"  # names the fixed probe in place of a source

_FROZEN: Mapping[str, object] = {
    "batch": 1,
    "swaps": (),
    "learn.enabled": False,
    "learn.lora_rank": 0,  # a version's adapter is merged into its drafter, on both sides
    "publish.enabled": False,
    "drift.detector": "none",
}
_DRAFTERS_ALONE: Mapping[str, object] = {
    "draft.stop": "never",
    "draft.sources": ("model",),
    "draft.pause": False,
    "draft.costs": "estimated",  # without effect then
}
_NAMED = {"targets": "--target", "sources": "--probe", "drafter": "A and B"}  # the options that choose them


_TITLES = {
    "acceptance_rate": "acceptance (accepted / judged)",
    "mean_accepted_length": "accepted tokens per drafted pass",
    "block_efficiency": "tokens per target pass",
    SPEED: "tokens per second (median)",
}


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison."""

    sides: tuple[str, str]  # labels of both versions
    numbers: tuple[int | None, int | None]  # in the registry; None for folders
    settings: dict[str, Any]  # that reproduce the comparison
    prompts: tuple[str, ...]  # their ids
    metrics: dict[str, PairedMetric]  # by name
    passages: tuple[tuple[PassageCounts, ...], tuple[PassageCounts, ...]]  # of both sides, by prompt

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


def require_free(keys: Iterable[str], *, as_served: bool) -> None:
    """Refuse to change settings that a comparison fixes."""
    for key in keys:
        if key in _NAMED:
            raise UsageError(f"a comparison takes no setting {key!r}; it is chosen by {_NAMED[key]}")
        if key in _FROZEN:
            raise UsageError(f"a comparison has {key} = {_FROZEN[key]!r} on both sides; leave --set {key} out")
        if key in _DRAFTERS_ALONE and not as_served:
            raise UsageError(
                f"drafters alone are compared with {key} = {_DRAFTERS_ALONE[key]!r}, so --set cannot change it; "
                "try --as-served"
            )


def make_comparison_config(
    config: Config, *, target: str | None, sides: tuple[Side, Side], as_served: bool, probe: str | None = None
) -> Config:
    """Make the settings of a comparison: without learning, one prompt at a time."""
    chosen = {"targets": (target or find_common_target(*sides),), "sources": (probe or PROBE,)}
    return config.with_overrides({**chosen, **_FROZEN, **({} if as_served else _DRAFTERS_ALONE)})


def read_prompts(config: Config, probe: str | None) -> list[PromptReceived]:
    """Read the prompts of a source, up to `source.limit`, or the fixed probe's; skip rows that are no prompts."""
    if probe is None:
        return probe_prompts()[: config.source.limit]
    source = open_source(probe, config.source, seed=config.seed)
    found = [event for event in source.read(0) if isinstance(event, PromptReceived)]
    if not found:
        raise SourceError(f"a probe must hold prompts, but '{probe}' has none; see --set source.prompt_field")
    return found


def compare(
    config: Config,
    sides: tuple[Side, Side],
    prompts: Sequence[PromptReceived],
    uri: str,
    scratch: Path,
    progress: Callable[[int], None],
) -> Comparison:
    """Complete every prompt on both sides, in the order A B, B A, A B, ...; all must fit the models.

    Args:
        config: as from `make_comparison_config`.
        sides: two versions.
        prompts: one or more.
        uri: URI of the registry, for targets that are registered models.
        scratch: an empty folder.
        progress: called with the number of completed prompts.
    """
    arms = make_arms(config, sides, uri, scratch)
    for arm in arms:
        arm.complete([PromptReceived(len(prompts), "warm-up", "warm-up", 1, WARM_UP)])
    passages: tuple[list[PassageCounts], list[PassageCounts]] = [], []
    for done, prompt in enumerate(prompts):
        for place in (0, 1) if done % 2 == 0 else (1, 0):
            passages[place].append(_complete_prompt(arms[place], prompt))
        if config.sampling.temperature == 0:
            _require_equal(config, arms[0], prompt, passages[0][-1].tokens, passages[1][-1].tokens)
        progress(done + 1)
    settings = config.model_dump(mode="json", exclude={"drafter", "run", "learn", "publish", "commit", "log"})
    first, second = (tuple(side) for side in passages)
    return Comparison(
        (sides[0].label, sides[1].label),
        (sides[0].number, sides[1].number),
        settings,
        tuple(prompt.prompt_id for prompt in prompts),
        compare_counts(first, second),
        (first, second),
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


def table_heads(comparison: Comparison) -> tuple[str, ...]:
    """Return the heads of the table's columns."""
    return ("", *comparison.sides, "change", f"{INTERVAL:.0%} interval")


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


def describe_result(comparison: Comparison) -> Iterator[str]:
    """Yield sentences on the change of acceptance and, for greedy decoding, on the texts."""
    first, second = comparison.sides
    metric, count = comparison.metrics["acceptance_rate"], len(comparison.prompts)
    on = f"on {count} prompt{'s' if count > 1 else ''}"
    if metric.change is None:
        yield f"Nothing was judged on one side {on}: the acceptance cannot be compared."
    elif count < MIN_PROMPTS:
        yield f"Too few prompts for an interval: {count}, and it takes {MIN_PROMPTS} or more."
    elif metric.low is None or metric.high is None:
        yield f"Too little was judged on one side {on}: the change of acceptance has no interval."
    elif metric.low <= 0 <= metric.high:
        yield f"No significant difference of acceptance between {first} and {second} {on}."
    else:
        more = "more" if metric.change > 0 else "less"
        yield f"{second} accepts {more} than {first}: {metric.change:+.3f} of the judged tokens, {on}."
    if comparison.settings["sampling"]["temperature"] == 0:
        yield "The texts are the same on both sides, token for token."
