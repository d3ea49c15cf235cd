"""The contract of `UpdateInterval`, for every implementation."""

import inspect
from collections.abc import Callable
from random import Random

import pytest

from stages.learn.training import interval as interval_module
from stages.learn.training.interval import BreakEvenInterval, UpdateInterval
from stages.learn.training.update import Step

SHORTEST, LONGEST = 3, 20
MADE: dict[str, Callable[[], UpdateInterval]] = {
    "UpdateInterval": lambda: UpdateInterval(SHORTEST),
    "BreakEvenInterval": lambda: BreakEvenInterval(
        SHORTEST, steps=2, piece_cost=0.1, batch=2, longest=LONGEST, horizon=100
    ),
}
every_interval = pytest.mark.parametrize("make", MADE.values(), ids=list(MADE))


def any_step(random: Random) -> Step:
    before, after = random.choice([(None, None), (0.5, None), (0.5, 0.5 + random.uniform(-0.1, 0.1))])
    served = after is not None and random.random() < 0.7
    return Step(1.0, 10, random.randrange(1, 1000), before, after, before, served, "")


@every_interval
@pytest.mark.parametrize("seed", range(5))
def test_the_interval_stays_within_its_bounds_whatever_updates_bring(make: Callable[[], UpdateInterval], seed: int):
    random, interval = Random(seed), make()
    assert interval.interval == SHORTEST, "it starts at the shortest interval"
    for _ in range(50):
        interval.observe_update(any_step(random), tokens=random.randrange(500), prompts=interval.interval)
        assert SHORTEST <= interval.interval <= LONGEST
        assert isinstance(interval.interval, int)


@every_interval
def test_a_restart_resets_the_interval(make: Callable[[], UpdateInterval]):
    used, new, random = make(), make(), Random(1)
    for _ in range(10):
        used.observe_update(any_step(random), 40, used.interval)
    used.restart()
    for _ in range(20):
        step = any_step(random)
        assert used.interval == new.interval
        used.observe_update(step, 40, used.interval)
        new.observe_update(step, 40, new.interval)


@every_interval
def test_equal_updates_give_equal_intervals(make: Callable[[], UpdateInterval]):
    found = []
    for _ in range(2):
        interval, random = make(), Random(7)
        for _ in range(10):
            interval.observe_update(any_step(random), 100, interval.interval)
        found.append(interval.interval)
    assert found[0] == found[1]


def test_no_implementation_is_missing_from_this_suite():
    classes = [
        cls
        for _, cls in inspect.getmembers(interval_module, inspect.isclass)
        if cls.__module__ == interval_module.__name__
    ]
    found = {cls.__name__ for cls in classes if UpdateInterval in cls.__mro__}
    assert found == set(MADE)
