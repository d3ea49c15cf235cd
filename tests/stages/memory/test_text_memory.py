"""The memory of a target: its proposals, and what it learns from which rows, and when."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from doubles import row_of
from stored_states import store
from token_trees import tree_draft

from stages.contract.blocks import Proposal, SequenceState, TokenTree, Verdict
from stages.drafting.costs import Costs
from stages.memory.calibration import own_cell
from stages.memory.text_memory import TextMemory, TreeLimits
from store.events import DraftSource

FREE = Costs(((1, 1.0), (2, 1.0)), ((1, 1.0),))
END = 9


def new_memory(*limits: int, **options: Any) -> TextMemory:
    """A memory with these limits on the nodes, the width and the depth of a tree."""
    return TextMemory(FREE, TreeLimits(*limits or (8, 3, 6)), {END}, **{"budget_bytes": 1 << 16} | options)


def admit(memory: TextMemory, *rows: SequenceState) -> list[SequenceState]:
    for row in rows:
        memory.admit(row)
    return list(rows)


def grow(memory: TextMemory, *rows: SequenceState) -> list[TokenTree | None]:
    return [grown.tree for grown in memory.grow(rows)]


def tokens_of(tree: TokenTree | None) -> tuple[int, ...]:
    return tree.tokens if tree else ()


def emit(row: SequenceState, *tokens: int, tree: TokenTree | None = None) -> Verdict:
    """Append tokens to the row as `Verify` does, and return its verdict."""
    row.tokens.extend(tokens)
    row.remaining_tokens -= len(tokens)
    row.block += 1
    return Verdict(Proposal(tree_draft(row, tree, 4, torch.float32), ()), (), tokens, 0, 0)


def complete(memory: TextMemory, prompt: Sequence[int], *tokens: int, **changes: Any) -> SequenceState:
    """A row that emits these tokens in one block and is released."""
    row = row_of(prompt)
    for name, value in changes.items():
        setattr(row, name, value)
    admit(memory, row)
    memory.grow([row])
    memory.observe([emit(row, *tokens)])
    memory.release(row)
    return row


# What is proposed.


def test_a_row_that_repeats_itself_has_a_tree_of_its_own_text():
    memory = new_memory()
    (row,) = admit(memory, row_of([1, 2, 3, 4, 1, 2]))
    for length in range(2, 9):
        for _ in range(50):
            memory.calibration.observe(own_cell(length), hit=True)
    (tree,) = grow(memory, row)
    assert tree.tokens == (3, 4, 1, 2, 3, 4)
    assert {candidate.source for candidate in tree.candidates} == {DraftSource.LOOKUP}
    assert [candidate.context for candidate in tree.candidates] == [2, 3, 4, 5, 2, 3], "the text ends, and begins again"


def test_a_row_has_a_tree_of_what_completed_rows_emitted():
    memory = new_memory()
    complete(memory, [1], 2, 3, 4)
    complete(memory, [1], 2, 5)
    (row,) = admit(memory, row_of([7, 1, 2]))
    (tree,) = grow(memory, row)
    assert {(candidate.token, candidate.depth) for candidate in tree.candidates} >= {(3, 0), (5, 0)}
    assert {candidate.source for candidate in tree.candidates} == {DraftSource.MEMORY}
    first = tree.candidates[0]
    assert (first.context, first.count) == (2, 1)


def test_growing_draws_no_random_numbers_and_changes_nothing():
    class NoNumbers:
        def uniform(self, distribution: torch.Tensor) -> float:
            raise AssertionError("a tree may not depend on what is about to be drawn")

    memory = new_memory()
    complete(memory, [1], 2, 3, 4)
    rows = admit(memory, row_of([1, 2, 1], rng=NoNumbers()), row_of([8, 1], offset=1, rng=NoNumbers()))
    before = memory.table.sizes, memory.calibration.state_dict()
    trees = grow(memory, *rows)
    assert trees == grow(memory, *rows)
    assert all(trees)
    assert (memory.table.sizes, memory.calibration.state_dict()) == before


def test_rows_of_one_scope_never_see_text_of_another():
    memory = new_memory()
    complete(memory, [1], 2, 3, scope=4)
    rows = [row_of([1, 2], offset=number) for number in range(3)]
    rows[1].scope, rows[2].scope = 4, 5
    assert [tokens_of(tree) for tree in grow(memory, *admit(memory, *rows))] == [(), (3,), ()]
    assert memory.table.forget_scope(4) > 0
    assert grow(memory, *rows) == [None] * 3


# What is learned.


def test_a_row_is_learned_when_it_is_released_and_its_prompt_is_context():
    memory = new_memory()
    (row,) = admit(memory, row_of([1, 2, 3]))
    memory.grow([row])
    memory.observe([emit(row, 4, 5)])
    assert len(memory.table) == 0
    memory.release(row)
    assert memory.table.find([3]) == [(1, (1, [4], [1]))]
    assert [length for length, _ in memory.table.find([1, 2, 3, 4])] == [4, 3]
    assert memory.table.find([1]) == memory.table.find([2]) == [], "the prompt is not what the target emitted"


def test_private_rows_have_trees_and_are_not_learned():
    memory = new_memory()
    complete(memory, [1], 2, 3)
    before = memory.table.sizes
    complete(memory, [5, 6], 7, private=True)
    assert memory.table.sizes == before
    assert memory.table.find([6]) == []
    row = row_of([1, 2])
    row.private = True
    assert tokens_of(*grow(memory, *admit(memory, row))) == (3,)


def test_after_a_drift_new_text_weighs_double():
    for drifts, wanted in ((True, [3, 2]), (False, [2, 3])):
        memory = new_memory()
        for _ in range(4):
            complete(memory, [1], 2)
        if drifts:
            memory.respond_to_drift()
        for _ in range(3):
            complete(memory, [1], 3)
        assert memory.table.find([1])[0][1].tokens == wanted


# Checkpoints.


@pytest.mark.parametrize("budget", [0, 1 << 12, 1 << 16])
def test_rows_of_a_checkpoint_continue_with_the_same_trees(budget: int):
    numbers = np.random.default_rng(0)
    memory = new_memory(budget_bytes=budget)
    for _ in range(20):
        complete(memory, numbers.integers(0, 5, 3).tolist(), *numbers.integers(0, 5, 10).tolist())
    rows = admit(memory, *(row_of(numbers.integers(0, 5, 40).tolist(), offset=number) for number in range(3)))
    blocks = numbers.integers(0, 5, (6, 3, 4)).tolist()

    def run(memory: TextMemory, rows: Sequence[SequenceState], blocks: Sequence[Any]) -> list[TokenTree | None]:
        trees: list[TokenTree | None] = []
        for block in blocks:
            trees += grow(memory, *rows)
            for row, tokens in zip(rows, block, strict=True):
                memory.observe([emit(row, *tokens)])
        return trees

    run(memory, rows, blocks[:3])
    state = store([rows, memory.state_dict()])
    restored = new_memory(budget_bytes=budget)
    restored.load_state_dict(state[1])
    again = admit(restored, *state[0])
    trees = run(memory, rows, blocks[3:])
    assert run(restored, again, blocks[3:]) == trees
    assert any(tree and not tree.is_chain for tree in trees) == (budget > 0)
    for number in range(3):
        memory.release(rows[number])
        restored.release(again[number])
    assert restored.calibration.cells == memory.calibration.cells
    if budget:
        assert restored.table.sizes == memory.table.sizes
        assert all(map(np.array_equal, memory.table.arrays, restored.table.arrays))


@pytest.mark.usefixtures("small_heap")
def test_nothing_of_a_row_is_kept_after_its_release():
    memory = new_memory()
    (row,) = admit(memory, row_of([1, 2, 1, 2]))
    grow(memory, row)
    memory.observe([emit(row, 1, 2)])
    memory.release(row)
    gone = weakref.ref(row)
    del row
    gc.collect()
    assert gone() is None
