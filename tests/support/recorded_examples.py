"""The training examples of a stream, by a learner that keeps them and learns nothing."""

from pathlib import Path
from tempfile import TemporaryDirectory

from typing_extensions import override

from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import Models, load_only_target
from pipeline.config.settings import Config
from pipeline.learning.local_learner import LocalLearner
from pipeline.sources.stream import open_source
from stages.contract.blocks import TrainingExample
from stages.distill import Distiller
from store.events import Updated


class ExampleRecorder(Distiller):
    """A distiller that learns nothing and keeps the examples."""

    def __init__(self) -> None:
        self.examples: list[TrainingExample] = []

    drafter_version = head_version = 0
    busy = False

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


def record_examples(config: Config) -> tuple[Models, list[TrainingExample]]:
    """Let the target complete the prompts of the first source; the models and the examples in stream order."""
    recorder = ExampleRecorder()
    with TemporaryDirectory() as scratch:
        models = load_only_target(config, Path(scratch) / "fetched")
        loop = build_loop(config, (models,), Path(scratch) / "run")
        (runner,) = loop.runners.values()
        assert isinstance(runner.learner, LocalLearner)
        runner.learner.distill = recorder
        for _ in loop.run(open_source(config.sources[0], config.source).read(0)):
            pass
    return models, sorted(recorder.examples, key=lambda example: example.offset)
