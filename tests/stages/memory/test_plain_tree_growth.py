"""Growing trees: the best prefix of the candidates by survival, within the limits, in one heap for the batch."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_options import Option
from plain_tree_growth import Path, grow_trees

from stages.contract.blocks import TokenTree
from stages.drafting.costs import Costs
from stages.memory.text_memory import GrownTree, TreeLimits
from stages.memory.tree_growth import LEAST_SURVIVAL, LOOK_AHEAD
from store.events import DraftSource

Chances = Mapping[Path, Sequence[tuple[int, float]]]  # per path the options after it, by descending chance
Expand = Callable[[Path, Option | None], Sequence[Option]]

LINEAR = Costs(((1, 1.0), (11, 2.0)), ((1, 1.0),))  # a tenth more for every token
WIDE = TreeLimits(99, 9, 9)


def expand_from(chances: Chances) -> Expand:
    def expand(path: Path, before: Option | None) -> Sequence[Option]:
        assert (before.token if before else None) == (path[-1] if path else None)
        return [Option(token, chance, DraftSource.MEMORY, 2, 10 + token, 0) for token, chance in chances.get(path, ())]

    return expand


def grow(*rows: Chances, limits: TreeLimits | Sequence[TreeLimits] = WIDE, costs: Costs = LINEAR) -> list[GrownTree]:
    each = [limits] * len(rows) if isinstance(limits, TreeLimits) else limits
    return grow_trees(list(map(expand_from, rows)), each, costs)


def paths_of(tree: TokenTree | None) -> list[Path]:
    paths: list[Path] = []
    for candidate in tree.candidates if tree else ():
        paths.append((*(paths[candidate.parent] if candidate.parent >= 0 else ()), candidate.token))
    return paths


@st.composite
def chances_of_row(draw: st.DrawFn, depth: int = 4) -> Chances:
    """Up to three options after each path of distinct tokens."""
    found: dict[Path, list[tuple[int, float]]] = {}
    pending: list[Path] = [()]
    while pending:
        path = pending.pop()
        values = draw(st.lists(st.sampled_from([0.05, 0.1, 0.3, 0.5, 0.55, 0.9, 0.97, 1.0]), max_size=3))
        tokens = draw(st.permutations(range(4)))
        found[path] = list(zip(tokens, sorted(values, reverse=True), strict=False))
        if len(path) + 1 < depth and len(found) < 30:
            pending += [(*path, token) for token, _ in found[path]]
    return found


limits_of_row = st.builds(TreeLimits, st.integers(1, 12), st.integers(1, 4), st.integers(1, 5))
steps = st.lists(st.floats(0, 0.4), min_size=4, max_size=20)


def costs_of(rises: Sequence[float]) -> Costs:
    curve, cost = [(1, 1.0)], 1.0
    for tokens, rise in enumerate(rises, start=2):
        cost += rise
        curve.append((tokens, cost))
    return Costs(tuple(curve), ((1, 1.0),))


def survivals(chances: Chances, limits: TreeLimits) -> dict[Path, float]:
    """Survivals of all candidates within the limits on width and depth."""
    found: dict[Path, float] = {(): 1.0}
    pending: list[Path] = [()]
    while pending:
        path = pending.pop()
        if len(path) == limits.depth:
            continue
        for token, chance in list(chances.get(path, ()))[: limits.width]:
            if found[path] * chance >= LEAST_SURVIVAL:
                found[(*path, token)] = found[path] * chance
                pending.append((*path, token))
    del found[()]
    return found


def best_prefix(rows: Sequence[Chances], limits: Sequence[TreeLimits], costs: Costs) -> tuple[int, float]:
    """The number of candidates and the rate, by looking at all candidates in the order of their survival."""
    ranked = sorted(
        (survival for own, limit in zip(rows, limits, strict=True)
         for survival in sorted(survivals(own, limit).values(), reverse=True)[: limit.nodes]),
        reverse=True,
    )  # fmt: skip
    count, best, emitted = 0, len(rows) / costs.verification_cost(len(rows)), float(len(rows))
    for number, survival in enumerate(ranked, start=1):
        if number > count + LOOK_AHEAD:
            break
        emitted += survival
        if emitted / costs.verification_cost(len(rows) + number) > best:
            best, count = emitted / costs.verification_cost(len(rows) + number), number
    return count, best


def rate_of(grown: Sequence[GrownTree], costs: Costs) -> float:
    count = sum(len(one.tree.candidates) for one in grown if one.tree)
    return (len(grown) + sum(one.expected for one in grown)) / costs.verification_cost(len(grown) + count)


@given(st.lists(st.tuples(chances_of_row(), limits_of_row), min_size=1, max_size=3), steps)
def test_the_trees_are_the_best_prefix_of_the_candidates_of_all_rows(rows: list, rises: list[float]):
    chances, limits = zip(*rows, strict=True)
    costs = costs_of(rises)
    grown = grow(*chances, limits=limits, costs=costs)
    _, rate = best_prefix(chances, limits, costs)
    assert rate_of(grown, costs) == pytest.approx(rate, rel=1e-9)
    for one, own, limit in zip(grown, chances, limits, strict=True):
        known = survivals(own, limit)
        assert one.expected == pytest.approx(sum(known[path] for path in paths_of(one.tree)))


@given(chances_of_row(depth=3), st.floats(0.01, 0.6))
@settings(max_examples=40)
def test_no_other_tree_has_a_higher_rate_where_costs_are_linear(chances: Chances, rise: float):
    """Compared with every set of candidates that has the parents of its members."""
    costs, limits = costs_of([rise] * 3), TreeLimits(9, 3, 3)
    known = dict(sorted(survivals(chances, limits).items(), key=lambda one: -one[1])[:9])
    (grown,) = grow(chances, limits=limits, costs=costs)
    best = 1.0
    for count in range(1, len(known) + 1):
        for chosen in combinations(known, count):
            if all(path[:-1] in chosen or len(path) == 1 for path in chosen):
                rate = (1 + sum(known[path] for path in chosen)) / costs.verification_cost(1 + count)
                best = max(best, rate)
    assert rate_of([grown], costs) == pytest.approx(best, rel=1e-9)


@given(chances_of_row(), limits_of_row, steps)
def test_a_tree_is_in_depth_first_order_within_its_limits(chances: Chances, limits: TreeLimits, rises: list[float]):
    (grown,) = grow(chances, limits=limits, costs=costs_of(rises))
    if not grown.tree:
        assert grown.expected == 0
        return
    tree, paths = grown.tree, paths_of(grown.tree)
    assert 0 < len(paths) <= limits.nodes
    assert max(map(len, paths)) <= limits.depth
    assert len(set(paths)) == len(paths), "alternatives are distinct tokens"
    for index, candidate in enumerate(tree.candidates):
        assert -1 <= candidate.parent < index
        assert candidate.depth == len(paths[index]) - 1
        assert candidate.chance == dict(chances[paths[index][:-1]])[candidate.token]
        assert (candidate.source, candidate.context, candidate.count) == (DraftSource.MEMORY, 2, 10 + candidate.token)
        following = paths[index + 1] if index + 1 < len(paths) else ()
        assert following[:-1] == paths[index][: max(0, len(following) - 1)], "after a node its subtree, then the next"
    for parent in range(-1, len(paths)):
        alternatives = [tree.candidates[child].chance for child in tree.children(parent)]
        assert len(alternatives) <= limits.width
        assert alternatives == sorted(alternatives, reverse=True)


def test_rows_of_a_batch_share_what_a_pass_may_cost():
    """The row whose text repeats itself has most of the candidates."""
    likely = {(7,) * depth: [(7, 0.95)] for depth in range(9)}
    unlikely = {(7,) * depth: [(7, 0.3)] for depth in range(9)}
    costs = Costs(((1, 1.0), (2, 1.01), (12, 1.11), (13, 9.0)), ((1, 1.0),))
    alone = [len(grow(row, costs=costs)[0].tree.candidates) for row in (likely, unlikely)]
    together = [len(one.tree.candidates) for one in grow(likely, unlikely, costs=costs)]
    assert sum(together) == 10, "twelve tokens, two of them the rows' own"
    assert together[0] > together[1]
    assert together[0] <= alone[0]
    assert grow(unlikely, likely, costs=costs) == grow(likely, unlikely, costs=costs)[::-1]
