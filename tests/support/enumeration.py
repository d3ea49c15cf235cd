"""The distribution of what is emitted, by enumeration of every random outcome of the production functions.

A *world* is two small vocabularies with known distributions: the target's over its tokens after what was emitted, the
drafter's over its pieces after the pieces of what was emitted. Nothing here knows how verification works: it drafts
with `sample_rows`, translates with `Translate`, tests with a `Rule`, `decide` and `cut`, and adds up weights.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import ceil, isfinite
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from stages.contract.blocks import Draft, Proposal, SequenceState, Verdict
from stages.ngrams.cache import ENTRY_BYTES, NgramCache
from stages.ngrams.trie import Node, Trie
from stages.sampling.drawing import RowDistributions, sample_rows
from stages.sampling.random_source import UNIFORM_BITS, Outcomes, RandomSource, Remainder
from stages.translate import Translate
from stages.verification.chain_decisions import decide
from stages.verification.emitted_tokens import truncate
from stages.verification.rules import MODES, Rule

NEGLIGIBLE = 1e-14  # outcomes of less weight are left out; what they add up to stays below the tests' tolerance
GRID = 2.0**UNIFORM_BITS
NARROWEST = 2 / GRID  # `to_float32_grid` could move the middle of a narrower cell out of it
Distribution = dict[tuple[int, ...], float]
Result = TypeVar("Result")


class EnumeratingRandomSource:
    """Numbers that lead to given outcomes; the other possible outcomes are recorded for later runs.

    Args:
        choices: the outcome of each decision so far; after them the first possible outcome is taken.
        rounded: whether weights are those of production to the last bit. Then the number of a test is rounded to the
            grid; tokens and pieces are drawn from tensors, by any number.
    """

    def __init__(self, choices: tuple[int, ...] = (), *, rounded: bool = False) -> None:
        self.choices, self.weight, self._rounded = choices, 1.0, rounded
        self.untried: list[tuple[int, ...]] = []
        self._decided = 0

    def uniform(self, distribution: Outcomes) -> float:
        """The middle of the chosen outcome's cell."""
        if isinstance(distribution, Remainder):
            distribution = distribution.to_tensor()
        # Lists are faster than arrays for so few numbers.
        weights = distribution.tolist() if isinstance(distribution, Tensor) else list(map(float, distribution))
        if not all(map(isfinite, weights)):
            return 0.5  # no distribution: whatever is drawn, nothing may depend on it
        edges = [edge / sum(weights) for edge in accumulate(weights, initial=0.0)]
        if tested := self._rounded and not isinstance(distribution, Tensor):
            edges = [ceil(edge * GRID - 1e-6) / GRID for edge in edges]  # a cell's numbers on the grid: edge to edge
        widths = [after - before for before, after in pairwise(edges)]
        possible = [place for place, width in enumerate(widths) if self.weight * width > NEGLIGIBLE]
        assert self._rounded or min(widths[place] for place in possible) > NARROWEST, (
            f"this distribution has a cell too narrow to be hit: {distribution}"
        )
        if self._decided == len(self.choices):
            first, *others = possible
            self.untried += [(*self.choices, other) for other in others]
            self.choices += (first,)
        chosen = self.choices[self._decided]
        self._decided += 1
        self.weight *= widths[chosen]
        return edges[chosen] if tested else (edges[chosen] + edges[chosen + 1]) / 2


def every_outcome(run: Callable[[RandomSource], Result], *, rounded: bool = False) -> Iterator[tuple[float, Result]]:
    """Run once for every outcome of its decisions; yields the outcome's probability and the result."""
    pending: list[tuple[int, ...]] = [()]
    while pending:
        rng = EnumeratingRandomSource(pending.pop(), rounded=rounded)
        result = run(rng)
        pending += rng.untried
        yield rng.weight, result


def add_up(run: Callable[[RandomSource], tuple[int, ...]]) -> Distribution:
    """The distribution of what a run returns, over all outcomes of its random numbers."""
    distribution: Distribution = defaultdict(float)
    for weight, tokens in every_outcome(run):
        distribution[tokens] += weight
    return distribution


