"""Measures cost as work grows, by batch size, context length, active n-grams and vocabulary size.

This module measures the curves that need models: tokens per second by batch size, and forward passes by context
length.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from pipeline.assembly.models import Models, load_only_target
from pipeline.assembly.stages import draftable
from pipeline.bench.scaling.block import cache_curve, vocabulary_curve
from pipeline.bench.scaling.curves import Curve, Effort, Progress, Sampler, measure_lines
from pipeline.bench.speed.benchmark import choose_prompts
from pipeline.config.settings import Config
from pipeline.reports.machine import machine_of
from pipeline.run.rounds import LoopInRounds
from pipeline.sources.stream import open_sources
from stages.contract.blocks import SequenceState
from stages.forward_pass.packed_weights import has_packed_forward
from stages.models.devices import synchronize
from stages.models.huggingface import load_causal_model
from stages.models.language_model import LanguageModel
from stages.sampling.random_source import SeededRandomSource
from store.events import PromptReceived

FEWEST_PROMPTS = 4  # prompts per measurement at least, also for smaller batches
# All n-grams are active from the start, so that no arm has an advantage from prompts that it has seen before.
FROZEN: dict[str, object] = {"learn.enabled": False, "publish.enabled": False, "cache.seed": "vocabulary"}
ARMS: Mapping[str, Mapping[str, object]] = {
    "plain decoding": FROZEN | {"draft.max_draft": 0},
    "speculation, frozen": FROZEN,
}
VERIFIED = 5  # tokens of a verifying target pass
SPARE = 16  # positions after the longest context


@dataclass(frozen=True)
class Extent:
    """Sizes of one curve, and the number of rounds in which they are measured."""

    sizes: tuple[int, ...]
    effort: Effort


FULL: Mapping[str, Extent] = {
    "batch": Extent((1, 2, 4, 8, 16, 32), Effort(2, 5, 75.0)),
    "context": Extent((128, 256, 512, 1024, 2048), Effort(3, 25, 15.0)),
    "cache": Extent((0, 100, 1_000, 10_000, 100_000), Effort(5, 50, 8.0)),
    "vocabulary": Extent((4_000, 16_000, 32_000, 64_000, 152_000), Effort(5, 50, 12.0)),
}
ONCE = Effort(2, 2, 0.0)
QUICK: Mapping[str, Extent] = {
    "batch": Extent((1, 2), ONCE),
    "context": Extent((8, 32), ONCE),
    "cache": Extent((0, 100), ONCE),
    "vocabulary": Extent((500, 1_000), ONCE),
}


@dataclass(frozen=True)
class ScalingReport:
    """Measured curves by name, with the machine and the settings."""

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    curves: Mapping[str, Curve]

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        curves = {name: curve.to_json() for name, curve in self.curves.items()}
        return {"machine": dict(self.machine), "settings": dict(self.settings), "curves": curves}


def run(config: Config, wanted: Sequence[str], extents: Mapping[str, Extent], progress: Progress) -> ScalingReport:
    """Load the models and measure curve by curve.

    Args:
        config: models, sources, sampling and threads; its batch size is not used.
        wanted: names of the curves to measure.
        extents: sizes and rounds of every curve, by name.
        progress: called with a description of each step.

    Raises:
        ModelError, VocabularyError: as `load_models`.
        SourceError: there are too few prompts for the largest batch.
    """
    with TemporaryDirectory() as scratch:
        progress("loading the models")
        models = load_only_target(config, Path(scratch))
        machine = machine_of(models)
        curves = {name: _measure(name, config, models, extents[name], progress) for name in wanted}
    return ScalingReport(machine, config.model_dump(mode="json"), curves)


def _measure(name: str, config: Config, models: Models, extent: Extent, progress: Progress) -> Curve:
    sizes, effort, device = extent.sizes, extent.effort, models.target.device
    makers: Mapping[str, Callable[[], Curve]] = {
        "batch": lambda: _batch(config, models, extent, progress),
        "context": lambda: context_curve(config, models, sizes, effort, progress),
        "cache": lambda: cache_curve(sizes, effort, progress, device),
        "vocabulary": lambda: vocabulary_curve(sizes, effort, progress, device),
    }
    return makers[name]()


def _batch(config: Config, models: Models, extent: Extent, progress: Progress) -> Curve:
    sources = open_sources(config.sources, config.source, seed=config.seed)
    prompts = choose_prompts(sources, config, models, prompts_needed(extent.sizes), models.target.max_length)
    return batch_curve(config, models, prompts, extent.sizes, extent.effort, progress)


def prompts_needed(batches: Sequence[int]) -> int:
    """Number of prompts with which the largest batch is measured."""
    return max(FEWEST_PROMPTS, *batches)


def batch_curve(
    config: Config,
    models: Models,
    prompts: Sequence[PromptReceived],
    batches: Sequence[int],
    effort: Effort,
    progress: Progress,
) -> Curve:
    """Measure tokens per second of this pipeline by batch size, prefill included.

    Args:
        config: sampling and settings of the arms.
        models: models shared by all arms; each arm has its own caches.
        prompts: a batch of b is measured with the first b prompts, at least `FEWEST_PROMPTS`, all admitted at once.
        batches: batch sizes.
        effort: number of rounds.
        progress: as for `measure_lines`.
    """
    samplers: dict[tuple[str, int], Sampler] = {}
    for name, settings in ARMS.items():
        for batch in batches:
            own = replace(models, target=models.target.share_weights(), drafter=models.drafter.share_weights())
            progress(f"preparing: {name} at {batch}")
            arm = LoopInRounds(own, config.with_overrides({**settings, "batch": batch}), Path())
            samplers[name, batch] = partial(_rate, arm, prompts[: prompts_needed([batch])])
    lines = measure_lines(samplers, effort, progress)
    return Curve("Throughput by batch", "concurrent prompts", "tokens/s", lines)


def _rate(arm: LoopInRounds, prompts: Sequence[PromptReceived]) -> float:
    done = arm.complete(prompts)
    return done.emitted / done.seconds


def context_curve(config: Config, models: Models, contexts: Sequence[int], effort: Effort, progress: Progress) -> Curve:
    """Measure milliseconds of the forward passes of a block of one row, by context length.

    A model with rotary positions is measured beyond the longest text that it was made for: its output there is of no
    use, its cost is that of a model made for the length. Any other model is measured up to its maximum length.

    Args:
        config: types and layouts of the weights.
        models: models to measure; their rows in flight are not touched.
        contexts: tokens in the key-value cache before the pass.
        effort: number of rounds.
        progress: as for `measure_lines`.
    """
    progress("preparing: models for long contexts")
    target = with_context(models.target, max(contexts) + SPARE, config.dtype, config.weights)
    drafter = with_context(models.drafter, max(contexts) + SPARE, config.dtype, config.draft.weights)
    samplers: dict[tuple[str, int], Sampler] = {}
    for name, model, widths, allowed in (
        ("target", target, (1, VERIFIED), None),
        ("drafter", drafter, (1,), draftable(config.draft, models.pair)),
    ):
        for context in (size for size in contexts if size + VERIFIED <= model.max_length):
            progress(f"prefilling {context:,} tokens: {name}")
            time_pass = _pass_timer(model, context, allowed)
            samplers |= {
                (f"{name}, {width} token{'s' * (width > 1)}", context): partial(time_pass, width) for width in widths
            }
    return Curve("Forward passes by context", "context, tokens", "ms", measure_lines(samplers, effort, progress))


def with_context(model: LanguageModel, longest: int, dtype: str, weights: str) -> LanguageModel:
    """The same model with a context of `longest` tokens, for measuring cost only.

    Loads the model again if its context is shorter and its positions are rotary. Rotary positions are computed, so no
    weight depends on the configured length. Any other model is returned unchanged.

    Args:
        model: the loaded model.
        longest: wanted context length in tokens.
        dtype, weights: as in `load_model`.
    """
    if model.max_length >= longest or not has_packed_forward(model.model):
        return model
    larger = load_causal_model(model.name, dtype, str(model.device))
    larger.config.max_position_embeddings = longest
    longer = LanguageModel(larger, model.name, weights=weights)
    longer.prove_forward()
    return longer


def _pass_timer(model: LanguageModel, context: int, draftable_ids: Collection[int] | None) -> Callable[[int], float]:
    """Prefill a context, and return a function that times a pass of some tokens after it in milliseconds.

    With `draftable_ids` the passes are those of a drafter in `Decode`.
    """
    own, drafts = model.share_weights(), draftable_ids is not None
    if draftable_ids is not None:
        own.restrict(draftable_ids)
    tokens = [3 + 7 * place % max(1, own.vocabulary_size - 3) for place in range(context + 1)]
    row = SequenceState(0, "", "", "", tokens, len(tokens), [], SeededRandomSource(0, 0), VERIFIED)
    own.admit(row, tokens)

    def time_pass(width: int) -> float:
        synchronize(own.device)
        started = perf_counter()
        own.forward([row], [tokens[:1] * width], [width], hidden=drafts)
        synchronize(own.device)
        seconds = perf_counter() - started
        own.roll_back(row, context)
        return 1e3 * seconds

    return time_pass
