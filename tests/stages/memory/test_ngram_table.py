"""The table of n-grams: it counts what a dictionary counts, forgets what it learned, and stays within its budget."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_states import store

from stages.memory.counting import CONTINUATIONS, LONGEST, WAYS, TableArrays
from stages.memory.ngram_table import (
    FIRST_SLOTS,
    SLOT_BYTES,
    NgramTable,
    context_hashes,
    scope_of,
)

LARGE = 1 << 20
ONE_BUCKET = WAYS * SLOT_BYTES
texts = st.lists(st.integers(0, CONTINUATIONS - 1), max_size=40)  # no context has more continuations than are kept
many_texts = st.lists(texts, max_size=5)


def make_table(*given: Sequence[int], begin: int = 1, budget: int = LARGE, order: int = LONGEST) -> NgramTable:
    table = NgramTable(budget, order)
    for text in given:
        table.learn(list(text), begin)
    return table


def contents(table: NgramTable, scope: int | None = None) -> dict[int, tuple[int, frozenset]]:
    """Per hash of a context its total and its continuations, whatever their places."""
    arrays = arrays_of(table)
    found = {}
    for slot in np.flatnonzero(arrays["hashes"]).tolist():
        pairs = zip(arrays["tokens"][slot].tolist(), arrays["counts"][slot].tolist(), strict=True)
        counted = frozenset((token, count) for token, count in pairs if count)
        if scope is None or arrays["scopes"][slot] == scope:
            found[int(arrays["hashes"][slot])] = int(arrays["totals"][slot]), counted
    return found


def arrays_of(table: NgramTable) -> dict[str, np.ndarray]:
    """The arrays by name, with a line per slot where it has several numbers."""
    return {
        name: array.squeeze(1) if array.shape[1] == 1 else array
        for name, array in zip(TableArrays._fields, table.lines(), strict=True)
    }


def bytes_of(table: NgramTable) -> list[bytes]:
    return [array.tobytes() for array in table.arrays]


def assert_sound(table: NgramTable) -> None:
    """The invariants of the arrays."""
    arrays = arrays_of(table)
    hashes, counts, totals = arrays["hashes"], arrays["counts"].astype(np.int64), arrays["totals"].astype(np.int64)
    used = hashes != 0
    assert len(table) == used.sum()
    assert table.bytes == sum(array.nbytes for array in arrays.values()) <= table.budget_bytes
    assert len(set(hashes[used].tolist())) == len(table), "a context has one slot"
    assert (hashes[used] % (len(hashes) // WAYS) == np.flatnonzero(used) // WAYS).all(), "in the bucket of its hash"
    assert (np.diff(counts, axis=1) <= 0).all(), "the commonest continuation is the first"
    assert (counts[used, 0] > 0).all()
    assert (counts.sum(1) <= totals).all()
    assert all((array[~used] == 0).all() for array in arrays.values()), "a free slot has nothing"


# Hashes.


def test_hashes_are_the_same_in_every_process_and_release():
    """They are stored in checkpoints."""
    assert list(context_hashes([1, 2, 3])) == [
        0xD02EC4CAD994F3F1,
        0xA8ABDBF8D40BE536,
        0x4DDEFADA5BF12B85,
    ]
    assert list(context_hashes([3], scope=5)) == [0xB0ABC5CA633BC879]
    assert (scope_of(""), scope_of("tenant")) == (0, 0xE9DA86D3)


@given(st.lists(st.integers(0, 200_000), max_size=12), st.integers(0, 1 << 31))
def test_the_hash_of_a_context_depends_on_its_own_tokens(text: list[int], scope: int):
    hashes = list(context_hashes(text, scope))
    assert len(hashes) == min(len(text), LONGEST)
    for length, value in enumerate(hashes, start=1):
        assert list(context_hashes(text[-length:], scope))[-1] == value
        assert 0 < value < 1 << 64


# Counting.


def count_all(given: Sequence[Sequence[int]], begin: int, order: int) -> dict[tuple[int, ...], Counter]:
    counted: dict[tuple[int, ...], Counter] = defaultdict(Counter)
    for text in given:
        for place in range(max(1, begin), len(text)):
            for length in range(1, min(order, place) + 1):
                counted[tuple(text[place - length : place])][text[place]] += 1
    return counted


@given(many_texts, texts, st.integers(0, 4), st.sampled_from([1, 2, 5, 8]))
def test_what_is_found_is_what_was_counted(given: list[list[int]], text: list[int], begin: int, order: int):
    table, counted = make_table(*given, begin=begin, order=order), count_all(given, begin, order)
    known = []
    for length in range(1, min(order, len(text)) + 1):
        if tuple(text[-length:]) not in counted:
            break
        known.append(length)
    found = table.find(text)
    assert [length for length, _ in found] == known[:-3:-1]
    for length, (total, tokens, counts) in found:
        wanted = counted[tuple(text[-length:])]
        assert total == wanted.total()
        assert dict(zip(tokens, counts, strict=True)) == wanted
        assert counts == sorted(counts, reverse=True)
    assert len(table) == len(counted)
    assert_sound(table)


def test_a_fifth_continuation_replaces_the_rarest():
    table = make_table(*[[1, token] for token in (2, 2, 3, 3, 4, 4, 5)])
    table.learn([1, 6], 1)
    ((_, (total, tokens, counts)),) = table.find([1])
    assert (total, tokens, counts) == (8, [4, 3, 2, 6], [2, 2, 2, 1]), "of equal counts the last to reach it is first"
    assert_sound(table)


def test_the_prompt_is_context_and_is_not_counted():
    table = make_table([1, 2, 3, 4], begin=3)
    assert table.find([1]) == table.find([2]) == []
    assert [length for length, _ in table.find([1, 2, 3])] == [3, 2]
    assert len(table) == 3


@given(texts, st.integers(0, 40))
def test_a_text_that_is_learned_in_two_parts_is_learned_whole(text: list[int], cut: int):
    table = NgramTable(LARGE)
    table.learn(text[:cut], 1)
    table.learn(text, max(1, min(cut, len(text))))
    assert contents(table) == contents(make_table(text))


# Forgetting.


@given(many_texts, texts)
def test_a_text_that_is_forgotten_was_never_learned(given: list[list[int]], text: list[int]):
    table, never = make_table(*given, text), make_table(*given)
    table.forget(text, 1)
    assert contents(table) == contents(never)
    for name in ("hashes", "totals", "scopes"):
        assert np.array_equal(arrays_of(table)[name], arrays_of(never)[name]), "not even its slots are left"
    assert_sound(table)


@given(many_texts, many_texts)
@settings(max_examples=40)
def test_a_text_that_was_never_learned_or_was_evicted_may_be_forgotten(given: list[list[int]], other: list[list[int]]):
    table = make_table(*given, budget=4 * ONE_BUCKET)
    for text in other + given + given:
        table.forget(text, 1)
        table.learn(text[:5], 1)
        assert len(table) <= 4 * WAYS
        counts = arrays_of(table)["counts"].astype(np.int64)
        assert (np.diff(counts, axis=1) <= 0).all()


@given(many_texts, many_texts)
def test_scopes_are_isolated(given: list[list[int]], other: list[list[int]]):
    table, alone = NgramTable(LARGE), make_table(*given)
    for text in given:
        table.learn(text, 1, scope=0)
    for text in other:
        table.learn(text, 1, scope=7)
    for text in [*given, *other]:
        for length in range(len(text)):
            assert table.find(text[:length]) == alone.find(text[:length])
    assert contents(table, 0) == contents(alone)
    held = len(contents(table, 7))
    assert held == len(make_table(*other))
    assert table.forget_scope(7) == held
    assert contents(table) == contents(alone)
    assert not (table.arrays.scopes == 7).any()
    assert_sound(table)
    assert table.forget_scope(0) == len(alone)
    assert all((array == 0).all() for array in table.arrays)


@given(many_texts)
def test_decay_halves_all_counts_and_forgets_nothing(given: list[list[int]]):
    table, before = make_table(*given), contents(make_table(*given))
    table.decay()
    assert contents(table) == {
        value: ((total + 1) // 2, frozenset((token, (count + 1) // 2) for token, count in counted))
        for value, (total, counted) in before.items()
    }
    slots = [(total, tokens) for _, (total, tokens, _) in table.find([0])]
    table.learn([0, 1], 1)
    assert table.find([0])[0][1].total == (slots[0][0] if slots else 0) + 1


# The budget.


@pytest.mark.parametrize("budget", [0, 1, ONE_BUCKET - 1, ONE_BUCKET, 3 * ONE_BUCKET, 1 << 16, 1 << 20])
def test_the_table_is_the_largest_within_the_budget_and_at_least_one_bucket(budget: int):
    table = NgramTable(budget)
    assert table.budget_bytes == ONE_BUCKET or table.budget_bytes <= budget < 2 * table.budget_bytes
    assert table.bytes == min(table.budget_bytes, FIRST_SLOTS * SLOT_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize(("order", "tokens"), [(8, 20_000), (2, 200_000)])
def test_the_budget_is_never_exceeded_however_much_is_learned(order: int, tokens: int):
    table = NgramTable(1 << 14, order)
    numbers, sizes = np.random.default_rng(0), set()
    for _ in range(tokens // 1000):
        text = (numbers.zipf(1.3, 1000) % 5000).tolist()
        table.learn(text, 1)
        sizes.add(sum(array.nbytes for array in table.arrays))
    assert sizes == {table.budget_bytes}
    assert table.bytes == table.budget_bytes <= 1 << 14
    assert len(table) > table.budget_bytes / SLOT_BYTES * 0.9, "the budget is used"
    assert_sound(table)


def test_the_table_doubles_while_it_is_half_full_and_keeps_everything():
    table, text = NgramTable(8 * FIRST_SLOTS * SLOT_BYTES), np.random.default_rng(1).integers(0, 4, 6000).tolist()
    sizes = [table.bytes]
    for place in range(1000, 6001, 1000):
        table.learn(text[:place], max(1, place - 1000))
        assert_sound(table)
        sizes.append(table.bytes)
        assert len(table) <= 0.55 * table.bytes / SLOT_BYTES or table.bytes == table.budget_bytes
    assert sizes[-1] >= 4 * sizes[0]
    lost = len(count_all([text], 1, LONGEST)) - len(table)
    assert 0 <= lost <= 0.02 * len(table), "a bucket is rarely full while the table is half empty"
    counted = count_all([text], 1, 2)
    for context, wanted in counted.items():
        (_, found), *_ = table.find(context)
        assert dict(zip(found.tokens, found.counts, strict=True)) == wanted


def test_the_rarest_context_is_evicted_and_of_equally_rare_ones_the_least_recent():
    table = NgramTable(ONE_BUCKET, order=1)
    for token in range(WAYS):
        table.learn([token, 99], 1)
    for token in (0, 1, 2, 4, 5, 6, 7):
        table.learn([token, 99], 1)
    assert len(table) == WAYS
    table.learn([50, 99], 1)  # 3 was seen once
    assert table.find([3]) == []
    table.learn([51, 99], 1)  # now 50 was
    assert table.find([50]) == []
    table.learn([51, 99], 1)
    table.learn([52, 99], 1)  # all were seen twice; 0 was the first
    assert table.find([0]) == []
    assert [len(table.find([token])) for token in (1, 2, 4, 5, 6, 7, 51, 52)] == [1] * 8
    assert_sound(table)


# Saving.


@pytest.mark.parametrize("tokens", [0, 2, 500, 4000])
@pytest.mark.parametrize("budget", [ONE_BUCKET, 1 << 14, 1 << 20])
def test_a_table_is_restored_bit_for_bit_and_continues_alike(tokens: int, budget: int):
    numbers = np.random.default_rng(2)
    table = NgramTable(budget)
    table.learn(numbers.integers(0, 30, tokens).tolist(), 1, scope=3)
    table.learn(numbers.integers(0, 200_000, tokens // 4).tolist(), 1)
    other = NgramTable(budget)
    other.load_state_dict(store(table.state_dict()))
    assert bytes_of(other) == bytes_of(table)
    assert (len(other), other.bytes, other.sizes) == (len(table), table.bytes, table.sizes)
    more = numbers.integers(0, 30, 1000).tolist()
    for each in (table, other):
        each.learn(more, 1)
        each.forget(more[:100], 1)
        each.decay()
    assert bytes_of(other) == bytes_of(table)


def test_a_saved_table_of_a_larger_budget_is_loaded_as_far_as_it_fits():
    table = NgramTable(1 << 18)
    for token in range(3000):
        table.learn([token, token + 1], 1)
    for _ in range(5):
        table.learn([7, 8], 1)
    small = NgramTable(1 << 14)
    small.load_state_dict(table.state_dict())
    assert small.bytes <= 1 << 14
    assert small.find([7]) == table.find([7]), "what was seen often stays"
    assert contents(small).items() <= contents(table).items()
    assert_sound(small)
    large = NgramTable(1 << 20)
    large.load_state_dict(table.state_dict())
    assert bytes_of(large) == bytes_of(table)
