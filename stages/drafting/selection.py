"""What of the model's drafts is verified: pieces that the head finds hopeless are dropped, alternatives are added.

A draft of the model is a chain: where its token is wrong, the block ends. At temperature 0 the target's token is then
often the drafter's second or third choice. These become further candidates of the place, and the chain a token tree:
no pass of the drafter more, and a few lines more of the target's pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from stages.contract.blocks import Candidate, Draft, Proposal, ProposedToken, TokenTree
from stages.drafting.costs import CostModel, count_paying
from stages.ngrams.trie import Trie
from store.events import DraftSource

Parse = Callable[[Trie, Sequence[int]], tuple[ProposedToken, ...]]  # divides pieces into tokens

MOST_CANDIDATES = 16  # of a row, those of the chain included
# Accepted tokens of a chain, and how often a first alternative is accepted, on open questions with the shipped drafter.
USUAL_ACCEPTED, USUAL_ALTERNATIVE = 0.8, 0.12


class _Offer(NamedTuple):
    """A token that may be verified: one of a chain, or an alternative to it."""

    row: int  # number of the row
    place: int  # number of the chain's token
    gain: float  # the estimated probability that it is emitted
    token: int = -1  # the alternative; -1 for the chain's own token
    # the drafter's probability of an alternative: the estimated probability that it is emitted if all tokens of the
    # chain before it are. Measured with the shipped drafter: .12, .05 and .03 for the second to fourth piece, which are
    # the target's in .12, .06 and .03 of the places.
    chance: float = 0.0

    @property
    def of_chain(self) -> bool:
        return self.token < 0


class Selection:
    """Chooses the tokens of all rows that give a block the highest expected tokens per cost.

    The drafter's passes are made already: what is chosen is what the target reads. It is exact as any tree, because
    what a greedy row drafts, and where that ends, depends on the past alone. Of a draft whose pieces were drawn all are
    verified: if it ended where an unlikely piece was drawn, the text would have another distribution.

    Args:
        parse: that of the translation.
        most: alternatives of a place, at most.
        drops: whether pieces are dropped.
    """

    def __init__(self, costs: CostModel, trie: Trie, parse: Parse, most: int = 0, *, drops: bool = True) -> None:
        self.most, self.drops, self._costs, self._trie, self._parse = most, drops, costs, trie, parse

    def wants_alternatives(self, rows: int) -> bool:
        """Return whether one alternative per row would raise the tokens per cost of a usual block of so many rows.

        If not, the drafter's other pieces need not be found.
        """
        tokens = rows * (2 + USUAL_ACCEPTED)
        before, after = (self._costs.verification_cost(tokens + more) for more in (0, rows))
        return self.most > 0 and (1 + USUAL_ACCEPTED + USUAL_ALTERNATIVE) * before > (1 + USUAL_ACCEPTED) * after

    def select(self, batch: Sequence[Proposal]) -> list[Proposal]:
        """Return the proposals of a block with what is verified of them.

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
        >>> costs = Costs(target=((1, 1.0), (3, 1.0), (4, 1.5)), drafter=((1, 0.1),))
        >>> (proposal,) = Selection(costs, trie, parse, most=3).select([Proposal(draft, parse(trie, draft.pieces))])
        >>> [(one.token, one.parent, one.chance) for one in proposal.draft.tree.candidates]
        [(0, -1, 0.6), (2, -1, 0.2)]
        """
        offered = [one for number, proposal in enumerate(batch) for one in self._offer(number, proposal)]
        if not offered:
            return list(batch)
        offered.sort(key=lambda one: (-one.gain, not one.of_chain, one.row, one.place))
        ready = [proposal for proposal in batch if not proposal.draft.row.sits_out]
        fixed = [proposal for proposal in ready if not proposal.draft.droppable]
        tokens = len(ready) + sum(len(proposal.verifiable) for proposal in fixed)
        emitted = len(ready) + sum(_expected_tokens(proposal.draft) - 1 for proposal in fixed)
        drafting = self._costs.drafts_cost([len(proposal.draft.pieces) for proposal in ready])
        gains = [one.gain for one in offered]
        paying = count_paying(emitted, gains, lambda more: self._costs.verification_cost(tokens + more) + drafting)
        chosen: list[list[_Offer]] = [[] for _ in batch]
        for one in offered[:paying]:
            chosen[one.row].append(one)
        return [self._apply(proposal, own) for proposal, own in zip(batch, chosen, strict=True)]

    def _offer(self, number: int, proposal: Proposal) -> list[_Offer]:
        """Return the tokens of a row that may be verified or not: of a chain each one only with those before it, and
        with the token whose alternative it is.
        """
        draft, count = proposal.draft, len(proposal.verifiable)
        chain = [_Offer(number, place, _survival_before(proposal, place + 1)) for place in range(count)]
        offered = list(chain) if draft.droppable else []
        if not draft.alternatives or count < len(proposal.tokens):  # which end in no token
            return offered
        alternatives = []
        for own, proposed in zip(chain, proposal.tokens, strict=True):
            for piece, chance in draft.alternatives[proposed.start]:
                node = self._trie.root.children.get(piece)
                if node is not None and node.token is not None and node.token != proposed.token:
                    gain = min(own.gain, _survival_before(proposal, own.place) * chance)
                    alternatives.append(_Offer(number, own.place, gain, node.token, chance))
        alternatives.sort(key=lambda one: -one.gain)
        return offered + alternatives[: MOST_CANDIDATES - len(chain)]

    def _apply(self, proposal: Proposal, chosen: Sequence[_Offer]) -> Proposal:
        """Return a proposal of which these tokens are verified."""
        draft, kept = proposal.draft, sum(one.of_chain for one in chosen)
        if draft.droppable and kept < len(proposal.verifiable):
            draft = draft.cut(proposal.tokens[kept].start)
            proposal = Proposal(draft, self._parse(self._trie, draft.pieces))
        alternatives = [one for one in chosen if not one.of_chain]
        return _make_tree(proposal, alternatives) if alternatives else proposal


def _expected_tokens(draft: Draft) -> float:
    return 1 + sum(draft.survival) if draft.expected_tokens is None else draft.expected_tokens


def _survival_before(proposal: Proposal, place: int) -> float:
    """Return the estimated probability that all tokens of a chain before a place are accepted."""
    survival = proposal.draft.survival
    return survival[proposal.tokens[place - 1].stop - 1] if place and survival else 1.0


def _make_tree(proposal: Proposal, chosen: Sequence[_Offer]) -> Proposal:
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
