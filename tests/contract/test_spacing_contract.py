"""The contract of `Spacing`, over every implementation."""

import inspect
from collections.abc import Callable
from random import Random

import pytest

from stages import spacing
from stages.spacing import FixedSpacing, PayingSpacing, Spacing
from stages.training import Step

SHORTEST, LONGEST = 3, 20
SPACINGS: dict[str, Callable[[], Spacing]] = {
    "FixedSpacing": lambda: FixedSpacing(SHORTEST),
    "PayingSpacing": lambda: PayingSpacing(SHORTEST, LONGEST, piece_cost=0.1, steps=2, horizon=100, batch=2),
}
every_spacing = pytest.mark.parametrize("make", SPACINGS.values(), ids=list(SPACINGS))


def any_step(random: Random) -> Step:
    before, after = random.choice([(None, None), (0.5, None), (0.5, 0.5 + random.uniform(-0.1, 0.1))])
    served = after is not None and random.random() < 0.7
    return Step(1.0, 10, random.randrange(1, 1000), before, after, before, served, "")


@every_spacing
@pytest.mark.parametrize("seed", range(5))
def test_whatever_comes_of_updates_the_interval_stays_within_its_bounds(make: Callable[[], Spacing], seed: int):
    random, spacing = Random(seed), make()
    assert spacing.interval == SHORTEST, "it begins at the shortest"
    for _ in range(50):
        spacing.after(any_step(random), judged=random.randrange(500), prompts=spacing.interval)
        assert SHORTEST <= spacing.interval <= LONGEST
        assert isinstance(spacing.interval, int)


@every_spacing
def test_after_a_restart_it_is_as_new(make: Callable[[], Spacing]):
    used, new, random = make(), make(), Random(1)
    for _ in range(10):
        used.after(any_step(random), 40, used.interval)
    used.restart()
    for _ in range(20):
        step = any_step(random)
        assert used.interval == new.interval
        used.after(step, 40, used.interval)
        new.after(step, 40, new.interval)


@every_spacing
def test_equal_updates_give_equal_intervals(make: Callable[[], Spacing]):
    found = []
    for _ in range(2):
        spacing, random = make(), Random(7)
        for _ in range(10):
            spacing.after(any_step(random), 100, spacing.interval)
        found.append(spacing.interval)
    assert found[0] == found[1]


def test_no_implementation_is_missing_from_this_suite():
    classes = [cls for _, cls in inspect.getmembers(spacing, inspect.isclass) if cls.__module__ == spacing.__name__]
    found = {cls.__name__ for cls in classes if {"after", "restart"} <= set(dir(cls)) and cls is not Spacing}
    assert found == set(SPACINGS)
