"""The law of what is emitted, by enumeration of every random outcome of the production functions.

A *world* is two small vocabularies with known laws: the target's over its tokens after what was emitted, the drafter's
over its pieces after the pieces of what was emitted. Nothing here knows how verification works: it drafts with
`sample_rows`, translates with `Translate`, tests with a `Rule`, `decide` and `cut`, and adds up weights.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from stages.acceptance import PaperRule, Rule, TrieRule, as_certain, as_drawn
from stages.blocks import Draft, Proposal, Row, Verdict
from stages.distributions import sample_rows
from stages.draws import Draws
from stages.ngram_cache import LeastRecentlyUsed, NgramCache, entry_bytes
from stages.translate import Translate
from stages.trie import Node, Trie
from stages.verify import cut, decide

NEGLIGIBLE = 1e-14  # outcomes of less weight are left out; what they add up to stays below the tests' tolerance
NARROWEST = 2.0**-23  # `to_float32_grid` could move the middle of a narrower cell out of it
Law = dict[tuple[int, ...], float]
Result = TypeVar("Result")


class EnumeratingDraws:
    """Numbers that lead to given outcomes; what else could have happened is noted for later runs.

    Args:
        choices: the outcome of each decision so far; after them the first possible outcome is taken.
    """

    def __init__(self, choices: tuple[int, ...] = ()) -> None:
        self.choices, self.weight = choices, 1.0
        self.untried: list[tuple[int, ...]] = []
        self._decided = 0

    def uniform(self, law: Tensor) -> float:
        """The middle of the chosen outcome's cell."""
        weights = law.double().numpy()
        edges = np.concatenate([[0.0], weights.cumsum()]) / weights.sum()
        widths = np.diff(edges)
        possible = np.flatnonzero(self.weight * widths > NEGLIGIBLE)
        assert widths[possible].min() > NARROWEST, f"this law has a cell too narrow to be hit: {law}"
        if self._decided == len(self.choices):
            first, *others = possible.tolist()
            self.untried += [(*self.choices, other) for other in others]
            self.choices += (first,)
        chosen = self.choices[self._decided]
        self._decided += 1
        self.weight *= float(widths[chosen])
        return float(edges[chosen] + edges[chosen + 1]) / 2


def every_outcome(run: Callable[[Draws], Result]) -> Iterator[tuple[float, Result]]:
    """Run once for every outcome of its decisions; yields the outcome's probability and the result."""
    pending: list[tuple[int, ...]] = [()]
    while pending:
        draws = EnumeratingDraws(pending.pop())
        result = run(draws)
        pending += draws.untried
        yield draws.weight, result


@cache
def random_law(seed: int, history: tuple[int, ...], size: int, support: int) -> Tensor:
    """A law in double precision that depends on the whole history; `support` of its entries are not 0."""
    generator = np.random.default_rng([seed, len(history), *history])
    law = np.zeros(size)
    chosen = generator.choice(size, support, replace=False)
    law[chosen] = 0.85 * generator.dirichlet(np.full(support, 0.6)) + 0.15 / support
    return torch.from_numpy(law)


@dataclass(frozen=True)
class World:
    """Two vocabularies, their laws, and how drafting goes.

    Attributes:
        spelling: per target token its pieces, or None.
        drafter_size: number of pieces.
        mode: as in the configuration.
        max_draft: most pieces of a draft.
        seed: of the laws.
        seeded: whether the cache holds all n-grams from the beginning; else it starts empty.
        cache_entries: the cache's budget, in n-grams of three pieces.
        adaptive: whether drafts stop early, depending on what was drafted.
        target_support, drafter_support: how many outcomes the laws have; 0 means all.
        ends: target tokens that end a sequence.
        greedy: "", "target" (its laws are at temperature 0) or "both".
    """

    spelling: tuple[tuple[int, ...] | None, ...]
    drafter_size: int
    mode: str = "trie"
    max_draft: int = 2
    seed: int = 0
    seeded: bool = True
    cache_entries: int = 100
    adaptive: bool = False
    target_support: int = 0
    drafter_support: int = 0
    ends: tuple[int, ...] = ()
    greedy: str = ""

    def target_law(self, emitted: tuple[int, ...]) -> Tensor:
        """Over target tokens, after what was emitted."""
        size = len(self.spelling)
        law = random_law(2 * self.seed, emitted, size, self.target_support or size)
        return _peak(law) if self.greedy else law

    @property
    def allowed(self) -> list[int]:
        """The pieces that may be drafted."""
        longest = 1 if self.mode == "tli" else 99
        return sorted({piece for spelt in self.spelling if spelt and len(spelt) <= longest for piece in spelt})

    def drafter_law(self, pieces: tuple[int, ...]) -> Tensor:
        """Over pieces, after the pieces of what was emitted; those that spell nothing are masked, as in `Decode`."""
        allowed = self.allowed
        support = self.drafter_support or len(allowed)
        law = torch.zeros(self.drafter_size, dtype=torch.float64)
        law[allowed] = random_law(2 * self.seed + 1, pieces, len(allowed), min(support, len(allowed)))
        return _peak(law) if self.greedy == "both" else law

    def goes_on(self, pieces: tuple[int, ...]) -> bool:
        """Whether one more piece is drafted."""
        return not self.adaptive or np.random.default_rng([self.seed, *pieces]).random() < 0.6


