"""The compiled search next to the plain functions that define what it finds."""

import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from doubles import row_of
from hypothesis import given
from hypothesis import strategies as st
from plain_search import REACH, Find, Option, OptionFinder, Path, best_remembered, grow_trees
from token_trees import tree_draft

from stages.contract.blocks import Proposal, Verdict
from stages.drafting.costs import Costs
from stages.memory.calibration import CELLS, Calibration
from stages.memory.text_memory import TextMemory, TreeLimits
from stages.memory.tree_growth import LEAST_SURVIVAL, LOOK_AHEAD
from store.events import DraftSource

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
        plain.load_cells(memory.calibration.cells)
        own = options.get("own", True)
        finds = [OptionFinder(memory.table, plain, own, list(row.tokens), row.scope, END).find for row in rows]
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


def observe_plainly(calibration: Calibration, find: Find, emitted: tuple[int, ...]) -> int:
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
        memory.calibration.load_cells([[9.0] * CELLS, [10.0] * CELLS])
        (grown,) = memory.grow([row])
        assert (grown.tree.tokens[:1] if grown.tree else ()) == expected
        memory.release(row)


Chances = Mapping[Path, Sequence[tuple[int, float]]]  # per path the options after it, by descending chance
STEPS = [(2, 1.1), (3, 1.15), (4, 1.5), (5, 1.55), (8, 1.6), (9, 2.5), (30, 3.0)]
STEPPED = Costs(target=((1, 1.0), *STEPS), drafter=((1, 1.0),))


@st.composite
def chances_of_row(draw: st.DrawFn) -> Chances:
    """Up to three options after each path of distinct tokens."""
    found: dict[Path, list[tuple[int, float]]] = {}
    pending: list[Path] = [()]
    while pending:
        path = pending.pop()
        values = draw(st.lists(st.sampled_from([0.05, 0.1, 0.3, 0.5, 0.55, 0.9, 0.97, 1.0]), max_size=3))
        found[path] = list(zip(draw(st.permutations(range(4))), sorted(values, reverse=True), strict=False))
        pending += [(*path, token) for token, _ in found[path] if len(path) < 3 and len(found) < 30]
    return found


def list_survivals(chances: Chances, limits: TreeLimits, path: Path = (), survival: float = 1.0) -> list[float]:
    """Survivals of all candidates within the limits on width and depth."""
    options = chances.get(path, ())[: limits.width] if len(path) < limits.depth else ()
    likely = [(token, survival * chance) for token, chance in options if survival * chance >= LEAST_SURVIVAL]
    return [one for token, own in likely for one in (own, *list_survivals(chances, limits, (*path, token), own))]


limits_of_row = st.builds(TreeLimits, st.integers(1, 12), st.integers(1, 4), st.integers(1, 5))


@given(st.lists(st.tuples(chances_of_row(), limits_of_row), min_size=1, max_size=3))
def test_the_plain_trees_are_the_best_prefix_of_all_candidates_by_survival(rows: list[tuple[Chances, TreeLimits]]):
    def make_find(chances: Chances) -> Find:
        return lambda path, before: [Option(*one, DraftSource.MEMORY, 2, 1, 0) for one in chances.get(path, ())]

    trees = grow_trees([make_find(chances) for chances, _ in rows], [limits for _, limits in rows], STEPPED)
    ranked = [one for own, limits in rows for one in sorted(list_survivals(own, limits), reverse=True)[: limits.nodes]]
    count, best, emitted = 0, len(rows) / STEPPED.verification_cost(len(rows)), float(len(rows))
    for number, survival in enumerate(sorted(ranked, reverse=True), start=1):
        emitted += survival
        rate = emitted / STEPPED.verification_cost(len(rows) + number)
        if number <= count + LOOK_AHEAD and rate > best:
            best, count = rate, number
    grown = sum(len(one.tree.candidates) for one in trees if one.tree)
    rate = (len(rows) + sum(one.expected for one in trees)) / STEPPED.verification_cost(len(rows) + grown)
    assert rate == pytest.approx(best, rel=1e-9)
