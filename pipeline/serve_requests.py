"""What the HTTP side and the engine of `omnidraft serve` say to each other.

One HTTP request with `n` choices is `n` asks. The HTTP side runs on an asyncio loop, the engine on a thread of its own:
asks go in by `Engine.submit`, chunks come back by a listener that the engine's thread calls.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from stages.logprobs import TokenLogprobs


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the end of the sequence, or a stop string
    LENGTH = "length"
    CANCELLED = "cancelled"  # the client left, or the server is going away
    DEADLINE = "deadline"
    FAILED = "failed"  # an error of ours


class BusyError(Exception):
    """Raised by `Engine.submit` when the queue is full or the server is shutting down.

    Attributes:
        retry_after: seconds after which it is worth trying again.
        leaving: whether the server is shutting down.
    """

    def __init__(self, reason: str, retry_after: int, *, leaving: bool = False) -> None:
        super().__init__(reason)
        self.retry_after, self.leaving = retry_after, leaving


@dataclass(frozen=True)
class Encoded:
    """A prompt as text, in the target's ids and in the drafter's pieces."""

    text: str
    tokens: tuple[int, ...]
    pieces: tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """One completion that is asked for.

    Attributes:
        name: of the request, unique; it is the prompt's id in the log, for choice i > 0 followed by `#i`.
        prompt: what is to be completed.
        max_new_tokens: at least 1; the engine cuts it to the room that the models' contexts leave.
        temperature, top_k, top_p: of the target's law for this request.
        stop: texts before which the completion ends.
        seed: of the draws; None takes them from the run's seed and the request's place in the stream.
        logprobs: alternatives wanted per token, 0 for the emitted token's own alone; None for none at all.
        store: whether its text may be logged and learned from.
        seconds: after which it ends with `Finish.DEADLINE`, counted from `submit`; None for no limit.
        choice: its number among those of its request; part of the seed of its draws.
    """

    name: str
    prompt: Encoded
    max_new_tokens: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    store: bool = True
    seconds: float | None = None
    choice: int = 0


@dataclass(frozen=True)
class Usage:
    """What one completion took.

    Attributes:
        prompt, emitted: target tokens.
        blocks: target passes that it took part in.
        drafted: pieces, by the model and by lookup.
        accepted: target tokens that were proposed and accepted.
    """

    prompt: int
    emitted: int
    blocks: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Chunk:
    """Something new of a completion.

    Attributes:
        text: characters that are now certain; what might become a stop string or half a character is kept back.
        tokens: target ids of the block, also those whose text is still kept back or never shown.
        logprobs: of these tokens, if asked for.
        finish: None while more is to come; behind a chunk with a finish nothing follows.
        usage: with the finish.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    usage: Usage | None = None


Listener = Callable[[Chunk], None]  # called on the engine's thread; must return at once and never raise


@dataclass(frozen=True)
class Figures:
    """How the engine stands. Everything is a plain number or text, read without locking.

    Attributes:
        model: the target's name, as `/v1/models` shows it.
        ready: whether asks are taken.
        running, waiting: asks being decoded, and in the queue.
        drafter_version, head_version: updates in service.
        published_version: of the newest version folder; None before the first.
        learner_lag: completed prompts that the learner has not looked at yet.
        learner_dropped: completed prompts that it never will, because its queue was full.
        learner_alive: None where nothing learns.
        max_length: longest prompt and completion together, in target tokens.
    """

    model: str
    ready: bool
    running: int
    waiting: int
    drafter_version: int
    head_version: int
    published_version: int | None
    learner_lag: int
    learner_dropped: int
    learner_alive: bool | None
    max_length: int


class Engine(Protocol):
    """Completes asks. All methods may be called from any thread and return at once."""

    def encode(self, text: str) -> Encoded:
        """A plain prompt. Takes time in proportion to its length: call it off the event loop.

        Raises:
            UnfitPromptError: it has no token at all, or more than the models' contexts hold.
        """
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> Encoded:
        """A conversation, each message with `role` and `content` (texts), in the target's chat template.

        Raises:
            UnfitPromptError: as `encode`, or the template cannot render it.
        """
        ...

    def text_of(self, token: int) -> bytes:
        """The bytes of a target token; of a special token its name."""
        ...

    def submit(self, ask: Ask, listener: Listener) -> Callable[[], None]:
        """Queue an ask. The listener is told all that follows, at the latest with a finish.

        Returns:
            what cancels it: harmless when it is finished; its place is free within one block.

        Raises:
            BusyError: the queue is full, or the server is shutting down.
        """
        ...

    def figures(self) -> Figures:
        """How it stands now."""
        ...
