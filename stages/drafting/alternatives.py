"""Alternatives: the drafter's next likeliest pieces next to those of a greedy draft, where verifying costs little.

A draft of the model is a chain: where its token is wrong, the block ends. At temperature 0 the target's token is then
often the drafter's second or third choice. These become further candidates of the place, and the chain a token tree:
no pass of the drafter more, and a few lines more of the target's pass.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from stages.contract.blocks import Candidate, Draft, Proposal, TokenTree
from stages.drafting.costs import CostModel
from stages.ngrams.trie import Trie
from store.events import DraftSource

MOST_CANDIDATES = 16  # of a row, those of the chain included
# Accepted tokens of a chain, and how often a first alternative is accepted, on open questions with the shipped drafter.
USUAL_ACCEPTED, USUAL_ALTERNATIVE = 0.8, 0.12


class Alternative(NamedTuple):
    """A token that could follow in the place of a token of a chain."""

    row: int  # number of the row
    place: int  # number of the chain's token
    token: int  # the target token
    # the drafter's probability of its piece: the estimated probability that it is emitted if all tokens of the
    # chain before it are. Measured with the shipped drafter: .12, .05 and .03 for the second to fourth piece,
    # which are the target's in .12, .06 and .03 of the places.
    chance: float
    gain: float  # expected accepted candidates: the chance, times that of the chain before it


class AlternativeGrowth:
    """Makes trees of greedy drafts. Exact as any tree: what is drafted depends on the past alone."""

    def __init__(self, costs: CostModel, most: int) -> None:
        self.most, self._costs = most, costs

    def pays(self, rows: int) -> bool:
        """Return whether one alternative per row would raise the tokens per cost of a usual block of so many rows.

        If not, the drafter's other pieces need not be found.
        """
        tokens = rows * (2 + USUAL_ACCEPTED)
        before, after = (self._costs.verification_cost(tokens + more) for more in (0, rows))
        return (1 + USUAL_ACCEPTED + USUAL_ALTERNATIVE) * before > (1 + USUAL_ACCEPTED) * after

    def add(self, batch: Sequence[Proposal], trie: Trie) -> list[Proposal]:
        """Return the proposals, those with alternatives as trees.

        Chosen are the first so many alternatives of all rows, by their gains, that give the highest expected tokens per
        cost of the block.

        A pass costs the same up to three tokens. The drafter proposes piece 0, and 2 or 1 in its place:

        >>> import torch
        >>> from stages.contract.blocks import SequenceState
        >>> from stages.drafting.costs import Costs
        >>> from stages.sampling.random_source import SeededRandomSource
        >>> from stages.verification.parsing import parse
        >>> trie = Trie(target_size=3, drafter_size=3)
        >>> trie.insert_all([((piece,), piece) for piece in range(3)])
        >>> row = SequenceState(0, "id", "dataset", "", [1], 1, [1], SeededRandomSource(0, 0), remaining_tokens=9)
        >>> draft = Draft(row, (0,), torch.eye(3)[:1], (0.0,), None, (0.6,), alternatives=(((2, 0.2), (1, 0.1)),))
        >>> growth = AlternativeGrowth(Costs(target=((1, 1.0), (3, 1.0), (4, 1.5)), drafter=((1, 0.1),)), most=3)
        >>> (proposal,) = growth.add([Proposal(draft, parse(trie, draft.pieces))], trie)
        >>> [(one.token, one.parent, one.chance) for one in proposal.draft.tree.candidates]
        [(0, -1, 0.6), (2, -1, 0.2)]

        Args:
            batch: all proposals of a block; only those whose drafts have `alternatives` grow.
        """
        found = [one for number, proposal in enumerate(batch) for one in _find_alternatives(number, proposal, trie)]
        if not found:
            return list(batch)
        found.sort(key=lambda one: (-one.gain, one.row, one.place, one.token))
        chosen = found[: self._count_paying(batch, found)]
        numbers = {one.row for one in chosen}
        return [
            _make_tree(proposal, [one for one in chosen if one.row == number]) if number in numbers else proposal
            for number, proposal in enumerate(batch)
        ]

    def _count_paying(self, batch: Sequence[Proposal], found: Sequence[Alternative]) -> int:
        """Return how many of the alternatives, which are sorted, give the highest expected tokens per cost."""
        ready = [proposal for proposal in batch if not proposal.draft.row.reading]
        emitted = sum(_expected_tokens(proposal.draft) for proposal in ready)
        tokens = sum(1 + len(proposal.verifiable) for proposal in ready)
        drafting = self._costs.drafts_cost([len(proposal.draft.pieces) for proposal in ready])
        best, paying = emitted / (self._costs.verification_cost(tokens) + drafting), 0
        for count, one in enumerate(found, start=1):
            emitted += one.gain
            rate = emitted / (self._costs.verification_cost(tokens + count) + drafting)
            if rate > best:
                best, paying = rate, count
        return paying


def _expected_tokens(draft: Draft) -> float:
    return 1 + sum(draft.survival) if draft.expected_tokens is None else draft.expected_tokens


def _survival_before(proposal: Proposal, place: int) -> float:
    """Return the estimated probability that all tokens of a chain before a place are accepted."""
    survival = proposal.draft.survival
    return survival[proposal.tokens[place - 1].stop - 1] if place and survival else 1.0


def _find_alternatives(number: int, proposal: Proposal, trie: Trie) -> list[Alternative]:
    """Return the alternatives of the chain of a row by descending gain; none for a chain that ends in no token."""
    draft, tokens = proposal.draft, proposal.tokens
    if not draft.alternatives or any(proposed.token is None for proposed in tokens):
        return []
    found = []
    for place, proposed in enumerate(tokens):
        before = _survival_before(proposal, place)
        for piece, chance in draft.alternatives[proposed.start]:
            node = trie.root.children.get(piece)
            if node is not None and node.token is not None and node.token != proposed.token:
                found.append(Alternative(number, place, node.token, chance, before * chance))
    return sorted(found, key=lambda one: -one.gain)[: MOST_CANDIDATES - len(tokens)]


def _make_tree(proposal: Proposal, chosen: Sequence[Alternative]) -> Proposal:
    """Return a proposal as a tree. Its first candidates are the chain's tokens, so that both have the same numbers."""
    candidates = []
    for place, proposed in enumerate(proposal.tokens):
        assert proposed.token is not None  # else there were no alternatives
        before, after = (_survival_before(proposal, one) for one in (place, place + 1))
        chance = after / before if before else 0.0
        candidates.append(Candidate(proposed.token, place - 1, place, chance, DraftSource.MODEL, 0, 0))
    for place in range(len(proposal.tokens) - 1, -1, -1):  # depth first: those of the last place come first
        own = (one for one in chosen if one.place == place)
        candidates += [Candidate(one.token, place - 1, place, one.chance, DraftSource.MODEL, 0, 0) for one in own]
    expected = _expected_tokens(proposal.draft) + sum(one.gain for one in chosen)
    return replace(proposal, draft=replace(proposal.draft, tree=TokenTree(tuple(candidates)), expected_tokens=expected))
