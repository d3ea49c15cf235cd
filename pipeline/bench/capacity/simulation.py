"""Simulation of the delay of weights when many workers share one learner, and its cost in acceptance.

Completed prompts arrive at random at a queue. One learner processes them in order; every `interval`-th makes an update,
which all workers apply after a fixed delay. The acceptance rate at a delay is read off a measured learning curve.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

import numpy as np

FEWEST, MOST = 20_000, 500_000  # simulated prompts; the first tenth is not counted
ROUNDS = 4  # round trips from prompt to weights that are simulated, within the limit of prompts


@dataclass(frozen=True)
class Flow:
    """The flow of completed prompts to the learner and of weights back to the workers.

    Attributes:
        prompts_per_second: completed by all workers together, at random times.
        example_seconds: wall-clock seconds of the learner per prompt.
        update_seconds: further seconds for every `interval`-th prompt.
        interval: prompts between two updates.
        arrival_seconds: seconds from the end of an update until workers use it.
        waiting: length of the learner's queue in prompts; when it is full, the oldest prompt is dropped.
    """

    prompts_per_second: float
    example_seconds: float
    update_seconds: float
    interval: int
    arrival_seconds: float
    waiting: int

    @property
    def round_seconds(self) -> float:
        """Shortest time in seconds from the completion of a prompt until weights trained on it are in service."""
        return self.example_seconds + self.update_seconds + self.arrival_seconds

    @property
    def long_enough(self) -> int:
        """Number of prompts to simulate for a stable mean."""
        begins = self.interval * max(1 / self.prompts_per_second, self.example_seconds)
        return round(min(MOST, max(FEWEST, ROUNDS * self.prompts_per_second * (begins + self.round_seconds))))


@dataclass(frozen=True)
class Staleness:
    """Result of the simulation.

    Attributes:
        posted, taught, dropped, waiting: numbers of prompts completed, learned from, dropped, and left in the queue.
        updates: number of updates made.
        served: number of updates that were applied by workers.
        busy: share of the time in which the learner worked.
        prompts: mean age of the weights in service: prompts completed since the newest prompt that they learned from.
            The smallest possible age if no update was applied.
        seconds: the same age in seconds.
    """

    posted: int
    taught: int
    dropped: int
    waiting: int
    updates: int
    served: int
    busy: float
    prompts: float
    seconds: float


class _Learner:
    """A learner with a bounded queue. Its updates wait in `coming` until workers apply them."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.queue: deque[tuple[float, int]] = deque()  # time of completion, number
        self.coming: deque[tuple[float, float, int]] = (
            deque()
        )  # time of use, newest prompt learned from: its time and number
        self.free_at = self.worked = 0.0
        self.learned = self.dropped = self.updates = 0

    def post(self, now: float, number: int) -> None:
        self.queue.append((now, number))
        if len(self.queue) > self._flow.waiting:
            self.queue.popleft()
            self.dropped += 1

    def advance(self, now: float) -> None:
        """Process every prompt that the learner reaches before `now`."""
        while self.queue and self.free_at <= now:
            completed, number = self.queue.popleft()
            self.learned += 1
            made = self.learned % self._flow.interval == 0
            took = self._flow.example_seconds + (self._flow.update_seconds if made else 0.0)
            self.free_at = max(self.free_at, completed) + took
            self.worked += took
            if made:
                self.updates += 1
                self.coming.append((self.free_at + self._flow.arrival_seconds, completed, number))


def simulate(flow: Flow, prompts: int, seed: int = 0) -> Staleness:
    """Simulate the completion of `prompts` prompts.

    Args:
        flow: rates and times.
        prompts: number of prompts; ages are averaged after the first tenth.
        seed: random seed of the times of completion.
    """
    random, learner, now = Random(seed), _Learner(flow), 0.0
    serving: tuple[float, int] | None = None
    ages: list[tuple[float, int]] = []
    served = 0
    for number in range(prompts):
        now += random.expovariate(flow.prompts_per_second)
        learner.advance(now)
        while learner.coming and learner.coming[0][0] <= now:
            _, completed, newest = learner.coming.popleft()
            serving, served = (completed, newest), served + 1
        if serving and number >= prompts // 10:
            ages.append((now - serving[0], number - serving[1]))
        learner.post(now, number)
    learner.advance(now)
    counts = prompts, learner.learned, learner.dropped, len(learner.queue), learner.updates, served
    busy = min(1.0, learner.worked / now)
    if not ages:
        return Staleness(*counts, busy, flow.prompts_per_second * flow.round_seconds, flow.round_seconds)
    return Staleness(*counts, busy, fmean([age for _, age in ages]), fmean([age for age, _ in ages]))


def acceptance_between_changes(
    curve: Sequence[tuple[float, float]], prompts: float, trained_share: float, late: float
) -> float:
    """Mean acceptance rate over `prompts` prompts of one kind that the drafter does not know at first.

    The prompt at place n has the acceptance rate that the curve gives for trained_share x (n - late) training examples.

    Args:
        curve: (training examples of this kind, acceptance rate after them), ascending from 0; constant after the end.
        prompts: number of prompts of this kind.
        trained_share: share of them that the learner trains on.
        late: delay of weights in prompts.
    """
    first, late = curve[0][1], min(late, prompts)
    examples = trained_share * (prompts - late)
    if not examples:
        return first
    return (late * first + _area(curve, examples) / trained_share) / prompts


def _area(curve: Sequence[tuple[float, float]], until: float) -> float:
    """Area below the curve from 0 to `until`, linear between its points."""
    examples, acceptances = zip(*curve, strict=True)
    places = [place for place in examples if place < until] + [until]
    return float(np.trapezoid(np.interp(places, examples, acceptances), places))
