"""Which arms of the benchmark can run, and how they are made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.bench_arms import BATCH_ONE, OURS, Arm, ArmName, Engines
from pipeline.bench_pipeline import PipelineArm, ReplayRecords
from pipeline.bench_transformers import ContinuousArm, GenerateArm, Method, task_of
from pipeline.build_models import Models, load_models, locate
from pipeline.config import Config
from stages.baselines import AssistedDrafter, assisted, plain, prompt_lookup
from stages.huggingface import load_causal_model, load_tokenizer
from store.errors import UsageError
from store.registry import default_uri


def arms_at(batch: int, temperature: float, engines: Engines) -> tuple[str, ...]:
    """All arms that can run, in the order of the table: `transformers`, other engines, this pipeline."""
    ours = [name for name in ArmName if batch == 1 or name not in BATCH_ONE]
    return (
        *(name for name in ours if name not in OURS),
        *engines.names(batch, temperature),
        *(name for name in ours if name in OURS),
    )


def require_usable(names: Sequence[str], batch: int, temperature: float, engines: Engines) -> None:
    """Refuse arms that cannot run.

    Raises:
        UsageError: if there are any.
    """
    usable = arms_at(batch, temperature, engines)
    for name in names:
        if name not in usable:
            raise UsageError(
                f"--arms must name arms that run at batch {batch} and temperature {temperature:g}, but '{name}' does "
                f"not; there are {', '.join(usable)}"
            )


class Workshop:
    """Makes arms. Those of `transformers` share a copy of the target, ours share another, `continuous` has its own.

    Args:
        config: models, sampling and settings of the pipeline's arms.
        scratch: an empty folder for models that have to be fetched, for logs and for versions.

    Attributes:
        models: beside the arms, for their vocabularies and to measure bare forward passes with.
        target: of `transformers`.
    """

    def __init__(self, config: Config, scratch: Path) -> None:
        self._config, self._scratch = config.with_overrides({"publish.enabled": False}), scratch
        self._uri = config.publish.mlflow_uri or default_uri(Path("runs"))
        self.models = self._load("measure")
        self._device = str(self.models.target.device)
        self._target_source = locate(self.models.name, self._uri, scratch / "target")
        self._drafter_source = str(self.models.drafter_folder or config.drafter)
        self.target = self._copy(self._target_source)

    def _load(self, name: str) -> Models:
        (models,) = load_models(self._config, self._uri, self._scratch / name)
        return models

    def _copy(self, source: str) -> Any:
        return load_causal_model(source, self._config.dtype, self._device)

    def make(self, name: str, longest: int, engines: Engines) -> Arm:
        """One arm.

        Args:
            name: of an arm that can run.
            longest: tokens of the longest prompt and completion together.
            engines: make the arms that are not listed here.
        """
        own: Mapping[str, Callable[[], Arm]] = {
            ArmName.PLAIN: lambda: self._generate(plain),
            ArmName.ASSISTED: lambda: self._assisted(self._config.draft.max_draft),
            ArmName.ASSISTED_DEFAULTS: lambda: self._assisted(None),
            ArmName.PROMPT_LOOKUP: lambda: self._generate(prompt_lookup),
            ArmName.CONTINUOUS: lambda: self._continuous(longest),
            ArmName.OWN_PLAIN: lambda: self._pipeline(name, {"learn.enabled": False, "draft.max_draft": 0}),
            ArmName.FROZEN: lambda: self._pipeline(name, {"learn.enabled": False}),
            ArmName.LEARNING: lambda: self._pipeline(name, {}),
            ArmName.LOGGED: self._logged,
        }
        if name in own:
            return own[name]()
        return engines.build(name, self._config, self.models, self._scratch / "engines")

    def _generate(self, method: Method) -> Arm:
        return GenerateArm(task_of(self.target, self.models, self._config), method)

    def _assisted(self, length: int | None) -> Arm:
        tokenizers = load_tokenizer(self._drafter_source), load_tokenizer(self._target_source)
        drafter = AssistedDrafter.of(self._copy(self._drafter_source), *tokenizers, length)
        return self._generate(partial(assisted, drafter=drafter))

    def _continuous(self, longest: int) -> Arm:
        return ContinuousArm(task_of(self._copy(self._target_source), self.models, self._config), longest)

    def _pipeline(self, name: str, settings: Mapping[str, object]) -> Arm:
        config = self._config.with_overrides(settings)
        return PipelineArm(self._own(name, learns=config.learn.enabled), config, self._scratch / f"{name}-run")

    def _logged(self) -> Arm:
        config, folder = self._config.with_overrides({"publish.enabled": True}), self._scratch / "logged-run"
        return PipelineArm(self._own("logged", learns=True), config, folder, partial(ReplayRecords, folder, config))

    def _own(self, name: str, *, learns: bool) -> Models:
        """The shared weights behind caches of their own; a drafter that learns has its own weights too."""
        drafter = self._load(name).drafter if learns else self.models.drafter.beside()
        return replace(self.models, target=self.models.target.beside(), drafter=drafter)
