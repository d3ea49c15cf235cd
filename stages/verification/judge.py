"""Judge: verdicts on drafts that another engine verified, from the tokens that it emitted.

The engine takes drafts as certain, as in mode `match`: it draws the target's tokens and follows a draft while they are
the drafted ones. So what it emitted shows what became of a draft. Its random numbers are not known.

Shapes: N lines of a pass, M lines of one row, K largest logits, V target tokens.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from typing_extensions import override

from stages.contract.blocks import (
    Candidate,
    Decision,
    Draft,
    Proposal,
    ProposedToken,
    SequenceState,
    TopLogits,
    Verdict,
)
from stages.contract.stage import Stage
from stages.learn.examples.top_distributions import TopDistributions
from stages.sampling.logprobs import RawValues
from stages.verification.emitted_tokens import emitted_tokens, truncate
from stages.verification.rules import Levels, Rule, option_members
from store.events import Origin, Outcome


class PassResult(NamedTuple):
    """What a pass of the engine gave a row."""

    emitted: tuple[int, ...]  # the tokens, one at least
    # the distributions at its lines: after the text, and after each drafted token (M); None if not known
    top: TopDistributions | None = None
    limit: int | None = None  # number of tokens after which the row ends, those of the pass included; None if not known


Supervise = Callable[[SequenceState, tuple[int, ...], TopDistributions], TopLogits | None]


class Judge(Stage[Proposal, Verdict]):
    """Proposals to verdicts, after another engine's pass. Appends to the rows, as `Verify`.

    A row without a result is one that the pass emitted nothing for: its verdict is empty. `context` has per target id
    the pieces that the drafter reads for it; the rule computes the levels of translated tokens. Without a drafter these
    are empty and None.

    >>> from stages.contract.blocks import TokenTree
    >>> from stages.sampling.random_source import SeededRandomSource
    >>> from store.events import DraftSource
    >>> row = SequenceState(0, "id", "dataset", "", [5, 6], 2, [], SeededRandomSource(0, 0), remaining_tokens=9)
    >>> chain = (7, -1), (8, 0), (9, 1)
    >>> options = [Candidate(token, before, before + 1, 0.5, DraftSource.MEMORY, 2, 1) for token, before in chain]
    >>> tree = TokenTree(tuple(options))
    >>> judge = Judge(ends=[0])
    >>> judge.results[row] = PassResult((7, 4))
    >>> (verdict,) = judge([Proposal(Draft.from_tree(row, tree, 2.0), ())])
    >>> [(str(one.outcome), one.emitted) for one in verdict.decisions]
    [('accepted', 7), ('rejected', 4), ('unjudged', None)]
    >>> row.tokens, verdict.judged, verdict.accepted
    ([5, 6, 7, 4], 2, 1)
    """

    def __init__(
        self,
        ends: Collection[int],
        context: Sequence[tuple[int, ...]] = (),
        rule: Rule | None = None,
        supervise: Supervise | None = None,
    ) -> None:
        self.results: dict[SequenceState, PassResult] = {}  # of the last pass, per row; emptied by a call
        self._ends, self._context, self._rule, self._supervise = frozenset(ends), context, rule, supervise

    @staticmethod
    def propose_nothing(row: SequenceState) -> Proposal:
        return Proposal(Draft(row, (), torch.zeros(0, 0), (), None, ()), ())

    @override
    def __call__(self, batch: Sequence[Proposal]) -> list[Verdict]:
        results, self.results = self.results, {}
        return [
            self._judge(proposal, results[proposal.draft.row])
            if proposal.draft.row in results
            else Verdict(proposal, (), (), 0, 0)
            for proposal in batch
        ]

    def _judge(self, proposal: Proposal, result: PassResult) -> Verdict:
        row, drafted = proposal.draft.row, proposal.verifiable
        # A draft that the engine cut has fewer lines.
        top = result.top if result.top and len(result.top) == len(drafted) + 1 else None
        pairs = zip(drafted, result.emitted, strict=False)
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        decided = self._decide(proposal, result.emitted, accepted, self._find_levels(proposal, top))
        ends = row.find_ends(self._ends)
        decisions = truncate(decided, result.limit or len(result.emitted) + 1, ends)
        emitted = emitted_tokens(decisions)
        soft_targets = None
        if top and self._supervise and row.collects_soft_targets:
            soft_targets = self._supervise(row, emitted, top)
        row.tokens.extend(emitted)
        for token in emitted if self._context else ():
            row.pieces.extend(self._context[token])
        row.remaining_tokens = max(0, row.remaining_tokens - len(emitted))
        row.block += 1
        # Without a limit, any other end is known when the row is gone.
        row.finish = "stop" if emitted[-1] in ends else "length" if len(emitted) == result.limit else ""
        outcomes = [one.outcome for one in decisions]
        taken = outcomes.count(Outcome.ACCEPTED)
        judged = taken + outcomes.count(Outcome.REJECTED)
        raw = _find_raw_values(decisions, top) if top and not row.private else {}
        return Verdict(proposal, decisions, emitted, judged, taken, soft_targets, raw=raw)

    def _decide(
        self, proposal: Proposal, emitted: tuple[int, ...], accepted: int, levels: Sequence[Levels]
    ) -> tuple[Decision, ...]:
        """Return the decisions of a chain: the accepted tokens, what was emitted instead of the next, or the bonus."""
        decisions: list[Decision] = []
        for index, (proposed, candidate) in enumerate(_list_proposed(proposal)):
            emits = index < len(emitted) and index <= accepted
            outcome = Outcome.ACCEPTED if index < accepted else Outcome.REJECTED if emits else Outcome.UNJUDGED
            origin = {Outcome.ACCEPTED: Origin.ACCEPTED, Outcome.REJECTED: Origin.RESIDUAL}.get(outcome)
            token = emitted[index] if emits else None
            passed = _count_passed(proposed, outcome, token)
            decisions.append(Decision(index, proposed, outcome, token, origin, *levels[index], None, passed, candidate))
        if accepted == len(decisions) < len(emitted):
            decisions.append(Decision(len(decisions), None, Outcome.UNDRAFTED, emitted[accepted], Origin.BONUS))
        return tuple(decisions)

    def _find_levels(self, proposal: Proposal, top: TopDistributions | None) -> list[Levels]:
        """Return the levels of each proposed token; empty ones where the probability is not known."""
        if top is None:
            return [((), ()) for _ in _list_proposed(proposal)]
        if proposal.draft.tree or self._rule is None:
            found = [top.find_probability(line, token) for line, token in enumerate(proposal.verifiable)]
            return [((), ()) if chance is None else ((1.0,), (chance,)) for chance in found]
        (levels,) = self._rule.levels([proposal], top.to_probs(len(self._context)), [0])
        return [
            of_token if one.token is None or top.find_probability(line, one.token) is not None else ((), ())
            for line, (one, of_token) in enumerate(zip(proposal.tokens, levels, strict=True))
        ]


def _find_raw_values(decisions: Sequence[Decision], top: TopDistributions) -> dict[int, RawValues]:
    """Return the raw values of the rejected token by its index: probabilities of the likeliest tokens, no entropy."""
    return {
        one.index: RawValues(
            None if one.token is None else top.find_probability(one.index, one.token),
            top.find_probability(one.index, one.emitted),
            None,
        )
        for one in decisions
        if one.emitted is not None and one.outcome is Outcome.REJECTED
    }


def _list_proposed(proposal: Proposal) -> list[tuple[ProposedToken | None, Candidate | None]]:
    if proposal.draft.tree:
        return [(None, candidate) for candidate in proposal.draft.tree.candidates]
    return [(proposed, None) for proposed in proposal.tokens]


def _count_passed(proposed: ProposedToken | None, outcome: Outcome, emitted: int | None) -> int:
    """Return how many levels a token passed: those whose drafted option comprises the token that was emitted."""
    if proposed is None or emitted is None:
        return int(outcome is Outcome.ACCEPTED)
    return sum(1 for _ in takewhile(lambda test: emitted in option_members(test), proposed.tests))
