"""The compiled search next to the plain functions that define what it finds."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from doubles import row_of
from hypothesis import given
from hypothesis import strategies as st
from token_trees import tree_draft

from stages.contract.blocks import Candidate, Proposal, TokenTree, Verdict
from stages.drafting.costs import Costs, VerificationCosts
from stages.memory.calibration import CELLS, RANKS, Calibration, memory_cell, own_cell
from stages.memory.counting import LONGEST
from stages.memory.ngram_table import NgramTable
from stages.memory.options import LONGEST_MATCH, REACH
from stages.memory.text_memory import GrownTree, TextMemory, TreeLimits
from stages.memory.tree_growth import LEAST_SURVIVAL, LOOK_AHEAD
from store.events import DraftSource

Path = tuple[int, ...]  # candidates after the text


class Match(NamedTuple):
    """The last `length` tokens also occur right before index `place` of the text."""

    place: int
    length: int


class Option(NamedTuple):
    """A token that may follow, and why."""

    token: int
    chance: float  # estimated probability that it is emitted here
    source: DraftSource  # of several sources that with the highest chance
    context: int  # number of tokens before it that the source knew
    seen: int  # how often the source saw it there
    cell: int  # cell of the calibration that its chance is from
    match: Match | None = None  # of the own text: where its next token is
    remembered: float = 0.0  # its highest chance by what the memory knows alone


Find = Callable[[Path, Option | None], Sequence[Option]]  # given a path and its last option


@dataclass(frozen=True)
class OptionFinder:
    """Finds the options after a row's text and a path of candidates, by descending chance, each token once."""

    table: NgramTable | None
    calibration: Calibration
    own: bool
    text: Sequence[int]
    scope: int
    end: int

    def find(self, path: Path, before: Option | None) -> list[Option]:
        """`before`: the option that the path ends with."""
        if path and path[-1] == self.end:
            return []
        suffix, found = (*self.text[-LONGEST:], *path)[-LONGEST:], dict[int, Option]()
        if self.own and (match := find_match(self.text, suffix)):
            match = self._extend(match) if not path else _continue_match(match, before)
            cell, token = own_cell(match.length), self.text[match.place]
            chance = self.calibration.chance(cell)
            found[token] = Option(token, chance, DraftSource.LOOKUP, match.length, 1, cell, match)
        for context, (total, tokens, counts) in self.table.find(suffix, self.scope) if self.table is not None else ():
            for rank, (token, count) in enumerate(list(zip(tokens, counts, strict=True))[:RANKS]):
                cell = memory_cell(context, total, count, rank)
                chance, known = self.calibration.chance(cell), found.get(token)
                if known is None or known.chance < chance:
                    there = known and known.match
                    found[token] = Option(token, chance, DraftSource.MEMORY, context, count, cell, there, chance)
                elif known.remembered < chance:
                    found[token] = known._replace(remembered=chance)
        return sorted(found.values(), key=lambda option: (-option.chance, option.token))

    def _extend(self, match: Match) -> Match:
        place, length = match
        while length < min(place, LONGEST_MATCH) and self.text[place - length - 1] == self.text[-length - 1]:
            length += 1
        return Match(place, length)


def find_match(text: Sequence[int], suffix: Sequence[int]) -> Match | None:
    """Return the longest end of a suffix that occurs in the text with a continuation, the last such place.

    Known as prompt lookup (Saxena 2023) or LLMA (arXiv 2304.04487).
    """
    best: Match | None = None
    for place in range(len(text) - 1, max(0, len(text) - 1 - REACH), -1):
        length = 0
        while length < min(len(suffix), place) and text[place - 1 - length] == suffix[-1 - length]:
            length += 1
        if length > (best.length if best else 0):
            best = Match(place, length)
    return best


def _continue_match(match: Match, before: Option | None) -> Match:
    """Return the match with the length of that before it, if it continues it."""
    if before is not None and before.match is not None and before.match.place + 1 == match.place:
        return Match(match.place, max(match.length, before.match.length + 1))
    return match


def best_remembered(options: Sequence[Option]) -> int | None:
    """Return the token that the memory alone holds for the likeliest; None if it knows none."""
    best = max(options, key=lambda option: option.remembered, default=None)
    return best.token if best and best.remembered else None


class _Node(NamedTuple):
    row: int
    option: Option
    path: Path  # from the text on
    survival: float  # the probability that the path is emitted


def grow_trees(find: Sequence[Find], limits: Sequence[TreeLimits], costs: VerificationCosts) -> list[GrownTree]:
    """Grow the trees of a batch: the likeliest candidates of all rows that give the most tokens per cost."""
    rows, cost = len(find), costs.verification_cost
    pending, added, counts = list[_Node](), list[_Node](), [0] * rows

    def push(row: int, path: Path, survival: float, before: Option | None) -> None:
        if len(path) < limits[row].depth and counts[row] < limits[row].nodes:
            for option in find[row](path, before)[: limits[row].width]:
                if survival * option.chance < LEAST_SURVIVAL:
                    break
                pending.append(_Node(row, option, (*path, option.token), survival * option.chance))

    for row in range(rows):
        push(row, (), 1.0, None)
    emitted, best, chosen = float(rows), rows / cost(rows), 0
    while pending and len(added) < chosen + LOOK_AHEAD:
        node = pending.pop(max(range(len(pending)), key=lambda number: pending[number].survival))
        if counts[node.row] == limits[node.row].nodes:
            continue
        counts[node.row] += 1
        added.append(node)
        push(node.row, node.path, node.survival, node.option)
        emitted += node.survival
        if emitted / cost(rows + len(added)) > best:
            best, chosen = emitted / cost(rows + len(added)), len(added)
    return [_make_tree([node for node in added[:chosen] if node.row == row]) for row in range(rows)]


def _make_tree(nodes: Sequence[_Node]) -> GrownTree:
    """Number the chosen candidates of a row depth first."""
    candidates: list[Candidate] = []

    def add(path: Path, parent: int) -> None:
        for _, option, own, _ in [node for node in nodes if node.path[:-1] == path]:  # by descending chance
            fields = parent, len(path), option.chance, option.source, option.context, option.seen
            candidates.append(Candidate(option.token, *fields))
            add(own, len(candidates) - 1)

    add((), -1)
    return GrownTree(TokenTree(tuple(candidates)) if candidates else None, sum(node.survival for node in nodes))


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
