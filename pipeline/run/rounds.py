"""The loop in rounds: it completes a few prompts, which are timed, and pauses until the next ones.

`versions compare` replays two versions this way, prompt by prompt in turn, and the benchmark measures the pipeline.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TypeVar

from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import Models
from pipeline.config.settings import Config
from pipeline.loop import Loop
from stages.engine.models.devices import synchronize
from store.errors import SourceError
from store.events import (
    BlockDone,
    DraftSource,
    Event,
    Outcome,
    PromptCompleted,
    PromptReceived,
    PromptRejected,
    TokenDecision,
    Translation,
    Updated,
)

T = TypeVar("T")
ROUND_IS_DONE = PromptRejected("", 0, "the round is done")


@dataclass(frozen=True)
class Step:
    """One block of all rows in flight."""

    drafted: tuple[int, ...]  # pieces per row that the drafter model drew; it ran as often as the longest has pieces
    proposed: tuple[int, ...]  # target tokens per row; the target read one more of each row


@dataclass(frozen=True)
class Work:
    """Cost of a round, by part of the pipeline. Seconds are parts of the round's."""

    steps: tuple[Step, ...]  # steps in order
    # judged, accepted: numbers of target tokens
    judged: int
    accepted: int
    prompt_tokens: int  # number of target tokens of the round's prompts
    # decode, translate, verify: seconds of the stages
    decode: float
    translate: float
    verify: float
    learning: float  # seconds for which decoding waited for updates
    learning_beside: float = 0.0  # seconds of computing updates in parallel; not part of the round's
    # log, versions, drift: seconds of writing the log and its curves, of publishing, and of drift detection
    log: float = 0.0
    log_beside: float = 0.0  # processor seconds of writing the log in parallel; not part of the round's
    versions: float = 0.0
    drift: float = 0.0

    @property
    def blocks(self) -> int:
        """Number of blocks of single rows."""
        return sum(len(step.drafted) for step in self.steps)


@dataclass(frozen=True)
class Round:
    """Result of a round: a few completed prompts."""

    # emitted target ids per prompt, in the order of the prompts, each with the token that ended it
    tokens: tuple[tuple[int, ...], ...]
    seconds: float  # wall time from the prompts' texts to all completions' texts, learning from them included
    work: Work | None = None  # cost by part of the pipeline; None if another engine ran it
    # surprisal per prompt of its tokens under the target's distribution; empty if it was not requested
    nats: tuple[float, ...] = ()

    @property
    def emitted(self) -> int:
        """Number of target tokens of all prompts."""
        return sum(map(len, self.tokens))


class Records:
    """Records of a loop's events. The base class keeps none."""

    def take(self, event: Event) -> None:
        """Record an event. Called for every event, in order."""

    def pause(self) -> bool:
        """Return whether the loop must end now. Called between two blocks."""
        return False

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds spent so far, by field of `Work`: log, log_beside, versions, drift."""
        return {}

    def close(self) -> None:
        """Close the records. Called once, after the last event."""


def rotate(items: Sequence[T], number: int) -> list[T]:
    """Return all items in order; each round begins with another one, so that none always comes first.

    >>> rotate("abc", 4)
    ['b', 'c', 'a']
    """
    first = number % len(items)
    return [*items[first:], *items[:first]]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the position of the first difference of two texts; None if one is the beginning of the other."""
    return next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)


class _PromptFeed:
    """Feeds the prompts of one round after another to a loop that keeps running.

    It pauses while prompts of the round are in flight, and then yields the event that ends the round. The loop forwards
    that event after all events of the round's prompts.
    """

    def __init__(self) -> None:
        self.waiting: list[PromptReceived] = []
        self.in_flight = 0

    def __iter__(self) -> "_PromptFeed":
        return self

    def __next__(self) -> PromptReceived | PromptRejected:
        if self.waiting:
            return self.waiting.pop(0)
        if self.in_flight:
            raise StopIteration  # the loop calls again after its next step
        return ROUND_IS_DONE


class RoundClock:
    """A clock that runs during rounds only. Times are seconds of all rounds so far."""

    def __init__(self) -> None:
        self._passed, self._began = 0.0, 0.0
        self._goes = False

    def __call__(self) -> float:
        """Return the current time."""
        return self._passed + (perf_counter() - self._began if self._goes else 0.0)

    def go(self) -> float:
        """Start the clock for a round. Returns the current time."""
        self._goes, self._began = True, perf_counter()
        return self._passed

    def stop(self) -> float:
        """Stop the clock after a round. Returns the current time."""
        self._passed, self._goes = self(), False
        return self._passed


