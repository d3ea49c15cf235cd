"""Completions of a target with what drafting would know at each of their pieces."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from typing_extensions import override

from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import Models, load_only_target
from pipeline.config.settings import Config
from pipeline.learning.local_learner import LocalLearner
from pipeline.study.task import choose_prompts
from stages.contract.blocks import Numbers, TrainingExample
from stages.distill import Distiller
from stages.examples.soft_targets import tabulate
from stages.models.language_model import LanguageModel
from store.errors import ConfigError
from store.events import PromptCompleted, Updated
from store.registry.registry import NoRegistry


@dataclass(frozen=True)
class RecordedText:
    """A prompt and its completion.

    Attributes:
        pieces: the whole text in drafter ids.
        starts: where the emitted tokens begin.
        states: the target's reduced hidden state at each emitted token, int8 (tokens, S).
    """

    pieces: tuple[int, ...]
    starts: tuple[int, ...]
    states: Numbers

    @classmethod
    def from_example(cls, example: TrainingExample) -> "RecordedText | None":
        """Take over an example's text; None if one of its tokens has no pieces or no state."""
        table = tabulate(example.soft_targets)
        starts = tuple(table.positions_N[table.depths_N == 0].tolist())
        if example.states is None or len(example.states) != len(starts):
            return None
        return cls(example.pieces, starts, example.states)


class ExampleRecorder(Distiller):
    """A distiller that learns nothing and keeps the examples."""

    def __init__(self) -> None:
        self.examples: list[TrainingExample] = []

    @property
    @override
    def drafter_version(self) -> int:
        return 0

    @property
    @override
    def head_version(self) -> int:
        return 0

    @property
    @override
    def busy(self) -> bool:
        return False

    @override
    def learn(self, example: TrainingExample) -> tuple[Updated, ...]:
        self.examples.append(example)
        return ()

    @override
    def reset_head(self) -> tuple[Updated, ...]:
        return ()

    @override
    def wait(self) -> bool:
        return False

    @override
    def end(self) -> tuple[Updated, ...]:
        return ()


def record_texts(config: Config, on_prompt: Callable[[], None] = lambda: None) -> tuple[Models, list[RecordedText]]:
    """Return the models and the texts that they made of the prompts, in stream order. As `record_examples`."""
    models, examples = record_examples(config, on_prompt)
    return models, [text for text in map(RecordedText.from_example, examples) if text is not None]


def record_examples(
    config: Config, on_prompt: Callable[[], None] = lambda: None
) -> tuple[Models, list[TrainingExample]]:
    """Let the target complete the prompts of a configuration, and return the models and the examples in stream order.

    Args:
        config: names one target.
        on_prompt: called after each completed prompt.

    Raises:
        UsageError: the settings, models or sources cannot be used.
    """
    wanted = {"learn.enabled": True, "learn.method": "least-squares", "learn.target_state": True}
    config = config.with_overrides(wanted)
    prompts, recorder = choose_prompts(config, None), ExampleRecorder()
    with TemporaryDirectory() as scratch:
        models = load_only_target(config, Path(scratch) / "fetched")
        loop = build_loop(config, (models,), NoRegistry(), Path(scratch) / "run")
        (runner,) = loop.runners.values()
        if not isinstance(runner.learner, LocalLearner):
            raise ConfigError("The study records texts in its own process; leave out settings of a remote learner.")
        runner.learner.distill = recorder
        for event in loop.run(iter(prompts.chosen)):
            if isinstance(event, PromptCompleted):
                on_prompt()
    return models, sorted(recorder.examples, key=lambda example: example.offset)


@torch.inference_mode()
def read_hidden(drafter: LanguageModel, pieces: Sequence[int]) -> Tensor:
    """Return the drafter's last hidden state after each piece of a text, in float32 (T, W)."""
    captured: list[Tensor] = []
    layer = drafter.model.get_output_embeddings()
    hook = layer.register_forward_hook(lambda _layer, inputs, _outputs: captured.append(inputs[0]))
    try:
        ids_1T = torch.tensor([list(pieces)], device=drafter.device)
        drafter.read(ids_1T, torch.arange(len(pieces), device=drafter.device)[None], None)
    finally:
        hook.remove()
    return captured[0][0].float()
