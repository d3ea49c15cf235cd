"""What the benchmark compares: the names of its arms, and what each of them does in one round.

A *round* is a short list of prompts that every arm completes in turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from store.events import PromptReceived

if TYPE_CHECKING:
    from pipeline.build_models import Models
    from pipeline.config import Config


class ArmName(StrEnum):
    """The arms that need nothing but this project; engines add names of their own."""

    PLAIN = "plain"  # transformers' generate; static batches, padded on the left
    ASSISTED = "assisted"  # its assisted generation across tokenizers: UAG when greedy, TLI when sampling
    ASSISTED_DEFAULTS = "assisted-defaults"
    PROMPT_LOOKUP = "prompt-lookup"
    CONTINUOUS = "continuous"  # its continuous batching
    OWN_PLAIN = "own-plain"  # this pipeline without drafting
    FROZEN = "frozen"
    LEARNING = "learning"
    LOGGED = "logged"  # learning with the token log, the curves and the versions that `replay` writes


BATCH_ONE = frozenset({ArmName.ASSISTED, ArmName.ASSISTED_DEFAULTS, ArmName.PROMPT_LOOKUP})
OURS = (ArmName.OWN_PLAIN, ArmName.FROZEN, ArmName.LEARNING, ArmName.LOGGED)
LEARNERS = frozenset({ArmName.LEARNING, ArmName.LOGGED})


@dataclass(frozen=True)
class Step:
    """One block of all rows in flight.

    Attributes:
        drafted: pieces per row that the drafter model drew; it ran as often as the longest has pieces.
        proposed: target tokens per row; the target read one more of each row.
    """

    drafted: tuple[int, ...]
    proposed: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """What the pipeline tells of a round from the inside. Seconds are parts of the round's.

    Attributes:
        steps: in order.
        judged, accepted: target tokens.
        prompt_tokens: target tokens of the round's prompts.
        decode, translate, verify: seconds of the stages.
        learning: seconds for which decoding stood still for updates.
        learning_beside: seconds of computing them meanwhile; no part of the round's.
        log, versions, drift: seconds of keeping the log and its curves, of publishing, and of watching for drift.
        log_beside: processor seconds of writing the log meanwhile; no part of the round's.
    """

    steps: tuple[Step, ...]
    judged: int
    accepted: int
    prompt_tokens: int
    decode: float
    translate: float
    verify: float
    learning: float
    learning_beside: float = 0.0
    log: float = 0.0
    log_beside: float = 0.0
    versions: float = 0.0
    drift: float = 0.0

    @property
    def blocks(self) -> int:
        """Blocks of single rows."""
        return sum(len(step.drafted) for step in self.steps)


@dataclass(frozen=True)
class Round:
    """What one arm made of one round of prompts.

    Attributes:
        tokens: per prompt, in the order of the prompts, the emitted target ids; the one that ended it included.
        seconds: wall time from the prompts' texts to all completions' texts, learning from them included.
        work: what happened inside, of this pipeline's arms.
        nats: per prompt the surprisal of its tokens under the target's law; empty when it was not asked for.
    """

    tokens: tuple[tuple[int, ...], ...]
    seconds: float
    work: Work | None = None
    nats: tuple[float, ...] = field(default=())

    @property
    def emitted(self) -> int:
        """Target tokens of all prompts."""
        return sum(map(len, self.tokens))


class Arm(Protocol):
    """One way to complete prompts. Called for one round at a time, in stream order; keeps its caches between rounds
    and, if it learns, what it has learned."""

    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        """Complete the prompts, up to the configured batch at a time, and time that. All of them fit the models."""
        ...

    def close(self) -> None:
        """Called once, after the last round: stop threads and processes, close files."""
        ...


class Engines(Protocol):
    """Arms of other engines on the same weights, which the command finds by its flags."""

    def names(self, batch: int, temperature: float) -> Sequence[str]:
        """The arms that can run so, in the order of the table; nothing is loaded for that."""
        ...

    def label(self, name: str) -> str:
        """An arm's name in the table, with version and precision, such as `llama.cpp f32, k=5`."""
        ...

    def build(self, name: str, config: "Config", models: "Models", scratch: Path) -> Arm:
        """Load and convert what one arm needs. Sampling, lengths, batch, threads and seed are in `config`; `models`
        has the names and vocabularies of target and drafter. Converted weights may go below `scratch`.

        Raises:
            UsageError: the engine cannot run this.
        """
        ...


def chunks(prompts: Sequence[PromptReceived], size: int) -> list[Sequence[PromptReceived]]:
    """The prompts in runs of `size`; the last may be shorter."""
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]
