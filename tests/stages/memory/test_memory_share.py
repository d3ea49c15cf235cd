"""Memories that share what they learned: each counts the texts of all, once, in whatever order they arrive."""

from random import Random

import numpy as np
import pytest
from test_ngram_table import assert_sound, contents
from test_text_memory import complete, new_memory

from stages.memory.calibration import PRIOR_TRIALS, own_cell
from stages.memory.counting import LONGEST
from stages.memory.memory_share import KEPT_TEXTS, LearnedText, MemoryExchange, MemoryShare
from stages.memory.text_memory import TextMemory

CELL = own_cell(3)


def texts_of(seed: int, count: int = 3) -> list[tuple[list[int], list[int], int]]:
    """Prompts shorter and longer than the longest context, completions of four kinds of tokens, and scopes."""
    numbers = np.random.default_rng(seed)
    return [
        (numbers.integers(0, 4, 3 * number).tolist(), numbers.integers(0, 4, 5).tolist(), number % 2)
        for number in range(1, count + 1)
    ]


def learn(memory: TextMemory, seed: int) -> None:
    for prompt, completion, scope in texts_of(seed):
        complete(memory, prompt, *completion, scope=scope)


@pytest.mark.parametrize("orders", range(6))
def test_memories_that_share_know_what_one_memory_of_all_texts_knows(orders: int):
    alone, *memories = (new_memory(budget_bytes=1 << 20) for _ in range(4))
    exchange = MemoryExchange()
    turns = [(number, seed) for number in range(3) for seed in (number, number + 3)]
    Random(orders).shuffle(turns)
    for memory in memories:
        memory.start_sharing()
    for number, seed in turns:
        memories[number].add_share(exchange.take(str(number)))
        learn(memories[number], seed)
        learn(alone, seed)
        exchange.receive(str(number), memories[number].take_share())
    for number, memory in enumerate(memories):
        memory.add_share(exchange.take(str(number)))
        assert contents(memory.table) == contents(alone.table)
        assert contents(memory.table, 1) == contents(alone.table, 1)
        assert_sound(memory.table)
        assert exchange.take(str(number)).texts == (), "nothing is given twice"


def test_the_text_of_a_private_row_and_the_text_before_a_context_are_not_shared():
    memory = new_memory()
    memory.start_sharing()
    complete(memory, [1, 2], 3, private=True)
    complete(memory, list(range(20, 40)), 5, 6, scope=7)
    (text,) = memory.take_share().texts
    assert text == LearnedText((*range(40 - LONGEST, 40), 5, 6), LONGEST, 7)
    assert memory.take_share().texts == ()


def observe(memory: TextMemory, *hits: bool) -> None:
    for hit in hits:
        memory.calibration.observe(CELL, hit=hit)


def evidence(memory: TextMemory) -> tuple[float, float]:
    """Hits and trials of the cell."""
    cells = memory.take_share().cells
    assert cells is not None
    return cells[0, CELL], cells[1, CELL]


def test_chances_are_pooled_and_the_prior_counts_once():
    first, second, third = (new_memory() for _ in range(3))
    observe(first, *[True] * 20)
    observe(second, *[False] * 30)
    assert evidence(third) == (0, 0)
    assert evidence(first) == pytest.approx((sum(0.99**n for n in range(20)),) * 2)
    assert evidence(second) == pytest.approx((0, sum(0.99**n for n in range(30))))
    third.add_share(MemoryShare(cells=first.take_share().cells + second.take_share().cells))
    hits, trials = evidence(first)[0], evidence(first)[1] + evidence(second)[1]
    prior = new_memory().calibration.chance(CELL) * PRIOR_TRIALS
    assert third.calibration.chance(CELL) == pytest.approx((hits + prior) / (trials + PRIOR_TRIALS))
    assert third.calibration.chance(own_cell(9)) == new_memory().calibration.chance(own_cell(9))
    third.add_share(second.take_share())
    assert third.calibration.chance(CELL) == pytest.approx(prior / (evidence(second)[1] + PRIOR_TRIALS))
    assert evidence(third) == (0, 0), "what others observed is not passed on"


def share_of(*tokens: int) -> MemoryShare:
    return MemoryShare(tuple(LearnedText((token, token), 1, 0) for token in tokens), np.array([[1.0], [2.0]]))


def test_a_worker_that_joins_learns_the_newest_texts_and_one_that_left_is_not_pooled():
    exchange = MemoryExchange()
    exchange.receive("a", share_of(*range(KEPT_TEXTS)))
    exchange.receive("b", share_of(-1))
    exchange.remove("a")
    joined = exchange.take("c")
    assert [text.tokens[0] for text in joined.texts] == [*range(1, KEPT_TEXTS), -1]
    assert joined.cells.tolist() == [[1.0], [2.0]]
    exchange.receive("a", share_of(5))
    assert [text.tokens[0] for text in exchange.take("c").texts] == [5]
    assert exchange.take("c").cells.tolist() == [[2.0], [4.0]]
    exchange.remove("a")
    exchange.remove("b")
    left = exchange.take("c")
    assert (left.texts, left.cells) == ((), None)