@cache
def random_distribution(seed: int, history: tuple[int, ...], size: int, support: int) -> Tensor:
    """A distribution in double precision that depends on the whole history; `support` of its entries are not 0."""
    generator = np.random.default_rng([seed, len(history), *history])
    distribution = np.zeros(size)
    chosen = generator.choice(size, support, replace=False)
    distribution[chosen] = 0.85 * generator.dirichlet(np.full(support, 0.6)) + 0.15 / support
    return torch.from_numpy(distribution)


# Vocabularies: per target token its pieces 0..3; None is a token without pieces.
# Piece 3 begins no token of NESTED: it is untranslatable. GAPS has gaps at (0, 1) and at (2,).
NESTED = ((0,), (1,), (0, 1), (0, 1, 2), (2,), None, (1, 3))
GAPS = ((0,), (1,), (0, 1, 2), (2, 3, 1), (2, 3), (0, 2), None)
VOCABULARIES = {"nested": NESTED, "gaps": GAPS}
EXACT = 1e-12


@dataclass(frozen=True)
class World:
    """Two vocabularies, their distributions, and how drafting goes."""

    spelling: tuple[tuple[int, ...] | None, ...]  # per target token its pieces, or None
    drafter_size: int  # number of pieces
    mode: str = "trie"  # as in the configuration
    max_draft: int = 2  # most pieces of a draft
    seed: int = 0  # of the distributions
    seeded: bool = True  # whether the cache holds all n-grams from the beginning; else it starts empty
    cache_entries: int = 100  # the cache's budget, in n-grams
    policy: str = "lru"  # of the cache
    adaptive: bool = False  # whether drafts stop early, depending on what was drafted
    # target_support, drafter_support: how many outcomes the distributions have; 0 means all
    target_support: int = 0
    drafter_support: int = 0
    ends: tuple[int, ...] = ()  # target tokens that end a sequence
    greedy: str = ""  # "", "target" (its distributions are at temperature 0) or "both"
    dtype: torch.dtype = torch.float64  # of the distributions. In float32, weights are those of production to the bit

    @property
    def rounded(self) -> bool:
        """Whether the distributions and all that is computed from them are rounded."""
        return self.dtype != torch.float64

    def target_distribution(self, emitted: tuple[int, ...]) -> Tensor:
        """The target's distribution over its tokens, after the emitted ones."""
        size = len(self.spelling)
        distribution = random_distribution(2 * self.seed, emitted, size, self.target_support or size)
        return (_peak(distribution) if self.greedy else distribution).to(self.dtype)

    @property
    def allowed(self) -> list[int]:
        """The pieces that may be drafted."""
        return sorted(MODES[self.mode].draftable_pieces(self.spelling))

    def drafter_distribution(self, pieces: tuple[int, ...]) -> Tensor:
        """The drafter's distribution over pieces; those that spell nothing are masked, as in `Decode`."""
        allowed = self.allowed
        support = self.drafter_support or len(allowed)
        distribution = torch.zeros(self.drafter_size, dtype=torch.float64)
        distribution[allowed] = random_distribution(2 * self.seed + 1, pieces, len(allowed), min(support, len(allowed)))
        return (_peak(distribution) if self.greedy == "both" else distribution).to(self.dtype)

    def draw(self, distribution: Tensor, rng: RandomSource) -> int:
        """The piece that is drafted from a distribution."""
        return int(sample_rows(distribution[None], [rng])[0])

    def drafts_more(self, pieces: tuple[int, ...]) -> bool:
        """Whether one more piece is drafted."""
        return not self.adaptive or np.random.default_rng([self.seed, *pieces]).random() < 0.6


def _peak(distribution: Tensor) -> Tensor:
    return torch.zeros_like(distribution).index_fill_(0, distribution.argmax(), 1.0)


def translation_of(world: World, emitted: Sequence[int]) -> tuple[Trie, Translate]:
    """The trie and the translation as they are after these tokens were emitted."""
    trie = Trie(len(world.spelling), world.drafter_size)
    trie.insert_all((pieces, token) for token, pieces in enumerate(world.spelling) if pieces and len(pieces) == 1)
    mode = MODES[world.mode]
    budget = world.cache_entries * ENTRY_BYTES if mode.ngrams else 0
    translate = Translate(trie, NgramCache(trie, budget, world.policy), world.spelling, mode.parse)
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
    return MODES[world.mode].make_rule(trie, world.spelling)


