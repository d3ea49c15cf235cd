"""Arms that complete token ids: their common base, and the arms of `transformers`."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from typing_extensions import override

from benchmarks.speed.arms import Arm, chunks
from benchmarks.speed.transformers_baselines import ContinuousBatching, Request
from benchmarks.speed.work import MeasuredRound
from pipeline.assembly.admission import Admission
from pipeline.assembly.models import Models
from pipeline.config.settings import Config
from stages.sampling.params import SamplingParams
from store.events import PromptReceived

Method = Callable[[Any, Sequence[Sequence[int]], Request], list[list[int]]]


class PromptWords:
    """Encodes prompts for all arms as the pipeline does, and decodes completions.

    Raises:
        ConfigError: prompts must be chat prompts, but the target has no usable template.
    """

    def __init__(self, config: Config, models: Models) -> None:
        self._encode = Admission(config, models).encode
        self.decode = models.target_vocabulary.decode

    def encode(self, prompt: PromptReceived) -> list[int]:
        """Encode a prompt in target tokens. Raises `ConfigError` where the chat template fails on its text."""
        return self._encode(prompt)[0]


def request_of(models: Models, config: Config) -> Request:
    """The request for all arms of `transformers`: sampling, end-of-sequence ids and lengths as in our arms."""
    settings = config.sampling
    sampling = SamplingParams(settings.temperature, settings.top_k, settings.top_p)
    return Request(sampling, settings.max_new_tokens, models.eos_ids, config.seed)


class TextArm(Arm):
    """Times completions from text to text, as in the pipeline."""

    def __init__(self, words: PromptWords) -> None:
        self._words = words

    @override
    def complete(self, prompts: Sequence[PromptReceived]) -> MeasuredRound:
        started = perf_counter()
        completions = self._generate(prompts)
        for tokens in completions:
            self._words.decode(tokens)
        return MeasuredRound(tuple(map(tuple, completions)), perf_counter() - started)

    @abstractmethod
    def _generate(self, prompts: Sequence[PromptReceived]) -> Sequence[Sequence[int]]:
        """Target tokens of every completion, in the order of the prompts."""

    @override
    def close(self) -> None:
        """Do nothing: this arm holds no threads or files."""


class GenerateArm(TextArm):
    """An arm that calls a generation method of `transformers` on static batches of a round's prompts."""

    def __init__(self, words: PromptWords, target: Any, request: Request, batch: int, method: Method) -> None:
        super().__init__(words)
        self._target, self._request, self._batch, self._method = target, request, batch, method

    @override
    def _generate(self, prompts: Sequence[PromptReceived]) -> list[list[int]]:
        completions = []
        for chunk in chunks(prompts, self._batch):
            request = replace(self._request, seed=self._request.seed + chunk[0].offset)
            completions += self._method(self._target, [self._words.encode(one) for one in chunk], request)
        return completions


class ContinuousArm(TextArm):
    """Continuous batching of `transformers`, one call per round.

    It starts before the clock of a round and stops after it, because its threads slow down other arms.
    """

    def __init__(self, words: PromptWords, batching: ContinuousBatching) -> None:
        super().__init__(words)
        self._batching = batching

    @override
    def complete(self, prompts: Sequence[PromptReceived]) -> MeasuredRound:
        self._batching.start()
        try:
            return super().complete(prompts)
        finally:
            self._batching.stop()

    @override
    def _generate(self, prompts: Sequence[PromptReceived]) -> list[list[int]]:
        return self._batching.complete([self._words.encode(prompt) for prompt in prompts])
