"""The benchmark: the same prompts, target and sampling through `transformers` and through this pipeline, side by side.

All arms run in one process, prompt by prompt in rotating order, so that noise from outside hits them alike; an arm is
timed only while it works. Every figure comes from paired measurements of the same prompt.
"""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import islice
from math import hypot
from pathlib import Path
from statistics import fmean, median, quantiles, stdev
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.bench_arms import Arm, ArmName, Completion, build_arms
from pipeline.build_models import Models
from pipeline.config import Config
from pipeline.source import Source, open_sources, stream
from stages.baselines import device_name, surprisal, threads
from store.errors import SourceError
from store.events import PromptReceived, PromptRejected

LAW_ERRORS = 4.0  # standard errors between two means that no chance explains
REHEARSALS = 2  # untimed prompts of the arms that do not learn: enough for allocations and caches


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        prompts: timed prompts.
        warm_up: untimed prompts of the same stream before them, from which the learning arm learns.
        arms: which arms run.
    """

    prompts: int = 20
    warm_up: int = 40
    arms: tuple[ArmName, ...] = tuple(ArmName)


def choose_prompts(sources: Sequence[Source], config: Config, models: Models, number: int) -> list[PromptReceived]:
    """The stream's first prompts that every arm can complete.

    Raises:
        SourceError: there are fewer.
    """

    def fits(event: PromptReceived | PromptRejected) -> bool:
        if isinstance(event, PromptRejected):
            return False
        longest = max(len(words.encode(event.text)) for words in (models.target_words, models.drafter_words))
        return longest + 2 * config.sampling.max_new_tokens < min(models.target.max_length, models.drafter.max_length)

    chosen = [event for event in islice(filter(fits, stream(sources)), number) if isinstance(event, PromptReceived)]
    if len(chosen) < number:
        named = ", ".join(config.sources)
        hint = "Name more sources, or ask for fewer prompts or a shorter warm-up."
        raise SourceError(f"The benchmark needs {number} prompts, {named} has {len(chosen)} that fit. {hint}")
    return chosen


Progress = Callable[[str, int, int], None]


def measure(
    arms: Mapping[ArmName, Arm], prompts: Sequence[PromptReceived], warm_up: int, progress: Progress
) -> dict[ArmName, list[Completion]]:
    """Warm the arms up on the first `warm_up` prompts, then run all of them on every other prompt, in rotating order.

    Args:
        progress: called with what goes on, steps done and steps in all.
    """
    done, rounds = 0, prompts[warm_up:]
    learning = ArmName.LEARNING in arms
    steps = warm_up * learning + min(REHEARSALS, warm_up) * (len(arms) - learning) + len(rounds) * len(arms)
    for name, arm in arms.items():
        first = 0 if name is ArmName.LEARNING else max(0, warm_up - REHEARSALS)
        for prompt in prompts[first:warm_up]:
            arm.complete(prompt)
            progress(f"warming up: {name}", done := done + 1, steps)
    completions: dict[ArmName, list[Completion]] = {name: [] for name in arms}
    for number, prompt in enumerate(rounds):
        for name in _rotated(list(arms), number):
            completions[name].append(arms[name].complete(prompt))
            progress(f"prompt {number + 1} of {len(rounds)}", done := done + 1, steps)
    return completions


def _rotated(names: list[ArmName], number: int) -> list[ArmName]:
    first = number % len(names)
    return names[first:] + names[:first]


@dataclass(frozen=True)
class Spread:
    """Of one figure per prompt: the median, the quartiles, and the figure over all prompts together.

    The median leaves out what few prompts pay for, such as updates; `overall` does not.
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
class Figures:
    """What one arm showed.

    Attributes:
        tokens, seconds: emitted, over all timed prompts.
        tokens_per_second: per prompt.
        ratio: the reference's seconds per token over this arm's, per prompt; above 1 is faster.
        differing: prompts whose tokens are not the reference's; None when sampling, where they may differ.
        acceptance_rate: accepted / judged; None for arms that are not ours.
        block_efficiency: tokens per target forward; None for arms that are not ours.
        learning_share: share of the seconds that went into updates; None for arms that are not ours.
        nats_per_token: surprisal under the target's law, None when greedy. Arms that keep the law agree within errors.
    """

    tokens: int
    seconds: float
    tokens_per_second: Spread
    ratio: Spread
    differing: int | None
    acceptance_rate: float | None
    block_efficiency: float | None
    learning_share: float | None
    nats_per_token: Mean | None


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


