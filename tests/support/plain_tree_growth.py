"""Growing token trees, in plain Python: candidates of all rows, the likeliest first, while they raise the rate."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from plain_options import Option

from stages.contract.blocks import Candidate, TokenTree
from stages.drafting.costs import VerificationCosts
from stages.memory.text_memory import GrownTree, TreeLimits
from stages.memory.tree_growth import LEAST_SURVIVAL, LOOK_AHEAD

Path = tuple[int, ...]


class _Node(NamedTuple):
    """A candidate: its row, its option, its path from the text on, and the probability that the path is emitted."""

    row: int
    option: Option
    path: Path
    survival: float


def grow_trees(
    expand: Sequence[Callable[[Path, Option | None], Sequence[Option]]],
    limits: Sequence[TreeLimits],
    costs: VerificationCosts,
) -> list[GrownTree]:
    """Grow the trees of a batch.

    One heap holds the candidates of all rows. The most probable is added, and its own continuations enter the heap.
    Added are those that give the highest expected tokens per cost: a block of B rows and n candidates emits B tokens
    and the sum of their survivals, and costs a target pass over B + n tokens.

    A pass over two tokens costs a tenth more than one over one. The text is followed by 7 with 0.5, and 7 by 8 with
    0.9: (1 + 0.5) / 1.1 and (1 + 0.5 + 0.45) / 1.2 both raise the rate.

    >>> from stages.drafting.costs import Costs
    >>> from store.events import DraftSource
    >>> def expand(path, option):
    ...     following = {(): (7, 0.5), (7,): (8, 0.9), (7, 8): (9, 0.1)}.get(path)
    ...     return [Option(*following, DraftSource.MEMORY, 2, 1, 0)] if following else []
    >>> costs = Costs(target=((1, 1.0), (11, 2.0)), drafter=((1, 1.0),))
    >>> (grown,) = grow_trees([expand], [TreeLimits(nodes=9, width=3, depth=9)], costs)
    >>> grown.tree.tokens, round(grown.expected, 3)
    ((7, 8), 0.95)

    Args:
        expand: per row a function that returns the options after a path of candidates, by descending chance; the second
            argument is the path's last option, None for the text itself.
        limits: per row the limits of its tree.
        costs: costs of the target's passes.
    """
    growth = _Growth(expand, limits)
    rows, added = len(expand), list[_Node]()
    emitted, best, chosen = float(rows), rows / costs.verification_cost(rows), 0
    while left := chosen + LOOK_AHEAD - len(added):
        count, survival = rows + len(added), growth.highest_survival  # of all that may still be added
        if all(
            emitted + more * survival <= best * costs.verification_cost(count + more) for more in range(1, left + 1)
        ):
            break  # before the options after candidates are looked up that cannot be taken
        node = growth.take()
        if node is None:
            break
        added.append(node)
        emitted += node.survival
        rate = emitted / costs.verification_cost(rows + len(added))
        if rate > best:
            best, chosen = rate, len(added)
    return [_make_tree([node for node in added[:chosen] if node.row == row]) for row in range(rows)]


class _Growth:
    """The candidates of all rows that may be added next.

    Args:
        expand, limits: as of `grow_trees`.
    """

    def __init__(
        self, expand: Sequence[Callable[[Path, Option | None], Sequence[Option]]], limits: Sequence[TreeLimits]
    ) -> None:
        self._expand, self._limits = expand, limits
        self._heap: list[tuple[float, int, _Node]] = []
        self._pushed, self._counts = 0, [0] * len(expand)
        for row in range(len(expand)):
            self._push(row, (), 1.0, None)

    @property
    def highest_survival(self) -> float:
        """The survival of the most probable candidate; no other that may be added has a higher one. 0 without any."""
        return -self._heap[0][0] if self._heap else 0.0

    def take(self) -> _Node | None:
        """Return the most probable candidate, and let its own continuations be candidates; None if there is none."""
        while self._heap:
            _, _, node = heappop(self._heap)
            if self._counts[node.row] < self._limits[node.row].nodes:
                self._counts[node.row] += 1
                self._push(node.row, node.path, node.survival, node.option)
                return node
        return None

    def _push(self, row: int, path: Path, survival: float, before: Option | None) -> None:
        limits = self._limits[row]
        if len(path) == limits.depth or self._counts[row] == limits.nodes:
            return
        for option in self._expand[row](path, before)[: limits.width]:
            product = survival * option.chance
            if product < LEAST_SURVIVAL:
                break
            heappush(self._heap, (-product, self._pushed, _Node(row, option, (*path, option.token), product)))
            self._pushed += 1


def _make_tree(nodes: Sequence[_Node]) -> GrownTree:
    """Number the chosen candidates of a row depth first."""
    children: dict[Path, list[_Node]] = {}
    for node in nodes:
        children.setdefault(node.path[:-1], []).append(node)
    candidates: list[Candidate] = []

    def add(path: Path, parent: int) -> None:
        for node in children.get(path, ()):  # by descending chance, as they were taken
            option, place = node.option, len(candidates)
            candidates.append(
                Candidate(option.token, parent, len(path), option.chance, option.source, option.context, option.seen)
            )
            add(node.path, place)

    add((), -1)
    return GrownTree(TokenTree(tuple(candidates)) if candidates else None, sum(node.survival for node in nodes))
