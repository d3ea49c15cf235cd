"""The arms of the speed benchmark: their names, which of them can run, and their interface.

A *round* is a short list of prompts that every arm completes in turn.
"""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from store.errors import UsageError
from store.events import PromptReceived

if TYPE_CHECKING:
    from benchmarks.speed.work import MeasuredRound
    from pipeline.assembly.models import Models
    from pipeline.config.settings import Config


class ArmName(StrEnum):
    """Names of the arms that need no other engine; other engines add their own names."""

    PLAIN = "plain"  # transformers' generate; static batches, padded on the left
    ASSISTED = "assisted"  # its assisted generation across tokenizers: UAG when greedy, TLI when sampling
    ASSISTED_DEFAULTS = "assisted-defaults"
    PROMPT_LOOKUP = "prompt-lookup"
    CONTINUOUS = "continuous"  # its continuous batching
    OWN_PLAIN = "own-plain"  # this pipeline without drafting
    MEMORY = "memory"  # with the own text and the memory as the only sources
    NEVER_LEARNED = "never-learned"  # with the own text and the drafter as loaded, and nothing of earlier prompts
    FROZEN = "frozen"  # the memory learns, the drafter does not
    LEARNING = "learning"
    LOGGED = "logged"  # learning with the token log, the curves and the versions that `replay` writes
    MEMORY_LOGGED = "memory-logged"  # what `replay --draft-sources own,memory` does, the log included
    NEVER_LEARNED_LOGGED = "never-learned-logged"  # what `replay --no-learn --draft-sources own,model` does
    FROZEN_LOGGED = "frozen-logged"  # what `replay --no-learn` does, the log included


BATCH_ONE = frozenset({ArmName.ASSISTED, ArmName.ASSISTED_DEFAULTS, ArmName.PROMPT_LOOKUP})
LOGGING = (ArmName.LOGGED, ArmName.MEMORY_LOGGED, ArmName.NEVER_LEARNED_LOGGED, ArmName.FROZEN_LOGGED)
ON_REQUEST = LOGGING[1:]  # run only where they are named
OURS = (ArmName.OWN_PLAIN, ArmName.MEMORY, ArmName.NEVER_LEARNED, ArmName.FROZEN, ArmName.LEARNING, *LOGGING)
LEARNERS = frozenset({ArmName.LEARNING, *LOGGING})  # warmed up with all prompts
QUICK_ARMS = (ArmName.PLAIN, ArmName.OWN_PLAIN, ArmName.MEMORY, ArmName.LOGGED)  # with `--quick`


def reads_all_with_drafter(name: str) -> bool:
    """Return whether an arm's engine has the drafter read whole prompts, which must then fit into its context."""
    return name in (ArmName.ASSISTED, ArmName.ASSISTED_DEFAULTS)


class Arm(Protocol):
    """A method of completing prompts. It is called round by round in stream order, and keeps its caches and learned
    weights between rounds."""

    def complete(self, prompts: Sequence[PromptReceived]) -> "MeasuredRound":
        """Complete the prompts with the configured batch size and time it. All prompts fit the models."""
        ...

    def close(self) -> None:
        """Stop threads and processes and close files. Called once, after the last round."""
        ...


class Engines(Protocol):
    """Arms of other engines on the same weights, which options of the command switch on."""

    def names(self, batch: int, temperature: float) -> Sequence[str]:
        """Names of the arms that can run at this batch size and temperature, in table order. Loads nothing."""
        ...

    def label(self, name: str) -> str:
        """Name of an arm in the table with version and precision, such as `llama.cpp f32, k=5`."""
        ...

    def build(self, name: str, config: "Config", models: "Models", scratch: Path, longest: int) -> Arm:
        """Build an arm: load and convert its models.

        Args:
            scratch: folder for converted weights.
            longest: tokens of the longest prompt and completion together.

        Raises:
            UsageError: the engine cannot run these models.
        """
        ...


class NoEngines(Engines):
    """No other engine."""

    @override
    def names(self, batch: int, temperature: float) -> Sequence[str]:
        return ()

    @override
    def label(self, name: str) -> str:
        return name

    @override
    def build(self, name: str, config: "Config", models: "Models", scratch: Path, longest: int) -> Arm:
        raise UsageError(f"there is no arm {name!r}")


def arms_at(batch: int, temperature: float, engines: Engines, *, quick: bool = False) -> tuple[str, ...]:
    """Names of all arms that can run, in the order of the table: `transformers`, other engines, this pipeline. With
    `quick` only those of `QUICK_ARMS` and of other engines."""
    ours = [name for name in (QUICK_ARMS if quick else ArmName) if batch == 1 or name not in BATCH_ONE]
    return (
        *(name for name in ours if name not in OURS),
        *engines.names(batch, temperature),
        *(name for name in ours if name in OURS),
    )


def require_usable(names: Sequence[str], batch: int, temperature: float, engines: Engines) -> None:
    """Check that all named arms can run.

    Raises:
        UsageError: an arm cannot run at this batch size and temperature.
    """
    usable = arms_at(batch, temperature, engines)
    for name in names:
        if name not in usable:
            raise UsageError(
                f"--arms must name arms that run at batch {batch} and temperature {temperature:g}, but '{name}' does "
                f"not; there are {', '.join(usable)}"
            )


def reference_of(arms: Sequence[str]) -> str:
    """Name of the arm that the others are compared with."""
    return ArmName.PLAIN if ArmName.PLAIN in arms else arms[0]


def chunks(prompts: Sequence[PromptReceived], size: int) -> list[Sequence[PromptReceived]]:
    """Split the prompts into chunks of `size`; the last may be shorter."""
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]
