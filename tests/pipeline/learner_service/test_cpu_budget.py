"""A share of one core, by a clock that is set by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.learner_service.process import CpuBudget
from pipeline.learner_service.start import POLL_SECONDS


class Machine:
    """Processor and wall time, moved by work and sleep."""

    def __init__(self) -> None:
        self.used = self.now = 50.0
        self.slept, self.free_at = 0.0, math.inf

    def make_budget(self, share: float) -> CpuBudget:
        free = lambda: self.now >= self.free_at  # noqa: E731
        return CpuBudget(share, free, lambda: self.used, lambda: self.now, self.sleep)

    def work(self, seconds: float, wall: float | None = None) -> None:
        self.used += seconds
        self.now += seconds if wall is None else wall

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept += seconds
        self.now += seconds


def test_time_that_was_not_used_is_not_saved_up():
    machine = Machine()
    budget = machine.make_budget(0.5)
    machine.now += 1000.0
    budget.restart()
    machine.work(1.0)
    budget.yield_cpu()
    assert machine.slept == pytest.approx(1.0)


def test_waiting_for_the_disk_counts_as_idle_time():
    machine = Machine()
    budget = machine.make_budget(0.5)
    machine.work(1.0, wall=1.5)
    budget.yield_cpu()
    machine.work(1.0, wall=2.5)
    budget.yield_cpu()
    assert machine.slept == pytest.approx(0.5)


@pytest.mark.parametrize("share", [1.0, 3.0])
def test_a_whole_core_never_sleeps(share: float):
    machine = Machine()
    budget = machine.make_budget(share)
    for seconds in (0.0, 1.0, 0.1):
        machine.work(seconds)
        budget.yield_cpu()
    assert machine.slept == 0.0


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_free_time_has_no_limit_and_ends_a_sleep(share: float):
    machine = Machine()
    budget = machine.make_budget(share)
    machine.work(10.0)
    machine.free_at = machine.now + 5.0
    assert not budget.is_free
    budget.yield_cpu()
    assert budget.is_free
    assert budget.slept == machine.slept == pytest.approx(5.0, abs=POLL_SECONDS)
    machine.work(10.0)
    budget.yield_cpu()
    assert budget.slept == machine.slept == pytest.approx(5.0, abs=POLL_SECONDS)


def test_a_share_of_nothing_does_not_begin_before_it_is_free():
    machine = Machine()
    budget = machine.make_budget(0.0)
    machine.free_at = machine.now + 100.0
    budget.restart()
    budget.yield_cpu()
    assert machine.now >= machine.free_at


@given(st.floats(0.01, 1.0), st.lists(st.floats(0.0, 10.0), min_size=1, max_size=20))
def test_over_any_pieces_of_work_the_share_is_kept(share: float, pieces: list[float]):
    machine = Machine()
    budget = machine.make_budget(share)
    for seconds in pieces:
        machine.work(seconds)
        budget.yield_cpu()
        assert machine.used - 50.0 <= share * (machine.now - 50.0) + 1e-6
