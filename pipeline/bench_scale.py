"""Cost as work grows: by batch, context, active n-grams and vocabulary, one curve after another in one run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.bench import machine_of
from pipeline.bench_rounds import choose_prompts
from pipeline.bench_scale_block import cache_curve, vocabulary_curve
from pipeline.bench_scale_curves import Curve, Effort, Progress
from pipeline.bench_scale_models import batch_curve, context_curve, prompts_needed
from pipeline.build_models import Models, load_models
from pipeline.config import Config
from pipeline.source import open_sources
from store.registry import default_uri


@dataclass(frozen=True)
class Extent:
    """The sizes of one curve, and how often they are measured."""

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
class Report:
    """What was measured, where and with which settings."""

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    curves: Mapping[str, Curve]

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        curves = {name: curve.to_json() for name, curve in self.curves.items()}
        return {"machine": dict(self.machine), "settings": dict(self.settings), "curves": curves}


def run(config: Config, wanted: Sequence[str], extents: Mapping[str, Extent], progress: Progress) -> Report:
    """Load the models and measure curve by curve.

    Args:
        config: models, sources, sampling and threads; its batch is not used.
        wanted: names of curves.
        extents: of every curve.
        progress: told what goes on.

    Raises:
        ModelError, VocabularyError: as `load_models`.
        SourceError: there are too few prompts for the largest batch.
    """
    with TemporaryDirectory() as scratch:
        progress("loading the models")
        (models,) = load_models(config, config.publish.mlflow_uri or default_uri(Path("runs")), Path(scratch))
        machine = machine_of(models)
        curves = {name: _measure(name, config, models, extents[name], progress) for name in wanted}
    return Report(machine, config.model_dump(mode="json"), curves)


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
    prompts = choose_prompts(sources, config, models, prompts_needed(extent.sizes))
    return batch_curve(config, models, prompts, extent.sizes, extent.effort, progress)