def _peak(law: Tensor) -> Tensor:
    return torch.zeros_like(law).index_fill_(0, law.argmax(), 1.0)


def translation_of(world: World, emitted: Sequence[int]) -> tuple[Trie, Translate]:
    """The trie and the translation as they are after these tokens were emitted."""
    trie = Trie(len(world.spelling), world.drafter_size)
    trie.insert_all((pieces, token) for token, pieces in enumerate(world.spelling) if pieces and len(pieces) == 1)
    budget = 0 if world.mode == "tli" else world.cache_entries * entry_bytes((0, 0, 0))
    translate = Translate(
        trie, NgramCache(trie, budget, LeastRecentlyUsed()), world.spelling, longest=world.mode == "paper"
    )
    ngrams = [token for token, pieces in enumerate(world.spelling) if pieces and len(pieces) > 1]
    for token in [*(ngrams if world.seeded else ()), *emitted]:
        _read_members(trie.root)  # as a verification in between does
        translate.observe([Verdict(None, (), (token,), 0, 0)])
    return trie, translate


def _read_members(node: Node) -> tuple[int, ...]:
    for child in node.children.values():
        _read_members(child)
    return node.members


def rule_of(world: World, trie: Trie) -> Rule:
    """The rule of the world's mode."""
    if world.mode == "paper":
        return PaperRule([s[0] if s and len(s) == 1 else world.drafter_size for s in world.spelling])
    return TrieRule(trie, as_certain if world.mode == "match" else as_drawn)


def _draft(world: World, row: Row, room: int, draws: Draws) -> Draft:
    """What `Decode` does, on known laws."""
    pieces, laws = (), []
    while len(pieces) < min(world.max_draft, room) and (not pieces or world.goes_on(pieces)):
        laws.append(world.drafter_law((*row.pieces, *pieces)))
        pieces += (int(sample_rows(laws[-1][None], [draws])[0]),)
    laws_KD = torch.stack(laws) if laws else torch.zeros(0, world.drafter_size, dtype=torch.float64)
    return Draft(row, pieces, laws_KD, (), None, ())


def _target_laws(world: World, emitted: tuple[int, ...], proposed: tuple[int, ...]) -> Tensor:
    return torch.stack([world.target_law((*emitted, *proposed[:length])) for length in range(len(proposed) + 1)])


def _verifications(
    world: World, rule: Rule, emitted: tuple[int, ...], proposals: Sequence[Proposal], room: int
) -> Iterator[tuple[int, float, tuple[int, ...]]]:
    """(number of the proposal, weight, tokens emitted) for every outcome of every proposal."""
    laws = [
        torch.stack(
            [world.target_law((*emitted, *proposal.verifiable[:n])) for n in range(len(proposal.verifiable) + 1)]
        )
        for proposal in proposals
    ]
    starts = np.cumsum([0, *(len(laws_MV) for laws_MV in laws)]).tolist()
    levels = rule.levels(proposals, torch.cat(laws), starts)
    for number, proposal in enumerate(proposals):
        for weight, decisions in every_outcome(
            lambda draws, i=number, p=proposal: decide(p, levels[i], laws[i], rule, draws)
        ):
            kept = cut(decisions, room, world.ends)
            yield number, weight, tuple(d.emitted for d in kept if d.emitted is not None)


def block_law(world: World, emitted: tuple[int, ...], room: int) -> Law:
    """The law of what one block emits."""
    trie, translate = translation_of(world, emitted)
    pieces = [piece for token in emitted for piece in world.spelling[token] or ()]
    row = Row(0, "", "", "", list(emitted), 0, pieces, EnumeratingDraws(), room)
    drafts = list(every_outcome(lambda draws: _draft(world, row, room, draws)))
    proposals = translate([draft for _, draft in drafts])
    law: Law = defaultdict(float)
    for number, weight, tokens in _verifications(world, rule_of(world, trie), emitted, proposals, room):
        law[tokens] += drafts[number][0] * weight
    return law


def emitted_law(world: World, count: int, room: int = 99) -> Law:
    """The law of the first `count` tokens, block after block until so many are out."""

    @cache
    def block(emitted: tuple[int, ...]) -> Law:
        return block_law(world, emitted, room - len(emitted))

    law: Law = defaultdict(float)
    pending: Law = {(): 1.0}
    while pending:
        begun, weight = pending.popitem()
        for tokens, chance in block(begun).items():
            now = (*begun, *tokens)[:count]
            done = len(now) == count or now[-1] in world.ends
            place = law if done else pending
            place[now] = place.get(now, 0.0) + weight * chance
    return law


def true_law(world: World, count: int) -> Law:
    """The target's own law of the first `count` tokens."""
    law: Law = {(): 1.0}
    for _ in range(count):
        longer: Law = {}
        for begun, weight in law.items():
            if begun and begun[-1] in world.ends:
                longer[begun] = weight
                continue
            longer |= {
                (*begun, token): weight * chance
                for token, chance in enumerate(world.target_law(begun).tolist())
                if chance
            }
        law = longer
    return law


def difference(left: Law, right: Law) -> float:
    """Largest difference of a probability."""
    return max(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in left.keys() | right.keys())


def total_variation(left: Law, right: Law) -> float:
    """Half the summed differences."""
    return sum(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in left.keys() | right.keys()) / 2
