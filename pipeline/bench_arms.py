"""The benchmark's arms: ways to complete a prompt, by `transformers` alone and by this pipeline, on one target."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Protocol

from pipeline.build import build_loop
from pipeline.build_models import Models, load_models, locate
from pipeline.config import Config
from pipeline.loop import Loop
from stages.baselines import AssistedDrafter, Request, assisted, plain, settle
from stages.distributions import Sampling
from stages.huggingface import load_tokenizer
from stages.language_model import LanguageModel, load_model
from store.errors import SourceError
from store.events import PromptCompleted, PromptReceived, TokenDecision, Updated
from store.registry import NoRegistry, default_uri


class ArmName(StrEnum):
    """What is compared."""

    PLAIN = "plain"
    ASSISTED = "assisted"
    ASSISTED_DEFAULTS = "assisted-defaults"
    FROZEN = "frozen"
    LEARNING = "learning"


@dataclass(frozen=True)
class Completion:
    """What one arm made of one prompt.

    Attributes:
        tokens: emitted target ids.
        seconds: wall time from the prompt's text to the completion's, learning from it included.
        blocks, judged, accepted: counts of the pipeline's arms.
        learning: seconds of these that went into updates.
        nats: surprisal of the tokens under the target's law; None when it was not asked for.
    """

    tokens: tuple[int, ...]
    seconds: float
    blocks: int = 0
    judged: int = 0
    accepted: int = 0
    learning: float = 0.0
    nats: float | None = None


class Arm(Protocol):
    """One way to complete prompts. Called for one prompt at a time, in stream order; keeps its caches and, if it
    learns, what it has learned."""

    def complete(self, prompt: PromptReceived) -> Completion:
        """Complete a prompt and time it."""
        ...


class TransformersArm:
    """A method of `transformers`, from text to text as in the pipeline.

    Args:
        models: the target and its vocabulary.
        config: sampling and seed.
        method: completes target ids.
    """

    def __init__(
        self, models: Models, config: Config, method: Callable[[LanguageModel, Sequence[int], Request], list[int]]
    ) -> None:
        self._target, self._words, self._method = models.target, models.target_words, method
        settings = config.sampling
        sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
        eos = self._words.eos
        ends = self._target.ends or frozenset(() if eos is None else (eos,))
        self._request = Request(sampling, settings.max_new_tokens, ends, config.seed)

    def complete(self, prompt: PromptReceived) -> Completion:
        """As `Arm.complete`."""
        started = perf_counter()
        request = replace(self._request, seed=self._request.seed + prompt.offset)
        tokens = self._method(self._target, self._words.encode(prompt.text), request)
        self._words.decode(tokens)
        return Completion(tuple(tokens), perf_counter() - started)


class PipelineArm:
    """The pipeline's own loop, without log and versions."""

    def __init__(self, models: Models, config: Config, scratch: Path) -> None:
        self._loop: Loop = build_loop(config, [models], NoRegistry(), scratch, lambda notice: None)
        self._device = models.target.device

    def complete(self, prompt: PromptReceived) -> Completion:
        """As `Arm.complete`. A run over one prompt ends when all that follows from the prompt is done."""
        started = perf_counter()
        events = list(self._loop.run(iter([prompt])))
        settle(self._device)
        seconds = perf_counter() - started
        tokens = [e.emitted_id for e in events if isinstance(e, TokenDecision) and e.emitted_id is not None]
        learning = sum(event.seconds for event in events if isinstance(event, Updated))
        for event in events:
            if isinstance(event, PromptCompleted):
                return Completion(tuple(tokens), seconds, event.blocks, event.judged, event.accepted, learning)
        raise SourceError(f"Prompt {prompt.prompt_id!r} must fit the models: {events[-1]}")


def build_arms(config: Config, names: Sequence[ArmName], scratch: Path) -> tuple[dict[ArmName, Arm], Models]:
    """Load the models and build the arms. They share the target's weights and nothing else.

    Args:
        config: models, sampling and settings of the pipeline's arms; its batch is 1 and nothing is published.
        names: which arms.
        scratch: an empty folder for models that have to be fetched.

    Raises:
        ModelError, VocabularyError: as `load_models`.
    """
    uri = config.publish.mlflow_uri or default_uri(Path("runs"))
    (models,) = load_models(config, uri, scratch)
    drafter_source = str(models.drafter_folder or config.drafter)
    target_source = locate(models.name, uri, scratch / "tokenizer")

    def own() -> Models:
        """The shared target behind a cache of its own, and a drafter from its file."""
        drafter = load_model(drafter_source, config.dtype, str(models.drafter.device))
        return replace(models, target=LanguageModel(models.target.model, models.name), drafter=drafter)

    def assisted_arm(length: int | None) -> Arm:
        mine = own()
        tokenizers = load_tokenizer(drafter_source), load_tokenizer(target_source)
        drafter = AssistedDrafter.of(mine.drafter, *tokenizers, length)
        return TransformersArm(mine, config, partial(assisted, drafter=drafter))

    make: dict[ArmName, Callable[[], Arm]] = {
        ArmName.PLAIN: lambda: TransformersArm(models, config, plain),
        ArmName.ASSISTED: lambda: assisted_arm(config.draft.max_draft),
        ArmName.ASSISTED_DEFAULTS: lambda: assisted_arm(None),
        ArmName.FROZEN: lambda: PipelineArm(own(), config.with_overrides({"learn.enabled": False}), scratch),
        ArmName.LEARNING: lambda: PipelineArm(own(), config, scratch),
    }
    return {name: make[name]() for name in names}, models
