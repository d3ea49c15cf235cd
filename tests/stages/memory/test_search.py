"""The compiled search next to the plain functions that define what it finds."""

import random

import pytest
import torch
from doubles import row_of
from plain_options import Option, OptionFinder, best_remembered, last_tokens
from plain_own_text import REACH, SuffixIndex
from plain_tree_growth import Path, grow_trees
from token_trees import tree_draft

from stages.contract.blocks import Proposal, SequenceState, Verdict
from stages.drafting.costs import Costs
from stages.memory.calibration import CELLS, Calibration
from stages.memory.text_memory import TextMemory, TreeLimits

END = 0
COSTS = Costs(target=((1, 1.0), (4, 1.1), (9, 1.4), (10, 3.0)), drafter=((1, 1.0),), around=0.1)
LIMITS = TreeLimits(nodes=8, width=3, depth=6)


def make_text(numbers: random.Random, length: int, first: int = 1) -> list[int]:
    """A text that often repeats itself."""
    text = [first]
    while len(text) < length:
        text.append((text[-1] * 3 + numbers.choice([0, 0, 0, 1, 5])) % 20)
    return text


def new_memory(numbers: random.Random, **options) -> TextMemory:
    memory = TextMemory(COSTS, LIMITS, {END}, **{"budget_bytes": 1 << 16} | options)
    for scope in (0, 0, 0, 7):
        for offset in range(12):
            row = row_of(make_text(numbers, numbers.randrange(2, 90)), offset=offset)
            row.scope = scope
            memory.admit(row)
            memory.release(row)
    return memory


def find_plainly(memory: TextMemory, finder: OptionFinder, row: SequenceState, text: list[int]):
    """Return what finds the options after a path of candidates."""
    index, end = SuffixIndex(), last_tokens(text)
    index.read(text)

    def find(path: Path, before: Option | None) -> list[Option]:
        if path and path[-1] == END:
            return []
        return finder.find(last_tokens([*end, *path]), index, row.scope, before, at_end=not path)

    return find


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("options", [{}, {"own": False}, {"budget_bytes": 0}, {"order": 3}])
def test_trees_and_chances_are_those_of_the_plain_functions(options: dict, seed: int):
    numbers = random.Random(seed)
    memory = new_memory(numbers, **options)
    grown = 0
    for number in range(40):
        rows = [
            row_of(make_text(numbers, numbers.randrange(1, 70)), offset=one) for one in range(numbers.choice([1, 4]))
        ]
        for row in rows:
            row.remaining_tokens, row.scope = numbers.choice([1, 3, 50]), numbers.choice([0, 0, 7])
            memory.admit(row)
        plain = Calibration()
        plain.load_cells(*memory.calibration.cells)
        finder = OptionFinder(memory.table, plain, own=options.get("own", True))
        finds = [find_plainly(memory, finder, row, list(row.tokens)) for row in rows]
        limits = [LIMITS._replace(depth=min(LIMITS.depth, row.remaining_tokens)) for row in rows]
        want = grow_trees(finds, limits, COSTS)
        found = memory.grow(rows)
        assert [one.tree for one in found] == [one.tree for one in want], (number, rows)
        assert [one.expected for one in found] == pytest.approx([one.expected for one in want])
        grown += sum(one.tree is not None for one in found)
        for row, find in zip(rows, finds, strict=True):
            emitted = tuple(make_text(numbers, numbers.randrange(1, 5), numbers.randrange(20)))
            predicted = observe_plainly(plain, find, emitted)
            row.tokens.extend(emitted)
            memory.observe([Verdict(Proposal(tree_draft(row, None, 4, torch.float32), ()), (), emitted, 0, 0)])
            assert row.predicted == predicted
            memory.release(row)
        assert memory.calibration.cells == plain.cells
    assert grown > 20, "trees were compared"


def observe_plainly(calibration: Calibration, find, emitted: tuple[int, ...]) -> int:
    """Judge the options at the places of emitted tokens. Returns how many tokens the table alone predicted."""
    before, predicted, judged = None, 0, []
    for depth, token in enumerate(emitted):
        options = find(emitted[:depth], before)
        predicted += best_remembered(options) == token
        judged += [(option.cell, option.token == token) for option in options]
        before = next((option for option in options if option.token == token), None)
    for cell, hit in judged:
        calibration.observe(cell, hit=hit)
    return predicted


def test_a_long_text_is_searched_to_its_reach():
    memory = TextMemory(COSTS, LIMITS, {END}, budget_bytes=0)
    near, far = [5, 6, 7] + [1] * (REACH - 10) + [5, 6], [5, 6, 7] + [1] * (REACH + 10) + [5, 6]
    for text, expected in ((near, (7,)), (far, ())):
        row = row_of(text)
        memory.admit(row)
        memory.calibration.load_cells([9.0] * CELLS, [10.0] * CELLS)
        (grown,) = memory.grow([row])
        assert (grown.tree.tokens[:1] if grown.tree else ()) == expected
        memory.release(row)
