"""Cost as work grows, with models: the pipeline's tokens per second by batch, and forward passes by context length."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

from pipeline.bench_pipeline import PipelineArm
from pipeline.bench_scale_curves import Curve, Effort, Progress, Sampler, measured
from pipeline.build_models import Models
from pipeline.build_stages import draftable
from pipeline.config import Config
from stages.baselines import settle
from stages.blocks import Row
from stages.draws import SeededDraws
from stages.huggingface import load_causal_model
from stages.language_model import LanguageModel
from stages.lean_weights import is_lean
from store.events import PromptReceived

FEWEST_PROMPTS = 4  # of a measurement, whatever the batch
# All n-grams are active from the start, so that no arm has an advantage by prompts that it has seen before.
FROZEN: dict[str, object] = {"learn.enabled": False, "publish.enabled": False, "cache.seed": "vocabulary"}
ARMS: Mapping[str, Mapping[str, object]] = {
    "plain decoding": FROZEN | {"draft.max_draft": 0},
    "speculation, frozen": FROZEN,
}
VERIFIED = 5  # tokens of a target pass that verifies
SPARE = 16  # places behind the longest context


def prompts_needed(batches: Sequence[int]) -> int:
    """Prompts that the largest batch is measured with."""
    return max(FEWEST_PROMPTS, *batches)


def batch_curve(
    config: Config,
    models: Models,
    prompts: Sequence[PromptReceived],
    batches: Sequence[int],
    effort: Effort,
    progress: Progress,
) -> Curve:
    """Tokens per second of this pipeline, reading the prompts included.

    Args:
        config: sampling and settings of the arms.
        models: shared by all arms; each has caches of its own.
        prompts: a batch of b is measured with the first b of them, at least `FEWEST_PROMPTS`, all admitted at once.
        batches: most prompts at a time.
        effort: how often.
        progress: see `measured`.
    """
    samplers: dict[tuple[str, int], Sampler] = {}
    for name, settings in ARMS.items():
        for batch in batches:
            own = replace(models, target=models.target.beside(), drafter=models.drafter.beside())
            progress(f"preparing: {name} at {batch}")
            arm = PipelineArm(own, config.with_overrides({**settings, "batch": batch}), Path())
            samplers[name, batch] = partial(_rate, arm, prompts[: prompts_needed([batch])])
    lines = measured(samplers, effort, progress)
    return Curve("Throughput by batch", "prompts at a time", "tokens/s", lines)


def _rate(arm: PipelineArm, prompts: Sequence[PromptReceived]) -> float:
    done = arm.complete(prompts)
    return done.emitted / done.seconds


def context_curve(config: Config, models: Models, contexts: Sequence[int], effort: Effort, progress: Progress) -> Curve:
    """Milliseconds of the passes of a block at one row, by the tokens that the row has read before.

    A model whose positions are rotary is measured beyond the longest text that it was made for: what it would say
    there is of no use, what it costs is the same. Any other is measured as far as it goes.

    Args:
        config: types and layouts of the weights.
        models: nobody else's rows are touched.
        contexts: tokens read before.
        effort: how often.
        progress: see `measured`.
    """
    progress("preparing: models for long texts")
    target = lengthened(models.target, max(contexts) + SPARE, config.dtype, config.weights)
    drafter = lengthened(models.drafter, max(contexts) + SPARE, config.dtype, config.draft.weights)
    samplers: dict[tuple[str, int], Sampler] = {}
    for name, model, widths, allowed in (
        ("target", target, (1, VERIFIED), None),
        ("drafter", drafter, (1,), draftable(config, models.pair)),
    ):
        for context in (size for size in contexts if size + VERIFIED <= model.max_length):
            progress(f"reading {context:,} tokens: {name}")
            timed = _passes(model, context, allowed)
            samplers |= {
                (f"{name}, {width} token{'s' * (width > 1)}", context): partial(timed, width) for width in widths
            }
    return Curve("Forward passes by context", "tokens read before", "ms", measured(samplers, effort, progress))


def lengthened(model: LanguageModel, longest: int, dtype: str, weights: str) -> LanguageModel:
    """The same model, loaded anew with room for longer texts if it needs and allows that; for measuring cost alone.

    Rotary positions are computed, not looked up: nothing in the weights ends at the configured length.

    Args:
        model: as loaded.
        longest: tokens of a text that should fit.
        dtype, weights: as in `load_model`.
    """
    if model.max_length >= longest or not is_lean(model.model):
        return model
    larger = load_causal_model(model.name, dtype, str(model.device))
    larger.config.max_position_embeddings = longest
    longer = LanguageModel(larger, model.name, weights=weights)
    longer.require_rows()
    return longer


def _passes(model: LanguageModel, context: int, draftable_ids: Collection[int] | None) -> Callable[[int], float]:
    """Measures passes of so many tokens behind a context, which is read now; a drafter's as `Decode` makes them."""
    own, drafts = model.beside(), draftable_ids is not None
    if draftable_ids is not None:
        own.restrict(draftable_ids)
    tokens = [3 + 7 * place % max(1, own.vocabulary_size - 3) for place in range(context + 1)]
    row = Row(0, "", "", "", tokens, len(tokens), [], SeededDraws(0, 0), VERIFIED)
    own.admit(row, tokens)

    def timed(width: int) -> float:
        settle(own.device)
        started = perf_counter()
        own.forward([row], [tokens[:1] * width], [width], hidden=drafts)
        settle(own.device)
        seconds = perf_counter() - started
        own.roll_back(row, context)
        return 1e3 * seconds

    return timed