def _draft(world: World, row: SequenceState, remaining_tokens: int, rng: RandomSource) -> Draft:
    """Draft as `Decode` does, on known distributions."""
    pieces, distributions = (), []
    while len(pieces) < min(world.max_draft, remaining_tokens) and (not pieces or world.drafts_more(pieces)):
        distributions.append(world.drafter_distribution((*row.pieces, *pieces)))
        pieces += (world.draw(distributions[-1], rng),)
    draft_probs_KD = (
        torch.stack(distributions) if distributions else torch.zeros(0, world.drafter_size, dtype=world.dtype)
    )
    return Draft(row, pieces, draft_probs_KD, (), None, ())


def _verifications(
    world: World, rule: Rule, emitted: tuple[int, ...], proposals: Sequence[Proposal], remaining_tokens: int
) -> Iterator[tuple[int, float, tuple[int, ...]]]:
    """(number of the proposal, weight, tokens emitted) for every outcome of every proposal."""
    distributions = [
        torch.stack(
            [
                world.target_distribution((*emitted, *proposal.verifiable[:n]))
                for n in range(len(proposal.verifiable) + 1)
            ]
        )
        for proposal in proposals
    ]
    starts = np.cumsum([0, *(len(target_probs_MV) for target_probs_MV in distributions)]).tolist()
    levels = rule.levels(proposals, torch.cat(distributions), starts)
    targets = [
        RowDistributions(one_MV, one_MV.argmax(-1).tolist() if world.greedy else None) for one_MV in distributions
    ]
    for number, proposal in enumerate(proposals):
        for weight, decisions in every_outcome(
            lambda rng, i=number, p=proposal: decide(p, levels[i], targets[i], rule, rng), rounded=world.rounded
        ):
            kept = truncate(decisions, remaining_tokens, world.ends)
            yield number, weight, tuple(d.emitted for d in kept if d.emitted is not None)


def block_distribution(world: World, emitted: tuple[int, ...], remaining_tokens: int) -> Distribution:
    """The distribution of what one block emits."""
    trie, translate = translation_of(world, emitted)
    pieces = [piece for token in emitted for piece in world.spelling[token] or ()]
    row = SequenceState(0, "", "", "", list(emitted), 0, pieces, EnumeratingRandomSource(), remaining_tokens)
    drafts = list(every_outcome(lambda rng: _draft(world, row, remaining_tokens, rng), rounded=world.rounded))
    proposals = translate([draft for _, draft in drafts])
    distribution: Distribution = defaultdict(float)
    for number, weight, tokens in _verifications(world, rule_of(world, trie), emitted, proposals, remaining_tokens):
        distribution[tokens] += drafts[number][0] * weight
    return distribution


def emitted_distribution(world: World, count: int, remaining_tokens: int = 99) -> Distribution:
    """The distribution of the first `count` tokens, block after block until so many are out."""

    @cache
    def block(emitted: tuple[int, ...]) -> Distribution:
        return block_distribution(world, emitted, remaining_tokens - len(emitted))

    distribution: Distribution = defaultdict(float)
    pending: Distribution = {(): 1.0}
    while pending:
        begun, weight = pending.popitem()
        for tokens, chance in block(begun).items():
            now = (*begun, *tokens)[:count]
            done = len(now) == count or now[-1] in world.ends
            place = distribution if done else pending
            place[now] = place.get(now, 0.0) + weight * chance
    return distribution


def true_distribution(world: World, count: int) -> Distribution:
    """The target's own distribution of the first `count` tokens."""
    distribution: Distribution = {(): 1.0}
    for _ in range(count):
        longer: Distribution = {}
        for begun, weight in distribution.items():
            if begun and begun[-1] in world.ends:
                longer[begun] = weight
                continue
            longer |= {
                (*begun, token): weight * chance
                for token, chance in enumerate(world.target_distribution(begun).tolist())
                if chance
            }
        distribution = longer
    return distribution


def difference(left: Distribution, right: Distribution) -> float:
    """Largest difference of a probability."""
    return max(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in left.keys() | right.keys())


def total_variation(left: Distribution, right: Distribution) -> float:
    """Half the summed differences."""
    return sum(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in left.keys() | right.keys()) / 2
