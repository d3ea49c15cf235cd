"""The contract of `Eviction`, over every implementation."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages import ngram_cache
from stages.ngram_cache import EVICTIONS, Eviction

every_order = pytest.mark.parametrize("make", EVICTIONS.values(), ids=list(EVICTIONS))
touches = st.lists(st.tuples(st.integers(0, 5).map(lambda n: (n, n)), st.integers(1, 3)), max_size=30)


def all_victims(order: Eviction) -> list[tuple[int, ...]]:
    found = []
    while True:
        try:
            found.append(order.victim())
        except KeyError:
            return found


@every_order
def test_without_entries_there_is_no_victim(make):
    with pytest.raises(KeyError, match="nothing to evict"):
        make().victim()


@every_order
@given(touches)
def test_every_entry_is_a_victim_exactly_once(make, touches):
    order = make()
    for pieces, times in touches:
        order.touch(pieces, times)
    assert sorted(all_victims(order)) == sorted({pieces for pieces, _ in touches})


@every_order
@given(touches)
def test_counts_are_at_least_1_and_never_above_the_touches(make, touches):
    order = make()
    for pieces, times in touches:
        order.touch(pieces, times)
    for pieces in {pieces for pieces, _ in touches}:
        assert 1 <= order.count(pieces) <= sum(times for touched, times in touches if touched == pieces)


@every_order
def test_a_victim_is_forgotten(make):
    order = make()
    order.touch((1, 2), 7)
    assert order.victim() == (1, 2)
    with pytest.raises(KeyError):
        order.count((1, 2))
    order.touch((1, 2))
    assert order.count((1, 2)) == 1


@every_order
@given(touches)
def test_equal_touches_give_equal_victims(make, touches):
    first, second = make(), make()
    for pieces, times in touches:
        first.touch(pieces, times)
        second.touch(pieces, times)
    assert all_victims(first) == all_victims(second)


def test_no_implementation_is_missing_from_this_suite():
    found = {
        cls for _, cls in inspect.getmembers(ngram_cache, inspect.isclass)
        if {"touch", "victim", "count"} <= vars(cls).keys() and cls is not Eviction
    }  # fmt: skip
    assert found == set(EVICTIONS.values())
