"""Messages between the HTTP side and the engine of `omnidraft serve`.

One HTTP request with `n` choices becomes `n` generation requests. The HTTP side runs on an asyncio loop, the engine on
a thread of its own: requests enter by `Engine.submit`, chunks return by a listener that the engine's thread calls.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from typing_extensions import override

from stages.prompts.prompt_reader import PrefixCounts
from stages.sampling.grammars import GrammarSource
from stages.sampling.logprobs import TokenLogprobs
from stages.sampling.params import SamplingParams
from stages.vocabulary.chat import NO_VALUES, CallStyle

NO_PREFIXES = PrefixCounts()
PlainPrompt = str | tuple[int, ...]  # a text, or the target's tokens
GRAMMAR_LIMIT = (  # what is said of a completion with `Finish.GRAMMAR`
    "must follow its response_format with bounded work, but its parser reached a limit; "
    "simplify it: one alternative for each text, left recursion instead of right recursion"
)
GRACE_SECONDS = 30.0  # for which running requests continue after the start of a shutdown; containers wait longer


class Finish(StrEnum):
    """Reason for which a completion ended."""

    STOP = "stop"  # the end of the sequence, or a stop string
    LENGTH = "length"
    CANCELLED = "cancelled"  # the client disconnected, or the server is shutting down
    DEADLINE = "deadline"
    GRAMMAR = "grammar"  # its grammar takes more work than a request may have
    FAILED = "failed"  # an error of the server


class BusyError(Exception):
    """Raised by `Engine.submit`: the queue is full, the server is shutting down, or the engine is restarted after an
    error. The client should try again after so many seconds.
    """

    def __init__(self, reason: str, retry_after: int, *, shutting_down: bool = False, restarting: bool = False) -> None:
        super().__init__(reason, retry_after)
        self.retry_after, self.shutting_down, self.restarting = retry_after, shutting_down, restarting

    @override
    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as text, in the target's ids and in the drafter's pieces."""

    text: str
    tokens: tuple[int, ...]
    pieces: tuple[int, ...]
    call_style: CallStyle | None = None  # in which the target calls tools; None unless tools were given
    ends: tuple[int, ...] = ()  # tokens that end its completion, besides those of the request and of the target


@dataclass(frozen=True)
class GenerationRequest:
    """Request for one completion."""

    request_id: str  # id of the HTTP request, unique. The prompt's id in the log; choice i > 0 adds `#i`
    prompt: EncodedPrompt  # the text to complete
    sampling: SamplingParams  # how it is drawn and when it ends
    store: bool = True  # whether its text may be logged and learned from
    # time from `submit` after which it ends with `Finish.DEADLINE`; None for no limit
    timeout_seconds: float | None = None
    choice: int = 0  # index among the choices of its HTTP request; part of the seed
    # whose request it is: the API key of its client. The memory shows nothing of one tenant to another
    tenant: str = ""
    grammar: GrammarSource | None = None  # what its text must follow; None for any text
    # names of special tokens that are part of its text; the target may have none of these tokens
    markers: tuple[str, ...] = ()
    echo: bool = False  # whether its first chunk begins with the prompt, and with its log probabilities if requested
    prediction: tuple[int, ...] = ()  # target tokens that the client expects in the text: a draft


@dataclass(frozen=True)
class Usage:
    """Counters of one completion."""

    prompt: int  # target tokens
    emitted: int  # target tokens
    blocks: int  # target passes in which it took part
    drafted: int  # pieces by the model, and candidates of trees
    accepted: int  # target tokens that were proposed and accepted
    cached: int = 0  # tokens of the prompt whose keys and values were copied from the prefix cache
    lengths: tuple[int, ...] = ()  # number of blocks by the number of tokens accepted in them
    sources: Mapping[str, int] = field(default_factory=dict)  # emitted tokens by what proposed them; `target` for none


@dataclass(frozen=True)
class Chunk:
    """New part of a completion."""

    text: str  # characters that are final. A possible start of a stop string and half a character are held back
    tokens: tuple[int, ...] = ()  # target ids of the block, including those whose text is held back or never shown
    # of these tokens, if requested, after those of an echoed prompt. A token that ended the sequence has none but with
    # an echo, where clients find the prompt's tokens by their number
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None  # None while more chunks follow; a chunk with a finish is the last
    usage: Usage | None = None  # given with the finish


ChunkListener = Callable[[Chunk], None]  # called on the engine's thread; must return at once and never raise


@dataclass(frozen=True)
class EngineStatus:
    """State of the engine. All values are plain numbers or text, read without locking."""

    model: str  # the target's name, as `/v1/models` lists it
    ready: bool  # whether requests are accepted
    running: int  # requests that are decoded
    waiting: int  # requests in the queue
    drafter_version: int  # updates of the drafter in service
    head_version: int  # updates of the head in service
    published_version: int | None  # of the newest version folder; None before the first
    learner_lag: int  # completed prompts that the learner has not processed yet
    learner_dropped: int  # completed prompts that it never processes, because its queue was full
    learner_alive: bool | None  # None where nothing learns
    max_length: int  # longest prompt and completion together, in target tokens
    prefixes: PrefixCounts = NO_PREFIXES  # what the prefix cache was good for
    prefix_bytes: int = 0  # its size in bytes
    engine_restarts: int = 0  # how often it was started again after it had ended by itself
    learner_restarts: int = 0  # the same of the learner
    learner_waits: bool | None = None  # whether it waits until no request runs; None where nothing learns


class Engine(Protocol):
    """Completes requests. All methods may be called from any thread and return at once."""

    @property
    def vocabulary_size(self) -> int: ...

    def encode(
        self, prompt: PlainPrompt, controls: bool = False, begin: bool = True, suffix: str = ""
    ) -> EncodedPrompt:
        """Tokenise a plain prompt, or take its tokens. Takes time in proportion to its length: call it off the event
        loop. Raises `UnfitPromptError` if it has no token at all, or more than the models' contexts hold.

        Args:
            controls: whether names of control tokens in a text are these tokens; else they are text.
            begin: whether a text begins with BOS, if the tokenizer adds it.
            suffix: text that follows the completion of a text. Raises `ConfigError` if the target cannot fill it in.
        """
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        values: Mapping[str, Any] = NO_VALUES,
    ) -> EncodedPrompt:
        """Tokenise a conversation, each message with `role` and `content` (texts), by the target's chat template, to
        which further values go.

        Messages may also have `tool_calls` and `tool_call_id`; these and the tools are as templates expect them. Raises
        `UnfitPromptError` as `encode`, and if the template cannot render it.
        """
        ...

    def compile_grammar(self, source: GrammarSource) -> None:
        """Compile the grammar of a request that follows. Takes up to a second: call it off the event loop. Raises
        `ConfigError` if it is not valid, or cannot be used.
        """
        ...

    def decode_token(self, token: int, *, name: bool = True) -> bytes:
        """Return the bytes of a target token; of a special token its name, or nothing without `name`."""
        ...

    def submit(self, request: GenerationRequest, listener: ChunkListener) -> Callable[[], None]:
        """Queue a request. The listener receives all its chunks; the last one has a finish. Returns a function that
        cancels the request and frees its place within one block; harmless after the finish. Raises `BusyError` if the
        queue is full, or the server is shutting down.
        """
        ...

    def read_status(self) -> EngineStatus: ...
