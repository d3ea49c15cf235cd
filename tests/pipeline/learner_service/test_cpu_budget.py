"""A share of one core, by a clock that is set by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.learner_service.process import CpuBudget


class Machine:
    """Processor and wall time, moved by work and sleep."""

    def __init__(self) -> None:
        self.used = self.now = 50.0
        self.slept: list[float] = []

    def make_budget(self, share: float) -> CpuBudget:
        return CpuBudget(share, lambda: self.used, lambda: self.now, self.sleep)

    def work(self, seconds: float, wall: float | None = None) -> None:
        self.used += seconds
        self.now += seconds if wall is None else wall

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds


def test_time_that_was_not_used_is_not_saved_up():
    machine = Machine()
    budget = machine.make_budget(0.5)
    machine.now += 1000.0
    budget.restart()
    machine.work(1.0)
    budget.yield_cpu()
    assert machine.slept == [pytest.approx(1.0)]


def test_waiting_for_the_disk_counts_as_idle_time():
    machine = Machine()
    budget = machine.make_budget(0.5)
    machine.work(1.0, wall=1.5)
    budget.yield_cpu()
    machine.work(1.0, wall=2.5)
    budget.yield_cpu()
    assert machine.slept == [pytest.approx(0.5)]


@pytest.mark.parametrize("share", [1.0, 3.0])
def test_a_whole_core_never_sleeps(share: float):
    machine = Machine()
    budget = machine.make_budget(share)
    for seconds in (0.0, 1.0, 0.1):
        machine.work(seconds)
        budget.yield_cpu()
    assert machine.slept == []


@given(st.floats(0.01, 1.0), st.lists(st.floats(0.0, 10.0), min_size=1, max_size=20))
def test_over_any_pieces_of_work_the_share_is_kept(share: float, pieces: list[float]):
    machine = Machine()
    budget = machine.make_budget(share)
    for seconds in pieces:
        machine.work(seconds)
        budget.yield_cpu()
        assert machine.used - 50.0 <= share * (machine.now - 50.0) + 1e-6
