"""Queue of generation requests, from their arrival until they finish.

Any thread submits and cancels requests. The engine's thread admits them as prompts of the stream and delivers the
verdicts of each block to their listeners.
"""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from typing_extensions import override

from pipeline.recorder import shown_tokens
from pipeline.serve.messages import BusyError, Chunk, ChunkListener, Finish, GenerationRequest, Usage
from stages.contract.blocks import SequenceState, Verdict
from stages.memory.counting import LONGEST
from stages.memory.ngram_table import scope_of
from stages.sampling.grammars import Grammar
from stages.sampling.logprobs import TokenLogprobs
from stages.sampling.noise import Noise
from stages.sampling.random_source import SeededRandomSource
from stages.verification.emitted_tokens import emitted_sources
from stages.vocabulary.text_stream import BytesOf, StopStrings, TextStream
from stages.vocabulary.tokenizer_view import Vocabulary
from store.events import PromptReceived

DATASET = "live"  # of all requests, in the log
PREFILL_TOKENS = 128  # prompt tokens admitted between two blocks, one prompt at least; more wait for the next block
RECENT_REQUESTS = 32  # finished requests from which the time to wait is estimated
MAX_RETRY_SECONDS = 60
SEED_COUNT = 1 << 63


@dataclass
class PendingRequest:
    """A request that has not finished: queued or being decoded."""

    request: GenerationRequest
    listener: ChunkListener
    deadline: float  # time at which it must end, by the queue's clock
    text_stream: TextStream[int]
    grammar: Grammar | None  # one of the sequence's transforms
    offset: int = -1  # of its prompt in the stream; -1 while it is queued
    early_finish: Finish | None = None  # reason to end it early, once there is one
    sequence: SequenceState | None = None  # its state in the loop; None while it is queued
    blocks: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    lengths: Counter[int] = field(default_factory=Counter)  # blocks by the number of accepted tokens
    sources: Counter[str] = field(default_factory=Counter)  # emitted tokens by what proposed them
    echoed: bool = False

    @property
    def begun(self) -> bool:
        """Whether it may end early: it has emitted tokens, or its prompt is still being read."""
        return self.blocks > 0 or (self.sequence is not None and self.sequence.reading)

    def deliver(self, verdict: Verdict) -> None:
        row = verdict.proposal.draft.row
        self.blocks += 1
        draft = verdict.proposal.draft
        self.drafted += len(draft.tree.candidates) if draft.tree else len(draft.pieces)
        self.accepted += verdict.accepted
        self.emitted = row.emitted
        shown = shown_tokens(row, verdict.emitted)
        text = self.text_stream.push(shown)
        if row.finish and self.grammar and self.grammar.has_failed(row.emitted):
            row.finish = Finish.GRAMMAR.value
        sources = emitted_sources(verdict.decisions, draft.source)
        self.lengths[verdict.accepted] += 1
        self.sources.update(source.value if source else "target" for source in sources)
        scored = zip(verdict.logprobs, sources, strict=False)  # none if they were not requested
        logprobs = tuple(replace(one, source=source) for one, source in scored)
        logprobs = logprobs if self.request.echo else logprobs[: len(shown)]
        self.emit(text, Finish(row.finish) if row.finish else None, verdict.emitted, logprobs)

    def emit(
        self,
        text: str,
        finish: Finish | None,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """Pass one chunk to the listener. With a finish it is the last chunk."""
        usage = None
        if self.request.echo and not self.echoed and self.sequence:
            text, logprobs = self.request.prompt.text + text, (*(self.sequence.prompt_logprobs or ()), *logprobs)
            self.echoed = True
        if finish:
            text += self.text_stream.close(cut=finish is Finish.LENGTH)
            counts = len(self.request.prompt.tokens), self.emitted, self.blocks, self.drafted, self.accepted
            cached = self.sequence.cached_tokens if self.sequence else 0
            lengths = tuple(self.lengths[length] for length in range(max(self.lengths, default=-1) + 1))
            usage = Usage(*counts, cached, lengths, dict(self.sources))
        try:
            self.listener(Chunk(text, tokens, logprobs, finish, usage))
        except Exception:  # for example a closed event loop: the client is gone
            self.early_finish = self.early_finish or Finish.CANCELLED


class RequestQueue(Iterator[PromptReceived]):
    """All unfinished requests. As an iterator it yields the prompts that may be admitted now.

    Args:
        max_length: target tokens of a prompt and its completion together.
        max_waiting: requests that may wait; more are refused.
        seed: of random numbers for requests without a seed.
        log_text: whether the texts of prompts may be logged.
        coupled: whether the noise of requests without a seed decides their tokens too.
        learner_accepts_examples: whether the learner accepts one more training example.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        max_length: int,
        max_waiting: int,
        seed: int,
        first_offset: int,
        *,
        log_text: bool,
        coupled: bool = False,
        learner_accepts_examples: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vocabulary, self._max_length, self._max_waiting = vocabulary, max_length, max_waiting
        self._seed, self._log_text, self._coupled = seed, log_text, coupled
        self._learner_accepts_examples, self._clock = learner_accepts_examples, clock
        self.next_offset = first_offset
        self._change = threading.Condition()
        self._waiting: deque[PendingRequest] = deque()
        self._running: dict[int, PendingRequest] = {}
        self._finish_times: deque[float] = deque(maxlen=RECENT_REQUESTS)
        self._prefilled = 0  # prompt tokens since the last block
        self.closed = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(
        self, request: GenerationRequest, listener: ChunkListener, grammar: Grammar | None = None
    ) -> Callable[[], None]:
        """Queue a request, with its compiled grammar, and return a function that cancels it; as `Engine.submit`."""
        deadline = math.inf if request.timeout_seconds is None else self._clock() + request.timeout_seconds
        text_stream = TextStream(self._make_bytes_of(request), request.sampling.stop)
        pending = PendingRequest(request, listener, deadline, text_stream, grammar.start() if grammar else None)
        with self._change:
            if self.closed:
                raise BusyError("the server is shutting down", 10, shutting_down=True)
            if len(self._waiting) >= self._max_waiting:
                raise BusyError(f"{self._max_waiting} requests are waiting already", self._estimate_retry_after())
            self._waiting.append(pending)
            self._change.notify_all()

        def cancel() -> None:
            with self._change:
                pending.early_finish = pending.early_finish or Finish.CANCELLED
                self._change.notify_all()

        return cancel

    def _make_bytes_of(self, request: GenerationRequest) -> BytesOf:
        """Return the function of a request's text; its markers are text in it."""
        specials, bytes_of = self._vocabulary.specials, self._vocabulary.bytes_of
        shown = {specials[name]: name.encode() for name in request.markers if name in specials}
        return (lambda token: shown.get(token) or bytes_of(token)) if shown else bytes_of

    def _estimate_retry_after(self) -> int:
        """Return the seconds in which as many requests finish as wait now, at the pace of the last ones."""
        if len(self._finish_times) < 2:
            return 1
        pace = (self._finish_times[-1] - self._finish_times[0]) / (len(self._finish_times) - 1)
        return max(1, min(MAX_RETRY_SECONDS, math.ceil(pace * len(self._waiting))))

    def close(self) -> None:
        """Refuse further requests. Those in the queue are still admitted."""
        with self._change:
            self.closed = True
            self._change.notify_all()

    def wait(self, seconds: float) -> bool:
        """Block until a request waits or the queue closes, at most so long; return whether one did or it has. For the
        engine's thread when it is idle.
        """
        with self._change:
            return self._change.wait_for(lambda: bool(self._waiting) or self.closed, seconds)

    @override
    def __next__(self) -> PromptReceived:
        """Admit the next request. Stops, for now, when none waits or enough prompt tokens were admitted."""
        while self._waiting and (not self._running or self._prefilled < PREFILL_TOKENS):
            with self._change:  # at every moment a request is in exactly one of both
                pending = self._waiting.popleft()
                early = pending.early_finish or (Finish.DEADLINE if self._clock() >= pending.deadline else None)
                if not early:
                    pending.offset, self.next_offset = self.next_offset, self.next_offset + 1
                    self._running[pending.offset] = pending
            if early:
                pending.emit("", early)
                continue
            request = pending.request
            self._prefilled += len(request.prompt.tokens)
            name = f"{request.request_id}#{request.choice}" if request.choice else request.request_id
            text = request.prompt.text if request.store and self._log_text else ""
            return PromptReceived(pending.offset, name, DATASET, pending.offset + 1, text)
        raise StopIteration

    def prepare_sequence(self, prompt: PromptReceived) -> SequenceState:
        pending = self._running[prompt.offset]
        request = pending.request
        sampling, seed, place = request.sampling, self._seed, prompt.offset
        if sampling.seed is not None:
            seed, place = sampling.seed % SEED_COUNT, request.choice
        coupled = not sampling.is_greedy and (self._coupled or sampling.seed is not None)
        tokens = list(request.prompt.tokens)
        pending.sequence = SequenceState(
            prompt.offset,
            prompt.prompt_id,
            prompt.dataset,
            prompt.text,
            tokens,
            len(tokens),
            list(request.prompt.pieces),
            SeededRandomSource(seed, place),
            min(sampling.max_tokens, self._max_length - len(tokens)),
            private=not request.store,
            sampling=sampling,
            stop_strings=StopStrings(self._make_bytes_of(request), sampling.stop) if sampling.stop else None,
            transforms=(*sampling.make_transforms(tokens), *filter(None, [pending.grammar])),
            record_example=self._learner_accepts_examples(),
            scope=scope_of(request.tenant),
            prompt_logprobs=[TokenLogprobs(tokens[0], None)]
            if request.echo and sampling.logprobs is not None
            else None,
            noise=Noise.from_seed(seed, place) if coupled else None,
            hint=(*tokens[-LONGEST:], *request.prediction) if request.prediction else (),
        )
        return pending.sequence

    def on_verdicts(self, verdicts: list[Verdict]) -> None:
        """Deliver a block's verdicts to their listeners and drop finished requests."""
        self._prefilled = 0
        for verdict in verdicts:
            row = verdict.proposal.draft.row
            pending = self._running[row.offset]
            pending.deliver(verdict)
            if row.finish:
                self._remove(pending)
        for pending in list(self._running.values()):
            if pending.sequence and pending.sequence.finish:  # its prompt is read, and it may emit nothing
                self.finish_early(pending.offset, Finish(pending.sequence.finish))

    def take_expired(self) -> list[tuple[int, Finish]]:
        """Finish queued requests that were cancelled or are overdue, and list the running ones by offset and reason.

        A running request is listed while its prompt is read, and after one block at least. The caller ends its sequence
        and calls `finish_early`.
        """
        now = self._clock()
        with self._change:
            expired = [pending for pending in self._waiting if pending.early_finish or now >= pending.deadline]
            for pending in expired:
                self._waiting.remove(pending)
        for pending in expired:
            pending.emit("", pending.early_finish or Finish.DEADLINE)
        for pending in self._running.values():
            if now >= pending.deadline:
                pending.early_finish = pending.early_finish or Finish.DEADLINE
        return [(offset, one.early_finish) for offset, one in self._running.items() if one.early_finish and one.begun]

    def finish_early(self, offset: int, finish: Finish) -> None:
        """Finish a running request whose sequence was ended early."""
        pending = self._running[offset]
        self._remove(pending)
        pending.emit("", finish)

    def finish_all(self, finish: Finish) -> None:
        """Close the queue and finish all requests, because nothing decodes them any more."""
        with self._change:
            self.closed = True
            unfinished = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
        for pending in unfinished:
            pending.emit("", finish)

    def cancel_all(self) -> None:
        """Cancel all requests, as if every client had disconnected. They end within one block."""
        with self._change:
            for pending in (*self._running.values(), *self._waiting):
                pending.early_finish = pending.early_finish or Finish.CANCELLED

    def _remove(self, pending: PendingRequest) -> None:
        del self._running[pending.offset]
        self._finish_times.append(self._clock())
