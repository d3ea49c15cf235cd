"""The engine of `omnidraft serve`: the loop of every run, over prompts that arrive while it runs.

One thread runs it. Between two blocks it ends cancelled and overdue requests, admits queued ones, and commits.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any

from typing_extensions import override

from pipeline.assembly.models import Models
from pipeline.learner_service.process import LearnerProcess
from pipeline.loop import Loop, TargetRunner, UnfitPromptError
from pipeline.run.committer import Committer
from pipeline.run.context import EventSink
from pipeline.serve.messages import (
    NO_PREFIXES,
    ChunkListener,
    EncodedPrompt,
    Engine,
    EngineStatus,
    Finish,
    GenerationRequest,
    PlainPrompt,
)
from pipeline.serve.request_queue import RequestQueue
from stages.engine.models.devices import set_threads
from stages.prompts.prompt_reader import PromptReader
from stages.sampling.grammars import Grammar, GrammarCompiler, GrammarSource
from stages.vocabulary.chat import NO_VALUES, Conversation, ConversationError, DrafterEncoder
from stages.vocabulary.infilling import encode_gap
from store.errors import ConfigError

LOG = logging.getLogger("omnidraft.serve")

IDLE_SECONDS = 0.5  # between two checks while there are no requests
GRAMMARS = 64  # compiled ones that are kept


class LiveEngine(Engine):
    """An engine that runs the loop of one target on a thread of its own.

    The loop's only runner gets its sequences from the queue and passes verdicts to it. `threads` is the number of
    threads that the models compute with; learner and reader of prompts are for the status, None where there is none.
    Clients know the target by `name`.
    """

    def __init__(
        self,
        models: Models,
        conversation: Conversation,
        queue: RequestQueue,
        loop: Loop,
        runner: TargetRunner,
        events: EventSink,
        committer: Committer,
        learner: LearnerProcess | None,
        threads: int,
        reader: PromptReader | None = None,
        name: str | None = None,
    ) -> None:
        self._name = name or models.target_vocabulary.name
        self._models, self._conversation, self._vocabulary = models, conversation, models.target_vocabulary
        self._max_length = models.target.max_length - 1  # of a prompt, in target tokens
        self._names = {token: name for name, token in self._vocabulary.specials.items()}
        self._queue, self._loop, self._runner = queue, loop, runner
        self._events, self._committer, self._learner = events, committer, learner
        self._threads, self._reader = threads, reader
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    @override
    def vocabulary_size(self) -> int:
        return self._vocabulary.size

    @override
    def encode(
        self, prompt: PlainPrompt, controls: bool = False, begin: bool = True, suffix: str = ""
    ) -> EncodedPrompt:
        words, size, ends = self._vocabulary, self._vocabulary.size, tuple[int, ...]()
        if isinstance(prompt, str) and suffix:
            self._check_characters(len(prompt) + len(suffix))
            part = partial(words.encode_controls, begin=False) if controls else partial(words.encode_text, first=False)
            tokens, ends = encode_gap(words, prompt, suffix, part)
            tokens = [*(words.encode("") if begin else ()), *tokens]
        elif isinstance(prompt, str) and not controls:
            self._check_characters(len(prompt))
            tokens = words.encode(prompt) if begin else words.encode_text(prompt)
            return self._check_length(prompt, tokens, self._models.drafter_vocabulary.encode(prompt))
        elif isinstance(prompt, str):
            self._check_characters(len(prompt))
            tokens = words.encode_controls(prompt, begin=begin)
        elif not all(0 <= token < size for token in prompt):
            raise UnfitPromptError(f"the tokens of a prompt must be from 0 to {size - 1}")
        else:
            tokens = list(prompt)
        encoded = self._check_length(words.decode(tokens), tokens, self._for_drafter.encode_tokens(tokens))
        return replace(encoded, ends=ends)

    @cached_property
    def _for_drafter(self) -> DrafterEncoder:
        return DrafterEncoder(self._vocabulary, self._models.drafter_vocabulary, self._models.pair)

    @override
    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        values: Mapping[str, Any] = NO_VALUES,
    ) -> EncodedPrompt:
        self._check_characters(sum(len(message["content"]) for message in messages))
        try:
            tokens, pieces = self._conversation.encode_conversation(messages, tools, values)
        except ConversationError as error:
            raise UnfitPromptError(error.reason) from error  # a client cannot change settings
        except ConfigError as error:
            raise UnfitPromptError(str(error)) from error
        prompt = self._check_length(self._vocabulary.decode(tokens), tokens, pieces)
        return replace(prompt, call_style=self._conversation.call_style) if tools else prompt

    @override
    def compile_grammar(self, source: GrammarSource) -> None:
        self.find_grammar(source)

    @cached_property
    def find_grammar(self) -> Callable[[GrammarSource], Grammar]:
        """A function that returns a compiled grammar; the last ones are kept."""
        vocabulary = self._vocabulary
        compiler = GrammarCompiler(vocabulary.token_bytes, vocabulary.spell, self._models.eos_ids)
        return lru_cache(GRAMMARS)(compiler.compile)

    @override
    def decode_token(self, token: int, *, name: bool = True) -> bytes:
        return self._vocabulary.bytes_of(token) or (self._names.get(token, "").encode() if name else b"")

    def _check_characters(self, characters: int) -> None:
        """Refuse a text with too many characters before it is tokenised, which takes up to a second per megabyte."""
        fewest = self._vocabulary.fewest_tokens(characters)
        if fewest > self._max_length:
            raise self._length_error(f"{fewest} or more")

    def _check_length(self, text: str, tokens: list[int], pieces: list[int]) -> EncodedPrompt:
        if not 0 < len(tokens) <= self._max_length:
            raise self._length_error(f"{len(tokens)}")
        if not pieces:
            raise UnfitPromptError("a prompt must have a token of the drafter, got none")
        return EncodedPrompt(text, tuple(tokens), tuple(self._models.clip_prompt(pieces)))

    def _length_error(self, got: str) -> UnfitPromptError:
        return UnfitPromptError(f"a prompt must have 1 to {self._max_length} of the target's tokens, got {got}")

    def start(self) -> None:
        self._thread.start()

    @override
    def submit(self, request: GenerationRequest, listener: ChunkListener) -> Callable[[], None]:
        return self._queue.submit(request, listener, self.find_grammar(request.grammar) if request.grammar else None)

    @override
    def read_status(self) -> EngineStatus:
        learner, served, reader = self._learner, self._runner.learner, self._reader
        return EngineStatus(
            model=self._name,
            ready=self._thread.is_alive() and not self._queue.closed,
            running=self._queue.running,
            waiting=self._queue.waiting,
            drafter_version=served.drafter_version,
            head_version=served.head_version,
            published_version=learner.published if learner else None,
            learner_lag=learner.lag if learner else 0,
            learner_dropped=learner.dropped if learner else 0,
            learner_alive=learner.alive if learner else None,
            max_length=self._max_length + 1,
            prefixes=reader.counts if reader else NO_PREFIXES,
            prefix_bytes=reader.cache.bytes if reader and reader.cache else 0,
            learner_restarts=learner.restarts if learner else 0,
            learner_waits=learner.waits if learner else None,
        )

    def close(self, grace_seconds: float) -> None:
        """Refuse requests, wait for the running ones up to the grace time, cancel the rest, and commit."""
        self._queue.close()
        self._thread.join(grace_seconds)
        self._queue.cancel_all()
        self._thread.join()
        self._events.close()

    def _run(self) -> None:
        try:
            set_threads(self._threads)  # torch has a setting per thread
            self._events.take(self._loop.begin())
            while not (self._queue.closed and not self._queue.waiting):
                self._events.take(self._loop.until_idle(self._queue, self._run_between_blocks))
                self._run_between_blocks()
                is_free = not self._queue.wait(IDLE_SECONDS)
                if self._learner:
                    self._learner.set_free(is_free)
                self._events.take(self._runner.learner.apply_new_weights())
            self._committer.commit(wait=True)
        except BaseException as error:
            self.failure = error
            LOG.error("the engine stopped: %r; the last commit remains valid", error)
        finally:
            self._queue.finish_all(Finish.FAILED)

    def _run_between_blocks(self) -> bool:
        """End expired requests and commit if it is due. Returns False, because the loop never pauses."""
        for offset, finish in self._queue.take_expired():
            self._events.take(self._runner.finish_early(offset, finish.value))
            self._queue.finish_early(offset, finish)
        if self._events.dirty and self._committer.is_due():
            self._committer.commit()
            self._events.dirty = False
        return False
