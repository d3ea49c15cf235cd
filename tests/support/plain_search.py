"""The search of the memory in plain Python, one idea each: options after a text, and the growth of trees of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stages.contract.blocks import Candidate, TokenTree
from stages.drafting.costs import VerificationCosts
from stages.memory.calibration import RANKS, Calibration, memory_cell, own_cell
from stages.memory.counting import LONGEST
from stages.memory.ngram_table import NgramTable
from stages.memory.options import LONGEST_MATCH, REACH
from stages.memory.text_memory import GrownTree, TreeLimits
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
