"""Decide chains: accept or replace a row's proposed tokens so that the target's distribution is kept.

The target's distribution is propagated through the trie: a node's probability is the sum over the tokens at and below
it. Level by level a drafted option is accepted with probability min(1, target / drafter). After a rejection another
option of the same node is drawn from the residual, then a token below it from the target's distribution, and the block
ends. Greedy decoding is the limit at temperature 0 of the same code.

Shapes: M distributions of a row, V target tokens.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

from stages.contract.blocks import Decision, Proposal, ProposedToken
from stages.sampling.distributions import acceptance_probability
from stages.sampling.drawing import RowDistributions, sample
from stages.sampling.random_source import RandomSource, to_float32_grid
from stages.verification.rules import Levels, Rule
from store.events import Origin, Outcome


def passed_levels(levels: Levels, uniform: float) -> int:
    """Count the levels that one uniform number passes: level l iff it is below the product of the first l acceptances.

    Two levels with acceptances 0.4 / 0.8 = 0.5 and 0.25 / 0.5 = 0.5, so the products are 0.5 and 0.25:

    >>> levels = (0.8, 0.5), (0.4, 0.25)  # of the drafter, of the target
    >>> [passed_levels(levels, uniform) for uniform in (0.2, 0.3, 0.6)]
    [2, 1, 0]
    """
    return sum(1 for acceptance in accumulate(_acceptances(levels), mul) if uniform < acceptance)


def _acceptances(levels: Levels) -> list[float]:
    return [acceptance_probability(drafter, target) for drafter, target in zip(*levels, strict=True)]


def _outcome_distribution(levels: Levels) -> list[float]:
    """Return the probabilities of: accepted, rejected at the last level, ..., rejected at the first."""
    edges = [1.0, *accumulate(_acceptances(levels), mul)]
    rejected = [above - below for above, below in pairwise(edges)]
    return [edges[-1], *reversed(rejected)]


def decide(
    proposal: Proposal, levels: Sequence[Levels], target: RowDistributions, rule: Rule, rng: RandomSource
) -> tuple[Decision, ...]:
    """Decide the outcome of every proposed token of one row, and draw the emitted tokens.

    Three pieces that are three target tokens; the drafter proposes token 0 with probability 0.8, the target gives it
    0.4. A uniform number below 0.4 / 0.8 accepts it, and the second number draws the bonus token.

    >>> import torch
    >>> from stages.contract.blocks import Draft
    >>> from stages.ngrams.trie import Trie
    >>> from stages.verification.rules import TrieRule
    >>> from stages.verification.parsing import parse
    >>> class ScriptedNumbers(RandomSource):
    ...     def __init__(self, *numbers):
    ...         self.numbers = iter(numbers)
    ...     def uniform(self, distribution):
    ...         return next(self.numbers)
    >>> trie = Trie(target_size=3, drafter_size=3)
    >>> trie.insert_all([((0,), 0), ((1,), 1), ((2,), 2)])
    >>> rule = TrieRule(trie)
    >>> draft = Draft(None, (0,), torch.tensor([[0.8, 0.1, 0.1]]), (), None, ())  # K = 1, D = 3
    >>> proposal = Proposal(draft, parse(trie, draft.pieces))
    >>> target_probs_MV = torch.tensor([[0.4, 0.5, 0.1], [0.0, 0.0, 1.0]])  # M = 2: at token 0 and after it
    >>> (levels,) = rule.levels([proposal], target_probs_MV, starts=[0])
    >>> def show(*numbers):
    ...     decisions = decide(proposal, levels, RowDistributions(target_probs_MV), rule, ScriptedNumbers(*numbers))
    ...     return [(str(decision.outcome), decision.emitted, str(decision.origin)) for decision in decisions]
    >>> show(0.3, 0.9)
    [('accepted', 0, 'accepted'), ('undrafted', 2, 'bonus')]

    A larger number rejects it. The token is drawn from the residual, max(0, target - drafter) = (0, 0.4, 0).

    >>> show(0.7, 0.9)
    [('rejected', 1, 'residual')]
    >>> rule.residual(proposal, index=0, level=0, target_probs_V=target_probs_MV[0])
    tensor([0.0000, 0.4000, 0.0000])

    Args:
        levels: per proposed token its options' probabilities under the drafter and the target.
        target: its distributions at each proposed token and, if none is None, after the last.
        rng: gives one number per tested token, and one for the token drawn at the end.
    """
    decisions: list[Decision] = []
    for index, (proposed, token_levels) in enumerate(zip(proposal.tokens, levels, strict=True)):
        uniform = target.number(index, _outcome_distribution(token_levels), rng)
        passed = passed_levels(token_levels, uniform)
        if passed < len(token_levels[0]):
            emitted = _draw_rest(proposal, index, passed, target, rule, rng)
            decisions.append(
                Decision(index, proposed, Outcome.REJECTED, emitted, Origin.RESIDUAL, *token_levels, uniform, passed)
            )
            return (*decisions, *_list_unjudged(proposal.tokens, levels, index + 1))
        decisions.append(
            Decision(index, proposed, Outcome.ACCEPTED, proposed.token, Origin.ACCEPTED, *token_levels, uniform, passed)
        )
    return (*decisions, draw_bonus(len(decisions), len(decisions), target, rng))


def draw_bonus(index: int, place: int, target: RowDistributions, rng: RandomSource) -> Decision:
    """Draw the token after the last accepted one."""
    token = target.draw(place, rng)
    uniform = None if target.numbers is None else to_float32_grid(target.numbers[place])
    return Decision(index, None, Outcome.UNDRAFTED, token, Origin.BONUS, uniform=uniform)


def _draw_rest(
    proposal: Proposal, index: int, level: int, target: RowDistributions, rule: Rule, rng: RandomSource
) -> int:
    """Draw the token after a rejection at a level: from the residual. Of a certain token, it alone remains."""
    if target.certain is not None:
        return target.draw(index, rng)
    return sample(rule.residual(proposal, index, level, target.probs_MV[index]), rng)


def _list_unjudged(tokens: Sequence[ProposedToken], levels: Sequence[Levels], start: int) -> list[Decision]:
    return [
        Decision(index, tokens[index], Outcome.UNJUDGED, None, None, *levels[index])
        for index in range(start, len(tokens))
    ]
