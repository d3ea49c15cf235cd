"""The calibration: each kind of candidate has a cell of its own, and a cell converges to its frequency."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_states import store

from stages.memory.calibration import (
    COUNT_EDGES,
    OWN_EDGES,
    RANKS,
    SHARE_EDGES,
    Calibration,
    memory_cell,
    own_cell,
)
from stages.memory.counting import LONGEST

totals = st.integers(1, 1 << 32)
places = st.tuples(st.integers(1, LONGEST), totals, st.floats(0, 1), st.integers(0, RANKS - 1))


def count_cells() -> int:
    return len(Calibration().cells[0])


def kind_of(context: int, total: int, count: int, rank: int) -> tuple[int, ...]:
    """The kind of a candidate of the memory: two candidates share a cell if and only if their kinds are equal."""
    return context, sum(total >= edge for edge in COUNT_EDGES), sum(count / total >= edge for edge in SHARE_EDGES), rank


@given(places, places)
def test_candidates_share_a_cell_if_they_are_of_one_kind(left: tuple, right: tuple):
    (one, first), (other, second) = (
        ((context, total, round(share * total), rank), memory_cell(context, total, round(share * total), rank))
        for context, total, share, rank in (left, right)
    )
    assert (kind_of(*one) == kind_of(*other)) == (first == second)
    assert len(OWN_EDGES) < first < count_cells()


@given(st.integers(1, 200))
def test_longer_matches_never_have_an_earlier_cell(length: int):
    assert own_cell(length) <= own_cell(length + 1)
    assert 0 <= own_cell(length) <= len(OWN_EDGES)


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.9, 1.0])
def test_a_cell_converges_to_its_frequency(chance: float):
    calibration, numbers, cell = Calibration(), Random(0), own_cell(5)
    assert calibration.chance(cell) == pytest.approx(0.2)
    estimates = []
    for _ in range(3000):
        calibration.observe(cell, hit=numbers.random() < chance)
        estimates.append(calibration.chance(cell))
    assert sum(estimates[300:]) / 2700 == pytest.approx(chance, abs=0.02)
    assert all(0 <= estimate <= 1 for estimate in estimates)
    assert calibration.chance(own_cell(6)) == pytest.approx(0.2), "other cells learned nothing"


def test_a_change_is_followed_within_some_hundred_trials():
    calibration, cell = Calibration(), own_cell(5)
    for _ in range(10_000):
        calibration.observe(cell, hit=True)
    for _ in range(200):
        calibration.observe(cell, hit=False)
    assert calibration.chance(cell) < 0.2


def test_a_calibration_is_restored_bit_for_bit_and_continues_alike():
    calibration, numbers = Calibration(), Random(1)
    for _ in range(500):
        calibration.observe(numbers.randrange(count_cells()), hit=numbers.random() < 0.4)
    state = store(calibration.state_dict())
    other = Calibration()
    other.load_state_dict(state)
    assert other.cells == calibration.cells
    calibration.observe(3, hit=True)
    assert other.cells != calibration.cells, "nothing is shared"
    other.observe(3, hit=True)
    assert other.cells == calibration.cells
