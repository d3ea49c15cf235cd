"""The desk: asks from their arrival until they finish.

Any thread submits and cancels; the engine's thread takes them as prompts of the stream, and tells their listeners what
became of each block.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pipeline.records import shown_tokens
from pipeline.serve_requests import Ask, BusyError, Chunk, Finish, Listener, Usage
from stages.blocks import Row, Verdict
from stages.distributions import Sampling
from stages.draws import SeededDraws
from stages.ending import Ending, StoppedText
from stages.vocabulary import Vocabulary
from store.events import PromptReceived

DATASET = "live"  # of all requests, in the log
READ_AT_ONCE = 128  # prompt tokens that are read between two blocks; more wait for the next, one prompt at least
RECENT = 32  # finished asks from which the time to wait is told
LONGEST_RETRY = 60  # seconds
SEEDS = 1 << 63


@dataclass
class Flight:
    """An ask under way.

    Attributes:
        offset: its place in the stream, once it is taken.
        until: when it has to end, by the desk's clock.
        leaving: why it is to end early.
    """

    ask: Ask
    listener: Listener
    until: float
    text: StoppedText
    offset: int = -1
    leaving: Finish | None = None
    blocks: int = 0
    drafted: int = 0
    accepted: int = 0
    prompt: int = field(init=False)
    emitted: int = 0

    def __post_init__(self) -> None:
        self.prompt = len(self.ask.prompt.tokens)

    def tell(self, verdict: Verdict) -> None:
        """Pass on what a block brought."""
        row = verdict.proposal.draft.row
        self.blocks += 1
        self.drafted += len(verdict.proposal.draft.pieces)
        self.accepted += verdict.accepted
        self.emitted = row.emitted
        text = self.text.push(shown_tokens(row, verdict.emitted))
        self.say(text, verdict, Finish(row.finish) if row.finish else None)

    def say(self, text: str, verdict: Verdict | None, finish: Finish | None) -> None:
        """One chunk; with a finish, the last."""
        tokens = verdict.emitted if verdict else ()
        logprobs = verdict.logprobs if verdict else ()
        usage = None
        if finish:
            text += self.text.close()
            usage = Usage(self.prompt, self.emitted, self.blocks, self.drafted, self.accepted)
        try:
            self.listener(Chunk(text, tokens, logprobs, finish, usage))
        except Exception:  # such as an event loop that is closed: nobody is there any more
            self.leaving = self.leaving or Finish.CANCELLED


class Desk:
    """All asks. As an iterator it gives the prompts that may be admitted now.

    Args:
        words: of the target.
        longest: target tokens of a prompt and its completion together.
        waiting: asks that may wait; more are refused.
        seed: of draws for which no seed is asked.
        offset: of the first prompt.
        text: whether prompts' texts may be logged.
        teaches: whether there is room for one more lesson.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        words: Vocabulary,
        longest: int,
        waiting: int,
        seed: int,
        offset: int,
        *,
        text: bool,
        teaches: Callable[[], bool] = lambda: True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._words, self._longest, self._most, self._seed, self._text = words, longest, waiting, seed, text
        self._teaches, self._now = teaches, now
        self.next_offset = offset
        self._change = threading.Condition()
        self._waiting: deque[Flight] = deque()
        self._flights: dict[int, Flight] = {}
        self._finished: deque[float] = deque(maxlen=RECENT)
        self._read = 0  # prompt tokens since the last block
        self.closed = False

    @property
    def waiting(self) -> int:
        """Asks in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Asks being decoded."""
        return len(self._flights)

    def submit(self, ask: Ask, listener: Listener) -> Callable[[], None]:
        """See `Engine`."""
        until = math.inf if ask.seconds is None else self._now() + ask.seconds
        flight = Flight(ask, listener, until, StoppedText(self._words.bytes_of, ask.stop))
        with self._change:
            if self.closed:
                raise BusyError("the server is shutting down", 10, leaving=True)
            if len(self._waiting) >= self._most:
                raise BusyError(f"{self._most} requests are waiting already", self._retry_after())
            self._waiting.append(flight)
            self._change.notify_all()

        def cancel() -> None:
            with self._change:
                flight.leaving = flight.leaving or Finish.CANCELLED
                self._change.notify_all()

        return cancel

    def _retry_after(self) -> int:
        """Seconds until the queue has moved on by about itself, at the pace of the last asks."""
        if len(self._finished) < 2:
            return 1
        pace = (self._finished[-1] - self._finished[0]) / (len(self._finished) - 1)
        return max(1, min(LONGEST_RETRY, math.ceil(pace * len(self._waiting))))

    def close(self) -> None:
        """Take no more asks."""
        with self._change:
            self.closed = True
            self._change.notify_all()

    def wait(self, seconds: float) -> None:
        """Until there is something to do, at most so long. For the engine's thread, when nothing is in flight."""
        with self._change:
            if not self._waiting and not self.closed:
                self._change.wait(seconds)

    def __iter__(self) -> Iterator[PromptReceived]:
        return self

    def __next__(self) -> PromptReceived:
        """The next ask as a prompt, for the engine's thread. Ends, for now, when none waits or enough was read."""
        while self._waiting and (not self._flights or self._read < READ_AT_ONCE):
            with self._change:  # at every moment an ask is either here or there
                flight = self._waiting.popleft()
                leaving = flight.leaving or (Finish.DEADLINE if self._now() >= flight.until else None)
                if not leaving:
                    flight.offset, self.next_offset = self.next_offset, self.next_offset + 1
                    self._flights[flight.offset] = flight
            if leaving:
                self._end(flight, leaving)
                continue
            self._read += flight.prompt
            return self._prompt(flight)
        raise StopIteration

    def _prompt(self, flight: Flight) -> PromptReceived:
        ask = flight.ask
        name = f"{ask.name}#{ask.choice}" if ask.choice else ask.name
        text = ask.prompt.text if ask.store and self._text else ""
        return PromptReceived(flight.offset, name, DATASET, flight.offset + 1, text)

    def row_of(self, prompt: PromptReceived) -> Row:
        """What is decoded."""
        ask = self._flights[prompt.offset].ask
        seed, place = (self._seed, prompt.offset) if ask.seed is None else (ask.seed % SEEDS, ask.choice)
        tokens = list(ask.prompt.tokens)
        return Row(
            prompt.offset,
            prompt.prompt_id,
            prompt.dataset,
            prompt.text,
            tokens,
            len(tokens),
            list(ask.prompt.pieces),
            SeededDraws(seed, place),
            min(ask.max_new_tokens, self._longest - len(tokens)),
            private=not ask.store,
            sampling=Sampling(ask.temperature, ask.top_k, ask.top_p),
            ending=Ending(self._words.bytes_of, ask.stop) if ask.stop else None,
            logprobs=ask.logprobs,
            taught=self._teaches(),
        )

    def told(self, verdicts: list[Verdict]) -> None:
        """What a block brought. Those that finished are gone."""
        self._read = 0
        for verdict in verdicts:
            row = verdict.proposal.draft.row
            flight = self._flights[row.offset]
            flight.tell(verdict)
            if row.finish:
                self._forget(flight)

    def to_leave(self) -> list[tuple[int, Finish]]:
        """Prompts in flight that are to end early, after one block at least, and why; call `left` for each. Ends those
        that still wait."""
        now = self._now()
        with self._change:
            late = [flight for flight in self._waiting if flight.leaving or now >= flight.until]
            for flight in late:
                self._waiting.remove(flight)
        for flight in late:
            self._end(flight, flight.leaving or Finish.DEADLINE)
        for flight in self._flights.values():
            if now >= flight.until:
                flight.leaving = flight.leaving or Finish.DEADLINE
        return [(offset, one.leaving) for offset, one in self._flights.items() if one.leaving and one.blocks]

    def left(self, offset: int, finish: Finish) -> None:
        """A prompt ended early."""
        flight = self._flights[offset]
        self._forget(flight)
        self._end(flight, finish)

    def end_all(self, finish: Finish) -> None:
        """Nobody decodes any more: tell all that are left."""
        with self._change:
            self.closed = True
            left = [*self._flights.values(), *self._waiting]
            self._flights.clear()
            self._waiting.clear()
        for flight in left:
            self._end(flight, finish)

    def ask_all_to_leave(self) -> None:
        """Let everything end within a block, as if all clients had left."""
        with self._change:
            for flight in (*self._flights.values(), *self._waiting):
                flight.leaving = flight.leaving or Finish.CANCELLED

    def _end(self, flight: Flight, finish: Finish) -> None:
        flight.say("", None, finish)

    def _forget(self, flight: Flight) -> None:
        del self._flights[flight.offset]
        self._finished.append(self._now())
