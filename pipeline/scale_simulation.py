"""How late weights are when many workers share one learner, and what that costs: a queue, simulated.

Completed prompts come at random. One learner takes them in turn, each `interval`-th makes an update, and that is in
service everywhere a while later. What lateness does to acceptance is read off a learning curve that was measured.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

FEWEST, MOST = 20_000, 500_000  # completed prompts that are simulated; the first tenth is not counted
ROUNDS = 4  # ways there and back that are simulated, as far as that is not too many prompts


@dataclass(frozen=True)
class Flow:
    """Completed prompts on their way to the learner, and weights on their way back.

    Attributes:
        prompts_per_second: completed by all workers together, at random times.
        lesson_seconds: by the clock, that the learner takes for one.
        update_seconds: that it takes more for each `interval`-th.
        interval: prompts that it takes in between two updates.
        arrival_seconds: from an update until it is in service.
        waiting: completed prompts that may wait for it; the oldest is given up for a newer one.
    """

    prompts_per_second: float
    lesson_seconds: float
    update_seconds: float
    interval: int
    arrival_seconds: float
    waiting: int

    @property
    def round_seconds(self) -> float:
        """At the least, from a prompt's completion until weights that learned from it are in service."""
        return self.lesson_seconds + self.update_seconds + self.arrival_seconds

    @property
    def long_enough(self) -> int:
        """Prompts to simulate."""
        begins = self.interval * max(1 / self.prompts_per_second, self.lesson_seconds)
        return round(min(MOST, max(FEWEST, ROUNDS * self.prompts_per_second * (begins + self.round_seconds))))


@dataclass(frozen=True)
class Staleness:
    """What the simulation found.

    Attributes:
        posted, taught, dropped, waiting: completed prompts in all, taken in, given up, and left in the queue.
        updates: made.
        served: of these, how many came into service.
        busy: share of the time in which the learner worked.
        prompts: completed since the newest prompt that the weights in service had learned from; a mean, or the least
            that is possible where none came into service.
        seconds: since that prompt was completed; alike.
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
    """One server with a bounded queue. What it makes waits in `coming` until it is in service."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.queue: deque[tuple[float, int]] = deque()  # when it was completed, and its number
        self.coming: deque[tuple[float, float, int]] = deque()  # when in service, and the newest prompt behind it
        self.free_at = self.worked = 0.0
        self.taught = self.dropped = self.updates = 0

    def post(self, now: float, number: int) -> None:
        self.queue.append((now, number))
        if len(self.queue) > self._flow.waiting:
            self.queue.popleft()
            self.dropped += 1

    def go_on(self, now: float) -> None:
        """Begin with all that it comes to before now."""
        while self.queue and self.free_at <= now:
            completed, number = self.queue.popleft()
            self.taught += 1
            made = self.taught % self._flow.interval == 0
            took = self._flow.lesson_seconds + (self._flow.update_seconds if made else 0.0)
            self.free_at = max(self.free_at, completed) + took
            self.worked += took
            if made:
                self.updates += 1
                self.coming.append((self.free_at + self._flow.arrival_seconds, completed, number))


def simulate(flow: Flow, prompts: int, seed: int = 0) -> Staleness:
    """Let so many prompts be completed.

    Args:
        flow: what happens to them.
        prompts: in all; ages are of those behind the first tenth.
        seed: of the times at which they are completed.
    """
    random, learner, now = Random(seed), _Learner(flow), 0.0
    serving: tuple[float, int] | None = None
    ages: list[tuple[float, int]] = []
    served = 0
    for number in range(prompts):
        now += random.expovariate(flow.prompts_per_second)
        learner.go_on(now)
        while learner.coming and learner.coming[0][0] <= now:
            _, completed, newest = learner.coming.popleft()
            serving, served = (completed, newest), served + 1
        if serving and number >= prompts // 10:
            ages.append((now - serving[0], number - serving[1]))
        learner.post(now, number)
    learner.go_on(now)
    counts = prompts, learner.taught, learner.dropped, len(learner.queue), learner.updates, served
    busy = min(1.0, learner.worked / now)
    if not ages:
        return Staleness(*counts, busy, flow.prompts_per_second * flow.round_seconds, flow.round_seconds)
    return Staleness(*counts, busy, _mean([age for _, age in ages]), _mean([age for age, _ in ages]))


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def acceptance_between_changes(
    curve: Sequence[tuple[float, float]], prompts: float, taught_share: float, late: float
) -> float:
    """Mean acceptance over a stretch of traffic of one kind, which the drafter does not know when it begins.

    The prompt at place n of the stretch is drafted as the curve says of taught_share x (n - late) lessons.

    Args:
        curve: (lessons of this kind of traffic, acceptance after them), rising in lessons from 0; constant behind.
        prompts: of the stretch.
        taught_share: of them that teach.
        late: prompts by which weights are late.
    """
    first, late = curve[0][1], min(late, prompts)
    lessons = taught_share * (prompts - late)
    if not lessons:
        return first
    return (late * first + _area(curve, lessons) / taught_share) / prompts


def _area(curve: Sequence[tuple[float, float]], until: float) -> float:
    """Below the curve, straight between its points, from 0 on."""
    area = max(0.0, until - curve[-1][0]) * curve[-1][1]
    for (begin, low), (end, high) in pairwise(curve):
        width = min(end, until) - begin
        if width > 0:
            area += width * (low + (high - low) * width / (end - begin) / 2)
    return area
