"""Schedules drafter updates: collects examples, holds some out, and makes an update after every interval of prompts.

The length of the interval is variable. An update costs time and its benefit comes with later prompts: the break-even
interval grows after updates whose cost exceeds their benefit, and returns to the shortest interval after a drift.

An update may be computed on its own thread, in parallel with decoding. It is then adopted with an example that is fixed
when it is submitted, however early it is done, so that equal seeds make equal decisions under any load of the machine.

One scheduler belongs to one set of weights: targets that share the drafter's weights share it; adapters have one each.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from stages.contract.blocks import AcceptanceLabel, TrainingExample
from stages.contract.snapshot import State
from stages.learn.training.drafter_trainer import DrafterTrainer
from stages.learn.training.interval import UpdateInterval
from stages.learn.training.update import Attempt, Chooser, Pace, Step, make_event, to_lessons
from stages.sampling.random_source import is_sampled
from store.events import Updated

T = TypeVar("T")

# Where updates gain nothing, one prompt in so many becomes an example: an update trains on a few of them, and choosing
# the soft targets of every token takes time that shows next to fast passes.
SAMPLED = 16
IDLE = "idle: "  # begins the reason of an update that was computed while nothing else needed the processor


class InlineWorker(Executor):
    """Executes a call before `submit` returns, and raises its exceptions there."""

    @override
    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(work(*args, **kwargs))
        return done


class ThreadWorker(ThreadPoolExecutor):
    """Executes calls on one thread that uses one core.

    The exit of the interpreter waits for a running call; the thread ends with this object.
    """

    def __init__(self) -> None:
        # torch keeps its number of threads per thread, and a default for threads that read it for the first time. The
        # default is reset after the worker's first read, so that only the worker computes with one.
        others = torch.get_num_threads()
        super().__init__(1, "distill", _use_one_thread)
        self.submit(int).result()
        torch.set_num_threads(others)


def _use_one_thread() -> None:
    # Not at a lower priority: the loop waits for an update at a fixed prompt, and on a busy machine it would wait for a
    # thread that is never scheduled.
    torch.set_num_threads(1)
    torch.get_num_threads()  # the first read in a thread: from here on the number is its own


@dataclass
class _PendingUpdate:
    result: Future[tuple[Attempt, float]]  # the attempt and its duration in seconds
    last: TrainingExample  # the newest example that it trains on
    # judged, tokens, prompts: since the previous update
    judged: int
    tokens: int  # that no copy brought
    prompts: int
    examples_left: int  # number of further examples until it is adopted
    waited: float  # seconds for which the loop was blocked by it
    free: bool = False  # whether nothing else needed the processor when it began


class UpdateScheduler:
    """Makes drafter updates from examples, at most one at a time.

    Args:
        gate_every: every so many examples of a target, one is held out for the gate.
        max_examples: maximum number of fresh examples of an update, the newest; older ones only enter the replay
            buffer, so an update after a longer interval costs no more.
        lag: number of examples from the one that completes an interval to the one that adopts the update; 0 adopts it
            at once.
        pace: when updates may compute. While that costs nothing, the shortest interval holds.
        sampled: where updates gain nothing, one prompt in so many becomes an example.
    """

    def __init__(
        self,
        trainer: DrafterTrainer,
        interval: UpdateInterval,
        gate_every: int,
        max_examples: int,
        lag: int,
        worker: Executor,
        pace: Pace | None = None,
        sampled: int = SAMPLED,
    ) -> None:
        self.trainer, self._interval, self._gate_every, self._max_examples = trainer, interval, gate_every, max_examples
        self._lag, self._worker, self._pace, self._most_sampled = lag, worker, pace or Pace(), sampled
        self._fresh: list[TrainingExample] = []
        self._seen: Counter[str] = Counter()  # by target: round-robin routing may share a period with the gate
        self._prompts = self._judged = self._tokens = self._copied = 0
        self._offset: int | None = None  # of the last example
        self._pending: _PendingUpdate | None = None
        self._lessons: dict[str, tuple[Tensor, Tensor]] = {}  # of the last update, until their targets take them
        self.held = 0  # how many targets compare the weights in service with others; meanwhile no update is begun

    @property
    def version(self) -> int:
        """Changes of the served weights so far."""
        return self.trainer.version

    @property
    def _sampled(self) -> int:
        """Of how many prompts one becomes an example now."""
        return self._most_sampled if self._interval.is_exploring and not self.held else 1

    def wants_example(self, offset: int) -> bool:
        """Return whether the prompt at an offset of the stream becomes an example, if it is admitted now."""
        return is_sampled(offset, self._sampled)

    def add(self, example: TrainingExample) -> Updated | None:
        """Adopt an update that is due, then add the example.

        Raises:
            Exception: the exception of the update, at the example that would have adopted it.
        """
        updated = None
        if self._pending is not None:
            self._pending.examples_left -= 1
            updated = None if self._pending.examples_left else self.finish()
        self._add_example(example)
        return updated

    def update_if_due(self) -> Updated | None:
        """Submit an update if one is due, by the last example or as time has become free, and adopt it if that is at
        once. Raises as `add`.
        """
        free = self._pace.is_free
        due = self._interval.is_due(self._tokens, self._prompts, free=free)
        if not due or not self._fresh or self._pending or self.held:
            return None
        self._submit_update(free)
        return None if self._lag else self.finish()

    def _add_example(self, example: TrainingExample) -> None:
        self._seen[example.target] += 1
        again, self._offset = example.offset == self._offset, example.offset
        stands_for = 1 if again else self._sampled  # later parts of an answer stand for no other prompts
        self._prompts += stands_for
        self._judged += stands_for * example.judged
        self._tokens += stands_for * example.supervised_tokens
        self._copied += stands_for * example.copied
        if self._seen[example.target] % self._gate_every == 0:
            self.trainer.hold_out(example)
        else:
            self._fresh.append(example)
        if self._pending is None and len(self._fresh) > self._max_examples:  # a long interval must not keep all
            self.trainer.add_to_replay(self._fresh.pop(0))

    def _submit_update(self, free: bool) -> None:
        started, fresh = perf_counter(), self._fresh
        for older in fresh[: -self._max_examples]:
            self.trainer.add_to_replay(older)
        assignment = self.trainer.assign(fresh[-self._max_examples :])

        def attempt() -> tuple[Attempt, float]:
            began, slept = perf_counter(), self._pace.slept
            return self.trainer.attempt(assignment), perf_counter() - began - (self._pace.slept - slept)

        result = self._worker.submit(attempt)
        waited = perf_counter() - started
        counts = self._judged, self._tokens - self._copied, self._prompts, self._lag
        self._pending = _PendingUpdate(result, fresh[-1], *counts, waited, free)
        self._fresh, self._prompts, self._judged, self._tokens, self._copied = [], 0, 0, 0, 0

    def take_labels(self, target: str) -> list[AcceptanceLabel]:
        """Return what the last update shows of the drafter's acceptance at a target's tokens, once."""
        if target not in self._lessons:
            return []
        features_LF, acceptance_L = self._lessons.pop(target)
        return list(map(AcceptanceLabel, features_LF, acceptance_L.tolist()))

    def wait(self) -> bool:
        """Block until no update is being computed, without adopting it. Returns whether an update is pending."""
        if self._pending:
            wait([self._pending.result])
        return self._pending is not None

    def finish(self) -> Updated | None:
        """Wait for the pending update and adopt it. None if there is none. Raises as `add`."""
        if self._pending is None:
            return None
        attempt, seconds, pending = self._take_result(self._pending)
        started = perf_counter()
        step = self.trainer.settle(attempt)
        self._lessons |= attempt.lessons
        counted = replace(step, pieces=0) if pending.free else step  # it cost nothing
        self._interval.observe_update(counted, pending.tokens, pending.prompts)
        settling = perf_counter() - started
        pending.waited += settling
        return self._make_event(step, pending, seconds + settling)

    def restart(self) -> Updated | None:
        """Drop the pending update and the fresh examples, which precede a drift, and return to the shortest interval.

        Raises as `add`.
        """
        dropped = None
        if self._pending:
            attempt, seconds, pending = self._take_result(self._pending)
            step = self.trainer.drop(attempt, "a drift was noticed while it was under way")
            dropped = self._make_event(step, pending, seconds)
        for example in self._fresh:
            self.trainer.add_to_replay(example)
        self._fresh, self._prompts, self._judged, self._tokens, self._copied = [], 0, 0, 0, 0
        self._lessons = {}
        self._interval.restart()
        self.trainer.respond_to_drift()
        return dropped

    def forget(self, chosen: Chooser) -> int:
        """Forget examples and what was learned from them, as far as the trainer can; drop the pending update. Returns
        the number of prompts that were found.
        """
        if self._pending:
            attempt, _, _ = self._take_result(self._pending)
            self.trainer.drop(attempt, "prompts were forgotten while it was under way")
        found = {(one.target, one.offset) for one in (*self._fresh, *self.trainer.examples) if chosen(one)}
        self._fresh = [example for example in self._fresh if not chosen(example)]
        self.trainer.forget(chosen)
        return len(found)

    @property
    def busy(self) -> bool:
        return self._pending is not None and not self._pending.result.done()

    def state_dict(self) -> State:
        """Return the state for a checkpoint. Waits for an update that is being computed."""
        pending = None
        if self._pending:
            attempt, seconds = self._pending.result.result()
            counts = ("judged", "tokens", "prompts", "examples_left", "waited")
            pending = {
                "attempt": self.trainer.attempt_state(attempt),
                "seconds": seconds,
                "last": self._pending.last,
                "counts": tuple(getattr(self._pending, name) for name in counts),
            }
        return {
            "trainer": self.trainer.state_dict(),
            "interval": self._interval.state_dict(),
            "fresh": self._fresh,
            "seen": dict(self._seen),
            "counts": (self._prompts, self._judged, self._tokens, self._copied, self._offset),
            "pending": pending,
            "lessons": self._lessons,
        }

    def load_state_dict(self, state: State) -> None:
        self.trainer.load_state_dict(state["trainer"])
        self._interval.load_state_dict(state["interval"])
        self._fresh = list(state["fresh"])
        self._seen = Counter(state["seen"])
        self._prompts, self._judged, self._tokens, self._copied, self._offset = state["counts"]
        self._pending, self._lessons = None, dict(to_lessons(state["lessons"]))
        if pending := state["pending"]:
            done: Future[tuple[Attempt, float]] = Future()
            done.set_result((self.trainer.load_attempt(pending["attempt"]), pending["seconds"]))
            self._pending = _PendingUpdate(done, pending["last"], *pending["counts"])

    def _take_result(self, pending: _PendingUpdate) -> tuple[Attempt, float, _PendingUpdate]:
        started, self._pending = perf_counter(), None
        attempt, seconds = pending.result.result()
        pending.waited += perf_counter() - started
        return attempt, seconds, pending

    def _make_event(self, step: Step, pending: _PendingUpdate, seconds: float) -> Updated:
        """Make the event of an update, with its entry in the ledger.

        Tokens are gained only where the drafter's drafts were judged: not where another source drafted, and none while
        drafting is paused. What learning cost is not subtracted: the seconds of the update and those that the loop
        waited for it are fields of their own, and the seconds of drafting and verifying are those of the blocks.
        """
        gained = None
        if step.before is not None and step.baseline is not None:
            gained = (step.before - step.baseline) * pending.judged
        if pending.free:
            step = replace(step, reason=f"{IDLE}{step.reason}")
        waited, loss = pending.waited, self.trainer.loss_name
        return make_event(step, pending.last, loss, self.version, seconds=seconds, waited=waited, tokens_gained=gained)
