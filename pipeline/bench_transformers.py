"""The benchmark's arms that are `transformers` alone, on a copy of the target that nothing else touches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from pipeline.bench_arms import Round, chunks
from pipeline.build_models import Models
from pipeline.config import Config
from stages.baselines import ContinuousBatching, Request
from stages.distributions import Sampling
from stages.vocabulary import Vocabulary
from store.events import PromptReceived

Method = Callable[[Any, Sequence[Sequence[int]], Request], list[list[int]]]


@dataclass(frozen=True)
class Task:
    """What every arm of `transformers` is asked: the same target, vocabulary, sampling, ends and lengths as ours.

    Attributes:
        target: a model of `transformers`.
        words: its vocabulary.
        request: how to complete.
        batch: most prompts at a time.
    """

    target: Any
    words: Vocabulary
    request: Request
    batch: int


def task_of(target: Any, models: Models, config: Config) -> Task:
    """The task that a configuration describes."""
    settings, eos = config.sampling, models.target_words.eos
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
    ends = models.target.ends or frozenset(() if eos is None else (eos,))
    return Task(
        target, models.target_words, Request(sampling, settings.max_new_tokens, ends, config.seed), config.batch
    )


class GenerateArm:
    """A method of `generate`, on static batches of a round's prompts, from text to text as in the pipeline.

    Args:
        task: what is asked.
        method: completes a batch.
    """

    def __init__(self, task: Task, method: Method) -> None:
        self._task, self._method = task, method

    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        """As `Arm.complete`."""
        task, completions = self._task, []
        started = perf_counter()
        for chunk in chunks(prompts, task.batch):
            request = replace(task.request, seed=task.request.seed + chunk[0].offset)
            encoded = [task.words.encode(prompt.text) for prompt in chunk]
            completions += self._method(task.target, encoded, request)
        for tokens in completions:
            task.words.decode(tokens)
        return Round(tuple(map(tuple, completions)), perf_counter() - started)

    def close(self) -> None:
        """Nothing is open."""


class ContinuousArm:
    """Continuous batching, one call per round. It is started before a round's clock and stopped behind it, for its
    threads slow down other arms.

    Args:
        task: what is asked; the target is this arm's alone.
        longest: see `ContinuousBatching`.
    """

    def __init__(self, task: Task, longest: int) -> None:
        self._words = task.words
        self._batching = ContinuousBatching(task.target, task.request, task.batch, longest)

    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        """As `Arm.complete`."""
        self._batching.start()
        try:
            started = perf_counter()
            completions = self._batching.complete([self._words.encode(prompt.text) for prompt in prompts])
            for tokens in completions:
                self._words.decode(tokens)
            return Round(tuple(map(tuple, completions)), perf_counter() - started)
        finally:
            self._batching.stop()

    def close(self) -> None:
        """There is nothing left to stop."""
