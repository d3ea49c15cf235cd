"""The contract of `Eviction`, for every implementation."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.ngrams import eviction
from stages.ngrams.eviction import EVICTIONS, Eviction, LeastRecentlyUsed, NeverEvict, Record

every_order = pytest.mark.parametrize("make", EVICTIONS.values(), ids=list(EVICTIONS))
touches = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 300)), max_size=30)


def touch_all(order: Eviction, touches: list[tuple[int, int]]) -> dict[int, Record]:
    records: dict[int, Record] = {}
    for number, times in touches:
        order.touch(records.setdefault(number, Record((number, number))), times)
    return records


def all_victims(order: Eviction) -> list[tuple[int, ...]]:
    found = []
    while record := order.victim():
        order.forget(record)
        found.append(record.pieces)
    return found


@every_order
def test_without_entries_there_is_no_victim(make):
    assert make().victim() is None


@every_order
@given(touches)
def test_every_entry_is_a_victim_exactly_once_or_never(make, touches):
    order = make()
    records = touch_all(order, touches)
    expected = [] if make is NeverEvict else sorted(record.pieces for record in records.values())
    assert sorted(all_victims(order)) == expected


@every_order
@given(touches)
def test_counts_are_the_sums_of_the_touches(make, touches):
    records = touch_all(make(), touches)
    for number, record in records.items():
        assert record.count == sum(times for touched, times in touches if touched == number)


@every_order
@given(touches)
def test_forgetting_an_entry_leaves_no_trace_of_it(make, touches):
    order, without = make(), make()
    for number, record in touch_all(order, touches).items():
        if number % 2:
            order.forget(record)
    touch_all(without, [(number, times) for number, times in touches if number % 2 == 0])
    assert order.bytes == without.bytes
    assert all_victims(order) == all_victims(without)


@every_order
@given(touches)
def test_a_victim_stays_until_it_is_forgotten(make, touches):
    order = make()
    touch_all(order, touches)
    assert order.victim() is order.victim()


@every_order
@given(touches)
def test_a_touch_of_zero_times_refreshes_recency_and_counts_nothing(make, touches):
    order = make()
    records = touch_all(order, touches)
    counts = {number: record.count for number, record in records.items()}
    for record in records.values():
        order.touch(record, 0)
    assert {number: record.count for number, record in records.items()} == counts
    if make is LeastRecentlyUsed:
        assert all_victims(order) == [record.pieces for record in records.values()]


@every_order
@given(touches)
def test_equal_touches_give_equal_victims(make, touches):
    first, second = make(), make()
    touch_all(first, touches)
    touch_all(second, touches)
    assert all_victims(first) == all_victims(second)


@every_order
@given(touches)
def test_an_emptied_order_uses_no_bytes_and_has_no_victim(make, touches):
    order = make()
    for record in touch_all(order, touches).values():
        order.forget(record)
    assert (order.bytes, order.victim()) == (0, None)


def test_no_implementation_is_missing_from_this_suite():
    found = {cls for _, cls in inspect.getmembers(eviction, inspect.isclass) if Eviction in cls.__mro__[1:]}
    assert found == set(EVICTIONS.values())