def figures(own: Sequence[Completion], reference: Sequence[Completion], *, greedy: bool) -> Figures:
    """Compare an arm with the reference arm, prompt by prompt. Both have the same prompts in the same order."""
    pace, reference_pace = [_pace(one) for one in own], [_pace(one) for one in reference]
    tokens, seconds = sum(len(one.tokens) for one in own), sum(one.seconds for one in own)
    reference_tokens = sum(len(one.tokens) for one in reference)
    overall_ratio = sum(one.seconds for one in reference) / reference_tokens * tokens / seconds
    nats = [one.nats / len(one.tokens) for one in own if one.nats is not None]
    blocks, judged = sum(one.blocks for one in own), sum(one.judged for one in own)
    return Figures(
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=spread([1 / one for one in pace], tokens / seconds),
        ratio=spread([theirs / ours for ours, theirs in zip(pace, reference_pace, strict=True)], overall_ratio),
        differing=sum(a.tokens != b.tokens for a, b in zip(own, reference, strict=True)) if greedy else None,
        acceptance_rate=sum(one.accepted for one in own) / judged if judged else None,
        block_efficiency=tokens / blocks if blocks else None,
        learning_share=sum(one.learning for one in own) / seconds if blocks else None,
        nats_per_token=mean(nats) if nats else None,
    )


def _pace(completion: Completion) -> float:
    """Seconds per token. A completion has at least one token: the end of the sequence is one."""
    return completion.seconds / len(completion.tokens)


@dataclass(frozen=True)
class Report:
    """A finished benchmark: on what, of what, and the figures of every arm against the reference arm."""

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    reference: ArmName
    figures: Mapping[ArmName, Figures]
    completions: Mapping[ArmName, Sequence[Completion]]

    def off_law(self) -> list[ArmName]:
        """Arms that do not draw from the law that the reference draws from: their speed is that of another task."""
        law = self.figures[self.reference].nats_per_token
        return [name for name, found in self.figures.items() if not same_law(found.nats_per_token, law)]

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values; of the completions their numbers of tokens and seconds."""
        samples = {
            name: [{"tokens": len(one.tokens), "seconds": one.seconds} for one in completions]
            for name, completions in self.completions.items()
        }
        return {
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "reference": self.reference,
            "off_law": self.off_law(),
            "arms": {name: asdict(figures) | {"prompts": samples[name]} for name, figures in self.figures.items()},
        }


def run(config: Config, plan: Plan, progress: Progress) -> Report:
    """Load, choose prompts, measure, compare. The reference is `plain`, or the first arm if that is left out.

    Args:
        config: models, sources and sampling. Prompts run one at a time and nothing is published, whatever it says.
        plan: how much is measured.
        progress: see `measure`.

    Raises:
        ModelError, VocabularyError, SourceError: as `build_arms` and `choose_prompts`.
    """
    config = config.with_overrides({"batch": 1, "publish.enabled": False})
    temperature = config.sampling.temperature
    greedy = temperature == 0
    sources = open_sources(config.sources, config.source, seed=config.seed)
    with TemporaryDirectory() as scratch:
        arms, models = build_arms(config, plan.arms, Path(scratch))
        prompts = choose_prompts(sources, config, models, plan.warm_up + plan.prompts)
        machine = machine_of(models)
        completions = measure(arms, prompts, plan.warm_up, progress)
        if not greedy:
            rounds = prompts[plan.warm_up :]
            completions = {name: with_nats(own, rounds, models, temperature) for name, own in completions.items()}
    reference = ArmName.PLAIN if ArmName.PLAIN in arms else plan.arms[0]
    compared = {name: figures(own, completions[reference], greedy=greedy) for name, own in completions.items()}
    return Report(machine, settings_of(config, plan), reference, compared, completions)


def with_nats(
    completions: Sequence[Completion], prompts: Sequence[PromptReceived], models: Models, temperature: float
) -> list[Completion]:
    """The completions of these prompts with their surprisal under the target."""
    encoded = (models.target_words.encode(prompt.text) for prompt in prompts)
    return [
        replace(one, nats=surprisal(models.target, ids, one.tokens, temperature))
        for one, ids in zip(completions, encoded, strict=True)
    ]


def machine_of(models: Models) -> dict[str, Any]:
    """What the figures depend on beside the settings. `load`: processes that wanted a core in the last minute."""
    return {
        "device": device_name(models.target.device) or cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "target_parameters": models.target.parameters,
        "drafter_parameters": models.drafter.parameters,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }


def cpu_name() -> str:
    """What the processor calls itself, as far as the system tells."""
    information = Path("/proc/cpuinfo")  # Linux; elsewhere Python knows
    lines = information.read_text(encoding="utf-8").splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def settings_of(config: Config, plan: Plan) -> dict[str, Any]:
    """All that is needed to run it again."""
    return config.model_dump(mode="json") | {"prompts": plan.prompts, "warm_up": plan.warm_up}
