"""The benchmark's arms that are this pipeline: without drafting, frozen, learning, and learning with records kept."""

import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Protocol, TypeVar

from pipeline.bench_arms import Round, Step, Work
from pipeline.bench_timed import Stopwatch, TimedPublisher
from pipeline.build import build_loop
from pipeline.build_coach import drift_settings
from pipeline.build_models import Models
from pipeline.coach import LocalCoach
from pipeline.committing import Committer
from pipeline.config import Config
from pipeline.curves import Curves
from pipeline.drift import DriftWatch, Rates
from pipeline.loop import Loop
from stages.baselines import settle
from store.errors import SourceError
from store.events import (
    BlockDone,
    Drafter,
    Event,
    Outcome,
    PromptCompleted,
    PromptReceived,
    PromptRejected,
    TokenDecision,
    Translation,
    Updated,
)
from store.log import RunLog
from store.registry import NoRegistry

T = TypeVar("T")
ROUND_IS_DONE = PromptRejected("", 0, "the round is done")


class Records(Protocol):
    """What is kept of the events of an arm."""

    def take(self, event: Event) -> None:
        """Called for every event, in order."""
        ...

    def pause(self) -> bool:
        """Called between two blocks; whether the loop is to end there."""
        ...

    def seconds(self) -> Mapping[str, float]:
        """Spent so far, by the names of `Work`: log, log_beside, versions, drift."""
        ...

    def close(self) -> None:
        """Called once, after the last event."""
        ...


class NoRecords:
    """Keeps nothing."""

    def take(self, event: Event) -> None:
        """Nothing."""

    def pause(self) -> bool:
        """Go on."""
        return False

    def seconds(self) -> Mapping[str, float]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Nothing."""


class ReplayRecords:
    """The log and the curves as `replay` keeps them, and versions as folders; all timed.

    MLflow is left out: it takes versions and curves from a background thread, which would run beside other arms too.
    Of the log's writer thread the processor time is told. Drift is timed on a second watch that sees the same prompts.
    """

    def __init__(self, folder: Path, config: Config, loop: Loop, clock: Callable[[], float]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        others = set(threading.enumerate())
        self._log, self._curves = RunLog(folder), Curves(NoRegistry(), lambda: 0)
        self._writers = set(threading.enumerate()) - others
        self._watches = {"log": Stopwatch(), "versions": Stopwatch(), "drift": Stopwatch()}
        self._committer = Committer(config.commit, loop.save, lambda: loop.learning, self._log, NoRegistry(), clock)
        self._drift = DriftWatch(drift_settings(config), Rates(first_only=False))
        for lane in loop.lanes.values():
            if isinstance(lane.coach, LocalCoach):
                lane.coach.publisher = TimedPublisher(lane.coach.publisher, self._watches["versions"])

    def take(self, event: Event) -> None:
        """Keep an event, as `Replay` does."""
        self._watches["log"].time(lambda: self._keep(event))
        if isinstance(event, PromptCompleted):
            self._watches["drift"].time(lambda: self._drift.observe(event))

    def pause(self) -> bool:
        """Commit where `Replay` would; the loop goes on."""
        if self._committer.is_due():
            self._watches["log"].time(self._committer.commit)
        return False

    def _keep(self, event: Event) -> None:
        self._log.append(event)
        self._curves.add(event)

    def seconds(self) -> Mapping[str, float]:
        """As `Records.seconds`."""
        writing = sum(processor_seconds(thread) for thread in self._writers)
        return {name: watch.seconds for name, watch in self._watches.items()} | {"log_beside": writing}

    def close(self) -> None:
        """Write what is waiting."""
        self._log.close()


def processor_seconds(thread: threading.Thread) -> float:
    """What a running thread has used so far; 0 where the system does not tell."""
    if thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


class _Feed:
    """The prompts of one round after another, for a loop that goes on.

    It pauses while prompts of the round are in flight, and says that the round is done when none is. The loop hands
    that on as an event, behind everything that followed from the round's prompts.
    """

    def __init__(self) -> None:
        self.waiting: list[PromptReceived] = []
        self.in_flight = 0

    def __iter__(self) -> "_Feed":
        return self

    def __next__(self) -> PromptReceived | PromptRejected:
        if self.waiting:
            return self.waiting.pop(0)
        if self.in_flight:
            raise StopIteration  # the loop asks again after its next step
        return ROUND_IS_DONE


class RoundClock:
    """Seconds that pass while a round runs; between rounds it stands still."""

    def __init__(self) -> None:
        self._passed, self._began = 0.0, 0.0
        self._goes = False

    def __call__(self) -> float:
        """Now."""
        return self._passed + (perf_counter() - self._began if self._goes else 0.0)

    def go(self) -> float:
        """A round begins. Returns now."""
        self._goes, self._began = True, perf_counter()
        return self._passed

    def stop(self) -> float:
        """The round ends. Returns now."""
        self._passed, self._goes = self(), False
        return self._passed


class PipelineArm:
    """The pipeline's own loop, kept running between rounds.

    Args:
        models: used by nothing else while a round runs.
        config: settings.
        folder: for versions, if they are published.
        keep: makes what keeps records of the loop; is given a clock that goes while a round runs.
    """

    def __init__(
        self,
        models: Models,
        config: Config,
        folder: Path,
        keep: Callable[[Loop, Callable[[], float]], Records] = lambda loop, clock: NoRecords(),
    ) -> None:
        self.models = models
        self._loop = build_loop(config, [models], NoRegistry(), folder, lambda notice: None)
        self._clock = RoundClock()
        self._records = keep(self._loop, self._clock)
        self._feed = _Feed()
        self._events = self._loop.run(self._feed, self._records.pause)

    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        """As `Arm.complete`. A round ends when an update on its own thread is computed too: it must neither run beside
        another arm nor be had for nothing. It is adopted where it is due, as in a stream."""
        before, events = self._records.seconds(), []
        self._feed.waiting, self._feed.in_flight = list(prompts), len(prompts)
        started = self._clock.go()
        for event in self._events:
            if event is ROUND_IS_DONE:
                break
            self._feed.in_flight -= isinstance(event, PromptCompleted | PromptRejected)
            self._records.take(event)
            events.append(event)
        settle(self.models.target.device)
        decoded = self._clock()
        waits = [lane.coach.wait() for lane in self._loop.lanes.values()]
        ended = self._clock.stop()
        seconds, waited = ended - started, (ended - decoded) * any(waits)
        records = {name: spent - before[name] for name, spent in self._records.seconds().items()}
        return Round(_tokens(prompts, events), seconds, work_of(events, records, waited))

    @property
    def cache_bytes(self) -> int:
        """Memory of the keys and values of both models."""
        return sum(one.forward_pass.cache_bytes for one in (self.models.target, self.models.drafter))

    def close(self) -> None:
        """End the loop's run and its records."""
        for event in self._loop.end():
            self._records.take(event)
        self._records.close()