class LoopInRounds:
    """The loop of one target, kept running between rounds.

    Args:
        models: the target and the drafter; nothing else uses them while a round runs.
        config: all settings.
        folder: folder for versions, if they are published.
        keep: makes the records of the loop, from the loop and a clock that runs during rounds.
    """

    def __init__(
        self,
        models: Models,
        config: Config,
        folder: Path,
        keep: Callable[[Loop, Callable[[], float]], Records] = lambda loop, clock: Records(),
    ) -> None:
        self.models = models
        config = config.with_overrides({"prompts.cache_bytes": 0})  # rounds repeat their prompts
        self._loop = build_loop(config, [models], folder)
        self._clock = RoundClock()
        self._records = keep(self._loop, self._clock)
        self._feed = _PromptFeed()
        self._events = self._loop.run(self._feed, self._records.pause)

    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        """Complete the prompts and measure the time. All of them must fit the models.

        A round ends after any update on the learner's thread, which must neither run during the next measurement nor be
        left out of this one. The update is adopted when it is due, as in a stream.
        """
        before, events = self._records.seconds(), []
        self._feed.waiting, self._feed.in_flight = list(prompts), len(prompts)
        started = self._clock.go()
        for event in self._events:
            if event is ROUND_IS_DONE:
                break
            self._feed.in_flight -= isinstance(event, PromptCompleted | PromptRejected)
            self._records.take(event)
            events.append(event)
        synchronize(self.models.target.device)
        decoded = self._clock()
        waits = [runner.learner.wait() for runner in self._loop.runners.values()]
        ended = self._clock.stop()
        seconds, waited = ended - started, (ended - decoded) * any(waits)
        records = {name: spent - before[name] for name, spent in self._records.seconds().items()}
        return Round(_tokens(prompts, events), seconds, work_of(events, records, waited))

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of both models."""
        return sum(one.forward_pass.cache_bytes for one in (self.models.target, self.models.drafter))

    def close(self) -> None:
        """End the loop's run and its records."""
        for event in self._loop.end():
            self._records.take(event)
        self._records.close()


def _tokens(prompts: Sequence[PromptReceived], events: Sequence[Event]) -> tuple[tuple[int, ...], ...]:
    """Return the emitted target ids per prompt.

    Raises:
        SourceError: a prompt does not fit the models.
    """
    emitted: dict[int, list[int]] = {prompt.offset: [] for prompt in prompts}
    for event in events:
        if isinstance(event, PromptRejected):
            raise SourceError(f"Every prompt must fit the models, but line {event.line} does not: {event.reason}")
        if isinstance(event, TokenDecision) and event.emitted_id is not None:
            emitted[event.offset].append(event.emitted_id)
    return tuple(tuple(emitted[prompt.offset]) for prompt in prompts)


def work_of(events: Sequence[Event], records: Mapping[str, float], waited: float) -> Work:
    """Summarise the events of a round, and the seconds for which its end waited for an update."""
    blocks = [event for event in events if isinstance(event, BlockDone)]
    updates = [event for event in events if isinstance(event, Updated)]
    return Work(
        steps=tuple(_steps(blocks, _nameless(events))),
        judged=sum(block.judged for block in blocks if block.drafter is DraftSource.MODEL),
        accepted=sum(block.accepted for block in blocks if block.drafter is DraftSource.MODEL),
        prompt_tokens=sum(event.prompt_tokens for event in events if isinstance(event, PromptCompleted)),
        decode=sum(block.seconds_decode for block in blocks),
        translate=sum(block.seconds_translate for block in blocks),
        verify=sum(block.seconds_verify for block in blocks),
        learning=waited + sum(update.waited for update in updates),
        learning_beside=max(0.0, sum(update.seconds - update.waited for update in updates) - waited),
        **records,
    )


def _nameless(events: Sequence[Event]) -> set[tuple[int, int]]:
    """Return offset and number of the blocks whose last proposed token has no name: the target did not read it."""
    decisions = (event for event in events if isinstance(event, TokenDecision) and event.outcome != Outcome.UNDRAFTED)
    return {(event.offset, event.block) for event in decisions if event.translation == Translation.NONE}


def _steps(blocks: Sequence[BlockDone], nameless: Container[tuple[int, int]]) -> Iterator[Step]:
    """Group blocks into steps: the blocks of one step follow each other, and each has their number in `rows`."""
    start = 0
    while start < len(blocks):
        rows = blocks[start : start + blocks[start].rows]
        drawn = tuple(row.drafted if row.drafter is DraftSource.MODEL else 0 for row in rows)
        yield Step(drawn, tuple(row.proposed - ((row.offset, row.block) in nameless) for row in rows))
        start += len(rows)
