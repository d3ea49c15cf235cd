"""The workers and the learner of a run, and what is on its way to them and from them.

What they make goes by reference: completed prompts from a worker to the learner, weights from the learner to every
worker. Backpressure is the number of calls that are on their way: a few per worker, and a few for the learner.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Protocol

from pipeline.learner_host import HostSetup
from pipeline.scale_learner import Learner, Told
from pipeline.scale_messages import DeadError, GoneError, Lost, Message, Ref, Reported, Up
from pipeline.scale_worker import DecodeWorker, ForLearner, Report, WorkerSetup
from stages.snapshot import Json
from store.errors import RunError
from store.events import PromptReceived
from store.manifest import read_manifest
from store.partitions import LEARNER, open_partition

CALLS = 2  # portions on their way to a worker: one that it decodes, one that waits for it
LESSONS = 16  # portions per worker that may wait for the learner before no more prompts are given
LIVES = 8  # starts of the learner in a row that may fail
PAUSE = 1.0  # seconds before it is started again


class Actors(Protocol):
    """Objects in processes of their own, on any machine. The methods return at once, but for `wait` and `get`."""

    def start(self, kind: type, options: Mapping[str, float], *arguments: Any) -> Any:
        """A new one. It begins when a machine has room for what the options take of it."""
        ...

    def call(self, actor: Any, method: str, *arguments: Any, returns: int = 1, **named: Any) -> Sequence[Ref]:
        """Let it do something behind what it was asked before. Arguments may be references to what is still to come."""
        ...

    def wait(self, refs: Sequence[Ref], seconds: float) -> Sequence[Ref]:
        """Those that are there, on this machine too; waits for the first of them."""
        ...

    def get(self, ref: Ref) -> Any:
        """What it refers to. Raises what the method raised, `DeadError` or `GoneError`."""
        ...

    def kill(self, actor: Any) -> None:
        """End it now, if it is alive."""
        ...


class State(Enum):
    """Of a worker."""

    STARTING = "starting"
    UP = "up"
    LEAVING = "leaving"


@dataclass
class _Hand:
    """A worker as it is seen from here."""

    actor: Any
    calls: int = 0
    state: State = State.STARTING
    news: Ref = None  # the weights that it was given last
    asked: float = 0.0  # when it was called last


@dataclass(frozen=True)
class _Call:
    """Something on its way. `done` makes a message of what it brings or, `by_reference`, of where that is."""

    name: str
    done: Callable[[Any], Message | None]
    by_reference: bool = False
    portion: Ref = None  # that the learner was given


class Crew:
    """The actors of one run. Used by one thread.

    Args:
        actors: where they live.
        setup: of every worker.
        run_folder: of the run.
        options: of every actor: what it takes of a machine.
    """

    def __init__(self, actors: Actors, setup: WorkerSetup, run_folder: Path, options: Mapping[str, float]) -> None:
        self._actors, self._setup, self._run_folder, self._options = actors, setup, run_folder, dict(options)
        self._hands: dict[str, _Hand] = {}
        self._calls: dict[Ref, _Call] = {}
        self._news: Ref = None
        self._host: HostSetup | None = None
        self._learner: Any = None
        self._portions: list[Ref] = []  # of completed prompts, for a learner that is still to begin
        self._lives, self._begin_at = 0, 0.0

    @property
    def workers(self) -> list[str]:
        """All that were hired and are not gone, the oldest first."""
        return list(self._hands)

    def hire(self, folder: Path) -> None:
        """One more worker, for this partition. It starts when the cluster has room for it."""
        actor = self._actors.start(DecodeWorker, self._options, self._setup, folder)
        self._hands[folder.name] = _Hand(actor, calls=1)
        (ref,) = self._actors.call(actor, "start")
        self._calls[ref] = _Call(folder.name, lambda known_by: self._up(folder.name, known_by))

    def has_room(self, worker: str) -> bool:
        """Whether it takes another portion now."""
        waiting = len(self._portions) + sum(call.name == LEARNER for call in self._calls.values())
        hand = self._hands[worker]
        return hand.state is State.UP and hand.calls < CALLS and waiting <= LESSONS * len(self._hands)

    def state(self, worker: str) -> State:
        """Of one of the `workers`."""
        return self._hands[worker].state

    def idle_since(self, worker: str) -> float | None:
        """When a worker on whose hands nothing is was called last; None for others."""
        hand = self._hands[worker]
        return None if hand.calls or hand.state is not State.UP else hand.asked

    def give(self, worker: str, prompts: Sequence[PromptReceived], *, more: bool) -> None:
        """A portion for a worker that has room, with the newest weights. See `DecodeWorker.work`."""
        hand = self._hands[worker]
        news = None if hand.news is self._news else self._news
        hand.news, hand.calls, hand.asked = self._news, hand.calls + 1, monotonic()
        report, finished = self._actors.call(hand.actor, "work", prompts, news, more=more, returns=2)
        self._calls[report] = _Call(worker, lambda found: self._reported(worker, found, finished))

    def ask_for_learner(self, worker: str) -> None:
        """See `DecodeWorker.for_learner`."""
        hand = self._hands[worker]
        hand.calls += 1
        (ref,) = self._actors.call(hand.actor, "for_learner")
        self._calls[ref] = _Call(worker, lambda found: self._answered(worker, found))

    def leave(self, worker: str) -> None:
        """Let a worker end behind what is on its way to it."""
        hand = self._hands[worker]
        hand.state = State.LEAVING
        (ref,) = self._actors.call(hand.actor, "leave")
        self._calls[ref] = _Call(worker, lambda report: Reported(worker, report, left=True))

    def drop(self, worker: str) -> None:
        """Have nothing to do with it any more."""
        self._actors.kill(self._hands.pop(worker).actor)
        self._calls = {ref: call for ref, call in self._calls.items() if call.name != worker}

    def wait(self, seconds: float) -> list[Message]:
        """What happened, as soon as something does, at the latest after so many seconds.

        Raises:
            Exception: whatever a worker or the learner raised.
        """
        self._seat_learner()
        refs = list(self._calls)
        if not refs:
            sleep(seconds)
            return []
        found = [self._take(ref) for ref in self._actors.wait(refs, seconds)]
        return [message for message in found if message]

    def _take(self, ref: Ref) -> Message | None:
        call = self._calls.pop(ref, None)
        if call is None:  # of somebody who was lost a moment ago
            return None
        try:
            return call.done(ref if call.by_reference else self._actors.get(ref))
        except GoneError as error:
            return self._lost(call, error)
        except RunError as error:
            if call.name != LEARNER or call.portion is not None or self._lives >= LIVES:
                raise
            self._forget_learner()  # it could not begin: the one before it may still be ending
            return Lost(LEARNER, str(error))

    def _up(self, worker: str, known_by: Json) -> Message:
        self._hands[worker].state = State.UP
        self._hands[worker].calls -= 1
        return Up(worker, known_by)

    def _answered(self, worker: str, found: ForLearner) -> Message:
        self._hands[worker].calls -= 1
        return found

    def _reported(self, worker: str, report: Report, finished: Ref) -> Message:
        self._hands[worker].calls -= 1
        if report.completed:
            self._portions.append(finished)
        return Reported(worker, report, left=False)

    def _lost(self, call: _Call, error: GoneError) -> Message | None:
        if call.name != LEARNER:
            self.drop(call.name)
            return Lost(call.name, str(error))
        if not isinstance(error, DeadError):  # the portion is lost, not the learner
            return None
        self._forget_learner(call)
        return Lost(LEARNER, str(error))

    @property
    def has_learner(self) -> bool:
        """Whether `begin_learning` was called."""
        return self._host is not None

    def begin_learning(self, host: HostSetup) -> None:
        """Have a learner from now on."""
        self._host = host
        open_partition(self._run_folder, LEARNER)

    @property
    def learning(self) -> bool:
        """Whether the learner has something to do, or is still to begin."""
        busy = any(call.name == LEARNER for call in self._calls.values())
        return busy or self._learner is None or bool(self._portions)

    def _seat_learner(self) -> None:
        if self._learner is None and self._host and monotonic() >= self._begin_at:
            arguments = self._host, self._setup.working_folder
            options = self._options | {"num_cpus": 0}  # it must find a place beside workers that wait for one
            self._learner = self._actors.start(Learner, options, *arguments)
            self._lives += 1
            self._call_learner("start")
        while self._learner and self._portions:
            self._call_learner("learn", self._portions.pop(0))

    def _call_learner(self, method: str, *arguments: Ref) -> None:
        told, weights = self._actors.call(self._learner, method, *arguments, returns=2)
        portion = arguments[0] if arguments else None
        self._calls[told] = _Call(LEARNER, lambda found: self._told(found, weights, portion), portion=portion)

    def _told(self, told: Told, weights: Ref, portion: Ref) -> Message:
        if portion is not None:  # it lives and learns, and there is nothing in it that kills it
            self._lives = 0
        if told.news:  # handed out once they lie here too: then the learner's machine may go
            self._calls[weights] = _Call(LEARNER, self._set_news, by_reference=True)
        return told

    def _set_news(self, weights: Ref) -> None:
        self._news = weights

    def _forget_learner(self, *in_hand: _Call) -> None:
        calls = [*in_hand, *(call for call in self._calls.values() if call.name == LEARNER)]
        if self._lives >= LIVES:
            raise RunError(f"the learner must live, but it died {LIVES} times in a row before it learned anything")
        self._actors.kill(self._learner)
        self._learner, self._begin_at = None, monotonic() + PAUSE
        unheard = [call.portion for call in calls if call.portion is not None]
        self._portions = unheard + self._portions
        self._calls = {ref: call for ref, call in self._calls.items() if call.name != LEARNER}

    def end_learning(self, method: str, *arguments: Any) -> int:
        """Let the learner end by one of its methods. Returns messages that MLflow did not take."""
        while self._host and not read_manifest(open_partition(self._run_folder, LEARNER)).finished:
            while self.learning:
                self.wait(PAUSE)
            (ref,) = self._actors.call(self._learner, method, *arguments)
            try:
                return int(self._actors.get(ref))
            except GoneError:
                self._forget_learner()
        return 0  # it never began, or died behind its last commit
