"""The arms of `omnidraft bench`: ways to complete the same prompts with the same target.

The arms of this project run the loop that `replay` runs, each with its own caches and a log of its own. The arm of
`transformers` calls `generate`, one token per forward pass, on static batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from typing_extensions import override

from pipeline.assembly.admission import Admission
from pipeline.assembly.models import Models, load_only_target, locate, registry_uri
from pipeline.assembly.stages import make_sampling_params
from pipeline.config.settings import Config
from pipeline.loop import Loop
from pipeline.run.rounds import LoopInRounds, Records, Round
from stages.engine.checkpoints.gguf_file import find_gguf
from stages.engine.models.generate import generate
from stages.engine.models.huggingface import load_causal_model
from store.errors import ModelError
from store.events import Event, PromptReceived
from store.log.run_log import RunLog


class BenchArm(StrEnum):
    """The arms, in the order of the table."""

    TRANSFORMERS = "transformers"
    PLAIN = "plain"
    MEMORY = "memory"
    ALL = "all sources"
    LEARNING = "all, learning"


QUANTISED = ("int8", "int4", "codes", "codes8")  # formats of weights that `transformers` cannot compute with
FROZEN: Mapping[str, object] = {"learn.enabled": False}
SETTINGS: Mapping[BenchArm, Mapping[str, object]] = {
    BenchArm.PLAIN: {**FROZEN, "draft.max_draft": 0},
    BenchArm.MEMORY: {**FROZEN, "draft.sources": ("own", "memory")},
    BenchArm.ALL: FROZEN,
    BenchArm.LEARNING: {"learn.enabled": True},
}


class Arm(Protocol):
    """A way to complete prompts. It is called round by round in stream order, and keeps what it learns between them."""

    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        """Complete the prompts and measure the time. All of them fit the models."""
        ...

    def close(self) -> None:
        """Close files and threads. Called once, after the last round."""
        ...


class LogRecords(Records):
    """Writes the log, as `replay` does. Commits, which `replay` spaces by their cost, are left out."""

    def __init__(self, folder: Path, loop: Loop) -> None:
        folder.mkdir(parents=True)
        self._log = RunLog(folder)

    @override
    def take(self, event: Event) -> None:
        self._log.append(event)

    @override
    def close(self) -> None:
        self._log.close()


class GenerateArm(Arm):
    """`transformers`' own `generate`, without drafts."""

    def __init__(self, target: Any, config: Config, models: Models) -> None:
        self._target, self._config, self._models = target, config, models
        self._encode = Admission(config, models).encode

    @override
    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        started, batch, most = perf_counter(), self._config.batch, self._config.sampling.max_new_tokens
        sampling = make_sampling_params(self._config.sampling)
        tokens: list[tuple[int, ...]] = []
        for start in range(0, len(prompts), batch):
            chunk = prompts[start : start + batch]
            ids, seed = [self._encode(one)[0] for one in chunk], self._config.seed + chunk[0].offset
            for completion in generate(self._target, ids, sampling, most, self._models.eos_ids, seed):
                self._models.target_vocabulary.decode(completion)
                tokens.append(tuple(completion))
        return Round(tuple(tokens), perf_counter() - started)

    @override
    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Arms:
    """The arms that can run."""

    by_name: Mapping[str, Arm]
    models: Models  # names and vocabularies; no arm uses its caches
    left_out: Sequence[str]  # a sentence for each arm that cannot run

    def close(self) -> None:
        for arm in self.by_name.values():
            arm.close()


def make_arms(config: Config, scratch: Path, report: Callable[[str], None]) -> Arms:
    """Load the models once for all arms; a drafter that learns, and `transformers`, have weights of their own."""
    config = config.with_overrides({"publish.enabled": False})
    models = load_only_target(config, scratch / "models")
    arms: dict[str, Arm] = {}
    left_out: list[str] = []
    report("loading transformers")
    try:
        arms[BenchArm.TRANSFORMERS] = _make_generate(config, models, scratch)
    except ModelError as error:
        left_out.append(f"transformers was left out: {error}")
    for name, settings in SETTINGS.items():
        report(f"preparing: {name}")
        own, folder = config.with_overrides(settings), scratch / f"{name}-run"
        drafter = load_only_target(own, scratch / name).drafter if own.learn.enabled else models.drafter.share_weights()
        with_caches = replace(models, target=models.target.share_weights(), drafter=drafter)
        arms[name] = LoopInRounds(with_caches, own, folder, partial(LogRecords, folder))
    return Arms(arms, models, left_out)


def _make_generate(config: Config, models: Models, scratch: Path) -> Arm:
    """Raises `ModelError` for a model that `transformers` cannot run as it is here."""
    source = locate(models.name, registry_uri(config.publish), scratch / "transformers")
    if find_gguf(source):
        raise ModelError("it would compute with float32 copies of a GGUF file's weights")
    if config.weights in QUANTISED:
        raise ModelError(f"it has no weights in {config.weights}")
    return GenerateArm(load_causal_model(source, config.dtype, str(models.target.device)), config, models)
