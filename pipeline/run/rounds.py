"""The loop in rounds: it completes a few prompts, which are timed, and pauses until the next ones.

`versions compare` replays two versions this way, prompt by prompt in turn, and the benchmarks measure the pipeline.
"""

from collections.abc import Callable, Sequence
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
from store.events import BlockDone, Event, PromptCompleted, PromptReceived, PromptRejected, TokenDecision

T = TypeVar("T")
ROUND_IS_DONE = PromptRejected("", 0, "the round is done")


@dataclass(frozen=True)
class Round:
    """Result of a round: a few completed prompts."""

    # emitted target ids per prompt, in the order of the prompts, each with the token that ended it
    tokens: tuple[tuple[int, ...], ...]
    seconds: float  # wall time from the prompts' texts to all completions' texts, learning from them included
    events: Sequence[Event] = ()  # of the loop; none if another engine ran it
    waited: float = 0.0  # seconds for which the end of the round waited for an update

    @property
    def emitted(self) -> int:
        """Number of target tokens of all prompts."""
        return sum(map(len, self.tokens))

    @property
    def blocks(self) -> list[BlockDone]:
        return [event for event in self.events if isinstance(event, BlockDone)]


class Records:
    """Records of a loop's events. The base class keeps none."""

    def take(self, event: Event) -> None:
        """Record an event. Called for every event, in order."""

    def pause(self) -> bool:
        """Return whether the loop must end now. Called between two blocks."""
        return False

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


class LoopInRounds:
    """The loop of one target, kept running between rounds. Nothing else uses the models while a round runs."""

    def __init__(
        self, models: Models, config: Config, folder: Path, keep: Callable[[Loop], Records] = lambda loop: Records()
    ) -> None:
        self.models = models
        config = config.with_overrides({"prompts.cache_bytes": 0})  # rounds repeat their prompts
        self._loop = build_loop(config, [models], folder)
        self._records = keep(self._loop)
        self._feed = _PromptFeed()
        self._events = self._loop.run(self._feed, self._records.pause)

    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        """Complete the prompts and measure the time. All of them must fit the models.

        A round ends after any update on the learner's thread, which must neither run during the next measurement nor be
        left out of this one. The update is adopted when it is due, as in a stream.
        """
        events = list[Event]()
        self._feed.waiting, self._feed.in_flight = list(prompts), len(prompts)
        started = perf_counter()
        for event in self._events:
            if event is ROUND_IS_DONE:
                break
            self._feed.in_flight -= isinstance(event, PromptCompleted | PromptRejected)
            self._records.take(event)
            events.append(event)
        synchronize(self.models.target.device)
        decoded = perf_counter()
        waits = [runner.learner.wait() for runner in self._loop.runners.values()]
        ended = perf_counter()
        return Round(_tokens(prompts, events), ended - started, events, (ended - decoded) * any(waits))

    def close(self) -> None:
        """End the loop's run and its records."""
        for event in self._loop.end():
            self._records.take(event)
        self._records.close()


def _tokens(prompts: Sequence[PromptReceived], events: Sequence[Event]) -> tuple[tuple[int, ...], ...]:
    emitted: dict[int, list[int]] = {prompt.offset: [] for prompt in prompts}
    for event in events:
        if isinstance(event, PromptRejected):
            raise SourceError(f"Every prompt must fit the models, but line {event.line} does not: {event.reason}")
        if isinstance(event, TokenDecision) and event.emitted_id is not None:
            emitted[event.offset].append(event.emitted_id)
    return tuple(tuple(emitted[prompt.offset]) for prompt in prompts)
