"""How often the drafter is right at fixed places: at every token of what the target emits, drafted or not."""

from dataclasses import replace
from time import perf_counter, process_time

from typing_extensions import override

from stages.contract.blocks import TrainingExample
from stages.distill import Distill, Distiller
from store.events import Updated


class MeasuringDistiller(Distiller):
    """A distiller that measures the drafter in service on every prompt before it learns from it.

    Attributes:
        wall, cpu: seconds that the measurements took.
    """

    def __init__(self, distill: Distill) -> None:
        self._distill = distill
        # by offset the number of tokens whose first piece was right, and the number of tokens
        self.found: dict[int, tuple[float, int]] = {}
        self.wall = self.cpu = 0.0

    @override
    def learn(self, example: TrainingExample) -> tuple[Updated, ...]:
        wall, cpu = perf_counter(), process_time()
        trainer, copied = self._distill.drafter.trainer, replace(example, labels=())
        places, right = example.supervised_tokens, trainer.measure_acceptance(None, [copied])
        trainer.forget(lambda kept: kept is copied)  # what was read of it would spare the gate of some arms its work
        if right is not None:
            self.found[example.offset] = round(right * places, 3), places
        self.wall, self.cpu = self.wall + perf_counter() - wall, self.cpu + process_time() - cpu
        return self._distill.learn(example)

    @property
    @override
    def drafter_version(self) -> int:
        return self._distill.drafter_version

    @property
    @override
    def head_version(self) -> int:
        return self._distill.head_version

    @property
    @override
    def busy(self) -> bool:
        return self._distill.busy

    @override
    def reset_head(self) -> tuple[Updated, ...]:
        return self._distill.reset_head()

    @override
    def wait(self) -> bool:
        return self._distill.wait()

    @override
    def end(self) -> tuple[Updated, ...]:
        return self._distill.end()