def _tokens(prompts: Sequence[PromptReceived], events: Sequence[Event]) -> tuple[tuple[int, ...], ...]:
    """Per prompt what was emitted.

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
    """What the events of a round tell, and how long its end waited for an update."""
    blocks = [event for event in events if isinstance(event, BlockDone)]
    updates = [event for event in events if isinstance(event, Updated)]
    return Work(
        steps=tuple(_steps(blocks, _nameless(events))),
        judged=sum(block.judged for block in blocks if block.drafter is Drafter.MODEL),
        accepted=sum(block.accepted for block in blocks if block.drafter is Drafter.MODEL),
        prompt_tokens=sum(event.prompt_tokens for event in events if isinstance(event, PromptCompleted)),
        decode=sum(block.seconds_decode for block in blocks),
        translate=sum(block.seconds_translate for block in blocks),
        verify=sum(block.seconds_verify for block in blocks),
        learning=waited + sum(update.waited for update in updates),
        learning_beside=max(0.0, sum(update.seconds - update.waited for update in updates) - waited),
        **records,
    )


def _nameless(events: Sequence[Event]) -> set[tuple[int, int]]:
    """Offset and number of the blocks whose last proposed token has no name: the target did not read it."""
    told = (event for event in events if isinstance(event, TokenDecision) and event.outcome != Outcome.UNDRAFTED)
    return {(event.offset, event.block) for event in told if event.translation == Translation.NONE}


def _steps(blocks: Sequence[BlockDone], nameless: Container[tuple[int, int]]) -> Iterator[Step]:
    """Blocks of rows that were stepped together follow each other, and each names their number."""
    start = 0
    while start < len(blocks):
        rows = blocks[start : start + blocks[start].rows]
        drawn = tuple(row.drafted if row.drafter is Drafter.MODEL else 0 for row in rows)
        yield Step(drawn, tuple(row.proposed - ((row.offset, row.block) in nameless) for row in rows))
        start += len(rows)
