"""Decide trees: follow a row's candidates with the target's own tokens.

Shapes: M distributions of a row, V target tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from stages.contract.blocks import Decision, ProposedToken, TokenTree
from stages.sampling.drawing import RowDistributions, sample_other
from stages.sampling.random_source import RandomSource
from stages.verification.chain_decisions import draw_bonus
from stages.verification.rules import Levels
from store.events import Origin, Outcome


def place_distribution(chances: Sequence[float]) -> list[float]:
    """Return the probabilities of: the first candidate of a place, the second, ..., none of them."""
    return [*chances, max(0.0, 1.0 - sum(chances))]


def chosen_candidate(chances: Sequence[float], uniform: float) -> int | None:
    """Return which candidate of a place a uniform number takes; None for a token outside of them.

    Candidates lie end to end with the target's probabilities, so that each is taken with exactly its own.

    >>> [chosen_candidate((0.5, 0.25), uniform) for uniform in (0.4, 0.6, 0.8)]
    [0, 1, None]
    """
    edges = accumulate(chances)
    return next((number for number, edge in enumerate(edges) if uniform < edge), None)


def decide_tree(tree: TokenTree, target: RowDistributions, rng: RandomSource) -> tuple[Decision, ...]:
    """Decide the outcome of every candidate of a row's tree, and draw the emitted tokens.

    Candidates are not drawn from a distribution, so the rule is: draw the target's token, and follow the tree while the
    token is in it. One number decides which of a place's candidates it is; if it is none, the token is drawn from the
    target's distribution without them. In a chain this is the test of `decide` with drafter probabilities of 1.

    The text is followed by 1 or 2, and 1 by 3. The target gives 0.5 to 1, 0.25 to 2 and 0.25 to 0; after 1 it is sure
    of 3, after 3 of 0.

    >>> import torch
    >>> from stages.contract.blocks import Candidate
    >>> from store.events import DraftSource
    >>> class ScriptedNumbers(RandomSource):
    ...     def __init__(self, *numbers):
    ...         self.numbers = iter(numbers)
    ...     def uniform(self, distribution):
    ...         return next(self.numbers)
    >>> def candidate(token, parent, depth):
    ...     return Candidate(token, parent, depth, 0.5, DraftSource.MEMORY, 3, 1)
    >>> tree = TokenTree((candidate(1, -1, 0), candidate(3, 0, 1), candidate(2, -1, 0)))
    >>> target_probs_MV = torch.tensor([[0.25, 0.5, 0.25, 0], [0, 0, 0, 1.0], [1.0, 0, 0, 0], [1.0, 0, 0, 0]])
    >>> def show(*numbers):
    ...     decisions = decide_tree(tree, RowDistributions(target_probs_MV), ScriptedNumbers(*numbers))
    ...     return [(str(decision.outcome), decision.emitted) for decision in decisions]
    >>> show(0.4, 0.0, 0.0)  # 1, then 3, then what follows
    [('accepted', 1), ('accepted', 3), ('alternative', None), ('undrafted', 0)]
    >>> show(0.6, 0.0)  # 2, which has no candidates after it
    [('alternative', None), ('unjudged', None), ('accepted', 2), ('undrafted', 0)]
    >>> show(0.8, 0.0)  # neither
    [('rejected', 0), ('unjudged', None), ('alternative', None)]

    Args:
        target: its distributions after the text, and after each candidate.
        rng: gives one number per place with candidates, and one for the token drawn at the end.
    """
    candidates = tree.candidates
    chances = target.find_chances([one.parent + 1 for one in candidates], [one.token for one in candidates])
    outcomes: dict[int, Decision] = {}
    place: int | None = -1
    while place is not None and tree.children(place):
        decided, place = _decide_place(tree, place, chances, target, rng)
        outcomes |= decided
    for index in range(len(candidates)):
        if index not in outcomes:
            outcomes[index] = _judge_candidate(tree, index, chances[index], Outcome.UNJUDGED)
    decisions = [outcomes[index] for index in range(len(candidates))]
    if place is not None:
        decisions.append(draw_bonus(len(decisions), place + 1, target, rng))
    return tuple(decisions)


def name_pieces(
    decisions: tuple[Decision, ...], tokens: Sequence[ProposedToken], levels: Sequence[Levels]
) -> tuple[Decision, ...]:
    """Return the decisions of a tree of the model's draft with the pieces that its first candidates were drafted as.
    The m tokens of the draft are the tree's first m candidates; none for a tree of copies. `levels` has per token what
    its test would have been without alternatives.
    """
    if not tokens:
        return decisions
    return tuple(
        replace(one, proposed=tokens[one.index], piece_levels=levels[one.index])
        if one.candidate and one.index < len(tokens)
        else one
        for one in decisions
    )


def _decide_place(
    tree: TokenTree, place: int, all_chances: Sequence[float], target: RowDistributions, rng: RandomSource
) -> tuple[dict[int, Decision], int | None]:
    """Decide the candidates of one place. Returns the decisions, and the accepted candidate or None."""
    children = tree.children(place)
    tokens = [tree.candidates[child].token for child in children]
    chances = [all_chances[child] for child in children]
    uniform = target.number(place + 1, place_distribution(chances), rng)
    chosen = chosen_candidate(chances, uniform)
    decided = {
        child: _judge_candidate(tree, child, chance, Outcome.ALTERNATIVE, uniform=uniform)
        for child, chance in zip(children, chances, strict=True)
    }
    if chosen is None:
        outcome, origin = Outcome.REJECTED, Origin.RESIDUAL
        emitted = sample_other(target.probs_MV[place + 1], tokens, rng) if any(chances) else target.draw(place + 1, rng)
    else:
        outcome, emitted, origin = Outcome.ACCEPTED, tokens[chosen], Origin.ACCEPTED
    number = chosen or 0  # the first candidate carries the rejection
    decided[children[number]] = _judge_candidate(
        tree, children[number], chances[number], outcome, emitted, origin, uniform
    )
    return decided, None if chosen is None else children[chosen]


def _judge_candidate(
    tree: TokenTree,
    index: int,
    chance: float,
    outcome: Outcome,
    emitted: int | None = None,
    origin: Origin | None = None,
    uniform: float | None = None,
) -> Decision:
    passed, candidate = int(outcome is Outcome.ACCEPTED), tree.candidates[index]
    return Decision(index, None, outcome, emitted, origin, (1.0,), (chance,), uniform, passed, candidate)
