"""Verify: accept or replace proposed tokens so that the target's distribution is kept (design, section 4).

The target's distribution is pushed down the trie: a node's probability is the sum over the tokens at and below it.
Level by level a drafted option is accepted with probability min(1, target / drafter). After a rejection another option
of the same node is drawn from the residual, then a token below it from the target's distribution, and the block ends.
Greedy decoding is the limit at temperature 0 of the same code.

Shapes: N positions of all rows, V target tokens.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, chain, pairwise
from operator import mul

import torch
from torch import Tensor
from typing_extensions import override

from stages.contract.blocks import Decision, Proposal, ProposedToken, SequenceState, TokenTree, Verdict
from stages.contract.snapshot import Saved, SnapshotReader, SnapshotWriter
from stages.contract.stage import Stage
from stages.examples.teacher import Supervision, Teacher
from stages.models.language_model import LanguageModel
from stages.rules import Levels, Rule
from stages.sampling.distributions import Sampling, acceptance_probability, sample, to_probs
from stages.sampling.logprobs import TokenLogprobs, compute_logprobs
from stages.sampling.random_source import RandomSource, to_float32_grid
from stages.vocabulary.text_stream import StopStrings
from store.errors import ModelError
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
    """Return the acceptance probability of each level."""
    return [acceptance_probability(drafter, target) for drafter, target in zip(*levels, strict=True)]


def _outcome_distribution(levels: Levels) -> Tensor:
    """Return the probabilities of: accepted, rejected at the last level, ..., rejected at the first."""
    edges = [1.0, *accumulate(_acceptances(levels), mul)]
    rejected = [above - below for above, below in pairwise(edges)]
    return torch.tensor([edges[-1], *reversed(rejected)], dtype=torch.float64)


def decide(
    proposal: Proposal, levels: Sequence[Levels], target_probs_MV: Tensor, rule: Rule, rng: RandomSource
) -> tuple[Decision, ...]:
    """Decide the outcome of every proposed token of one row, and draw the emitted tokens.

    Three pieces that are three target tokens; the drafter proposes token 0 with probability 0.8, the target gives it
    0.4. A uniform number below 0.4 / 0.8 accepts it, and the second number draws the bonus token.

    >>> from stages.contract.blocks import Draft
    >>> from stages.ngrams.trie import Trie
    >>> from stages.rules import TrieRule
    >>> from stages.translate import parse
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
    ...     decisions = decide(proposal, levels, target_probs_MV, rule, ScriptedNumbers(*numbers))
    ...     return [(str(decision.outcome), decision.emitted, str(decision.origin)) for decision in decisions]
    >>> show(0.3, 0.9)
    [('accepted', 0, 'accepted'), ('undrafted', 2, 'bonus')]

    A larger number rejects it. The token is drawn from the residual, max(0, target - drafter) = (0, 0.4, 0).

    >>> show(0.7, 0.9)
    [('rejected', 1, 'residual')]
    >>> rule.residual(proposal, index=0, level=0, target_probs_V=target_probs_MV[0])
    tensor([0.0000, 0.4000, 0.0000])

    Args:
        proposal: m translated tokens.
        levels: per proposed token its options' probabilities under the drafter and the target.
        target_probs_MV: the target's distributions at each proposed token and, if none is None, after the last.
        rule: computes the residual.
        rng: gives one number per tested token, and one for the token drawn at the end.
    """
    decisions: list[Decision] = []
    for index, (proposed, token_levels) in enumerate(zip(proposal.tokens, levels, strict=True)):
        uniform = to_float32_grid(rng.uniform(_outcome_distribution(token_levels)))
        passed = passed_levels(token_levels, uniform)
        if passed < len(token_levels[0]):
            weights_V = rule.residual(proposal, index, passed, target_probs_MV[index])
            emitted = sample(weights_V, rng)
            decisions.append(
                Decision(index, proposed, Outcome.REJECTED, emitted, Origin.RESIDUAL, *token_levels, uniform, passed)
            )
            return (*decisions, *_list_unjudged(proposal.tokens, levels, index + 1))
        decisions.append(
            Decision(index, proposed, Outcome.ACCEPTED, proposed.token, Origin.ACCEPTED, *token_levels, uniform, passed)
        )
    bonus = Decision(len(decisions), None, Outcome.UNDRAFTED, sample(target_probs_MV[-1], rng), Origin.BONUS)
    return (*decisions, bonus)


def place_distribution(chances: Sequence[float]) -> Tensor:
    """Return the probabilities of: the first candidate of a place, the second, ..., none of them."""
    return torch.tensor([*chances, max(0.0, 1.0 - sum(chances))], dtype=torch.float64)


def chosen_candidate(chances: Sequence[float], uniform: float) -> int | None:
    """Return which candidate of a place a uniform number takes; None for a token outside of them.

    Candidates lie end to end with the target's probabilities, so that each is taken with exactly its own.

    >>> [chosen_candidate((0.5, 0.25), uniform) for uniform in (0.4, 0.6, 0.8)]
    [0, 1, None]
    """
    edges = accumulate(chances)
    return next((number for number, edge in enumerate(edges) if uniform < edge), None)


def decide_tree(tree: TokenTree, target_probs_MV: Tensor, rng: RandomSource) -> tuple[Decision, ...]:
    """Decide the outcome of every candidate of a row's tree, and draw the emitted tokens.

    Candidates are not drawn from a distribution, so the rule is: draw the target's token, and follow the tree while the
    token is in it. One number decides which of a place's candidates it is; if it is none, the token is drawn from the
    target's distribution without them. In a chain this is the test of `decide` with drafter probabilities of 1.

    The text is followed by 1 or 2, and 1 by 3. The target gives 0.5 to 1, 0.25 to 2 and 0.25 to 0; after 1 it is sure
    of 3, after 3 of 0.

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
    ...     decisions = decide_tree(tree, target_probs_MV, ScriptedNumbers(*numbers))
    ...     return [(str(decision.outcome), decision.emitted) for decision in decisions]
    >>> show(0.4, 0.0, 0.0)  # 1, then 3, then what follows
    [('accepted', 1), ('accepted', 3), ('alternative', None), ('undrafted', 0)]
    >>> show(0.6, 0.0)  # 2, which has no candidates after it
    [('alternative', None), ('unjudged', None), ('accepted', 2), ('undrafted', 0)]
    >>> show(0.8, 0.0)  # neither
    [('rejected', 0), ('unjudged', None), ('alternative', None)]

    Args:
        tree: m candidates.
        target_probs_MV: the target's distributions after the text, and after each candidate.
        rng: gives one number per place with candidates, and one for the token drawn at the end.
    """
    outcomes: dict[int, Decision] = {}
    place: int | None = -1
    while place is not None and tree.children(place):
        decided, place = _decide_place(tree, place, target_probs_MV[place + 1], rng)
        outcomes |= decided
    for index, candidate in enumerate(tree.candidates):
        if index not in outcomes:
            chance = float(target_probs_MV[candidate.parent + 1][candidate.token])
            outcomes[index] = _judge_candidate(tree, index, chance, Outcome.UNJUDGED)
    decisions = [outcomes[index] for index in range(len(tree.candidates))]
    if place is not None:
        bonus = sample(target_probs_MV[place + 1], rng)
        decisions.append(Decision(len(decisions), None, Outcome.UNDRAFTED, bonus, Origin.BONUS))
    return tuple(decisions)


def _decide_place(
    tree: TokenTree, place: int, target_probs_V: Tensor, rng: RandomSource
) -> tuple[dict[int, Decision], int | None]:
    """Decide the candidates of one place. Returns the decisions, and the accepted candidate or None."""
    children = tree.children(place)
    tokens = [tree.candidates[child].token for child in children]
    chances: list[float] = target_probs_V[tokens].tolist()
    uniform = to_float32_grid(rng.uniform(place_distribution(chances)))
    chosen = chosen_candidate(chances, uniform)
    decided = {
        child: _judge_candidate(tree, child, chance, Outcome.ALTERNATIVE, uniform=uniform)
        for child, chance in zip(children, chances, strict=True)
    }
    if chosen is None:
        outcome, emitted, origin = Outcome.REJECTED, _draw_other(target_probs_V, tokens, rng), Origin.RESIDUAL
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


def _draw_other(target_probs_V: Tensor, tokens: Sequence[int], rng: RandomSource) -> int:
    """Draw a token that is none of these."""
    weights_V = target_probs_V.clone()
    weights_V[tokens] = 0
    # Some other token has mass, or this would not be drawn; only rounding can make the sum 0.
    return sample(weights_V if float(weights_V.sum()) > 0 else target_probs_V, rng)


def emitting_lines(decisions: Sequence[Decision]) -> list[int]:
    """Return, per emitted token, the line among its row's distributions that it was drawn from.

    A token of a chain has its own index; one of a tree has that of its parent, counted from the text.
    """
    lines, parent = [], -1
    for decision in decisions:
        if decision.emitted is None:
            continue
        if decision.candidate is None:
            lines.append(decision.index if parent < 0 else parent + 1)
            continue
        lines.append(decision.candidate.parent + 1)
        parent = decision.index
    return lines


def accepted_path(decisions: Sequence[Decision]) -> list[int]:
    """Return the indices of the accepted tokens or candidates."""
    return [decision.index for decision in decisions if decision.outcome is Outcome.ACCEPTED]


def _list_unjudged(tokens: Sequence[ProposedToken], levels: Sequence[Levels], start: int) -> list[Decision]:
    return [
        Decision(index, tokens[index], Outcome.UNJUDGED, None, None, *levels[index])
        for index in range(start, len(tokens))
    ]


def truncate(
    decisions: Sequence[Decision],
    remaining_tokens: int,
    eos_ids: Collection[int],
    stop_strings: StopStrings | None = None,
) -> tuple[Decision, ...]:
    """Return the decisions up to the one that emits an end of sequence, completes a stop string or emits the last
    remaining token; later ones are dropped.
    """
    emitted = 0
    for number, decision in enumerate(decisions, start=1):
        emitted += decision.emitted is not None
        if emitted == remaining_tokens or decision.emitted in eos_ids:
            decisions = decisions[:number]
            break
    stop = stop_strings.find_end(_emitted_tokens(decisions)) if stop_strings else None
    if stop is not None:
        emitting = [number for number, decision in enumerate(decisions, start=1) if decision.emitted is not None]
        decisions = decisions[: emitting[stop - 1] if stop else 0]
    return tuple(decisions)


def _emitted_tokens(decisions: Iterable[Decision]) -> tuple[int, ...]:
    return tuple(decision.emitted for decision in decisions if decision.emitted is not None)


def _parents(batch: Sequence[Proposal], fed: Sequence[Sequence[int]]) -> list[Sequence[int]] | None:
    """Return, per row, the index of the token that each fed token follows; None if no row has branches."""
    trees = [proposal.draft.tree for proposal in batch]
    if all(tree is None or tree.is_chain for tree in trees):
        return None
    parents: list[Sequence[int]] = []
    for tree, tokens in zip(trees, fed, strict=True):
        unread = len(tokens) - len(tree.candidates) if tree else len(tokens)
        line: list[int] = list(range(-1, unread - 1))
        parents.append(line + [unread + parent for parent in tree.parents] if tree else line)
    return parents


def _straighten(
    batch: Sequence[Proposal], outcomes: Sequence[Sequence[Decision]], logits_NV: Tensor, starts: Sequence[int]
) -> tuple[Tensor, Sequence[int]]:
    """Return the logits with those of a tree reduced to its emitted tokens, in order, and the start of each row."""
    if not any(proposal.draft.tree for proposal in batch):
        return logits_NV, starts
    lines = [
        [start + line for line in emitting_lines(decisions)] if proposal.draft.tree else list(range(start, stop))
        for proposal, decisions, (start, stop) in zip(batch, outcomes, pairwise(starts), strict=True)
    ]
    places_N = torch.tensor(list(chain(*lines)), device=logits_NV.device)
    return logits_NV[places_N], [0, *accumulate(map(len, lines))]


def _collect_logprobs(
    batch: Sequence[Proposal], outcomes: Sequence[Sequence[Decision]], logits_NV: Tensor, starts: Sequence[int]
) -> list[tuple[TokenLogprobs, ...]]:
    """Return per row the log probabilities of its emitted tokens; empty for rows that do not request them."""
    requested = [proposal.draft.row.logprobs for proposal in batch]
    wanted = [
        (i, starts[i] + line, token, most)
        for i, most in enumerate(requested)
        if most is not None
        for line, token in zip(emitting_lines(outcomes[i]), _emitted_tokens(outcomes[i]), strict=True)
    ]
    found: list[list[TokenLogprobs]] = [[] for _ in batch]
    if wanted:
        rows, places, tokens, most = zip(*wanted, strict=True)
        for i, one in zip(rows, compute_logprobs(logits_NV[list(places)], tokens, most), strict=True):
            found[i].append(one)
    return [tuple(row_logprobs) for row_logprobs in found]


def _describe_nonfinite(rows: Sequence[SequenceState], starts: Sequence[int], finite: Sequence[bool]) -> str:
    """Return the error message for the first row whose target logits are NaN or infinite."""
    line = finite.index(False)
    row = rows[max(i for i in range(len(rows)) if starts[i] <= line)]
    return (
        f"the target's logits must be finite, got NaN or infinity for prompt {row.prompt_id} after {len(row.tokens)} "
        "tokens; check the target's weights, or load it in a wider type (--set dtype=float32)"
    )


class Verify(Stage[Proposal, Verdict]):
    """Proposals to verdicts, by one forward pass of the target for the whole batch. Appends to the rows.

    Args:
        model: the target.
        rule: computes the levels and residuals of proposals.
        sampling: the sampling transform; the transform of a row takes precedence.
        context: per target id the pieces that the drafter reads for it.
        tokenizer_size: number of ids of the tokenizer; further outputs of the model are never emitted.
        eos_ids: the ids that end a sequence.
        teacher: makes soft targets from the target's distributions; `teach_nothing` without a learner.
        probs_dtype: precision of the distributions.
    """

    def __init__(
        self,
        model: LanguageModel,
        rule: Rule,
        sampling: Sampling,
        context: Sequence[tuple[int, ...]],
        tokenizer_size: int,
        eos_ids: Collection[int],
        teacher: Teacher,
        probs_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self._rule, self._sampling, self._context, self._eos_ids = rule, sampling, context, frozenset(eos_ids)
        self._forbidden_V = torch.arange(model.vocabulary_size, device=model.device) >= tokenizer_size
        self._teacher, self._probs_dtype = teacher, probs_dtype

    @override
    def admit(self, row: SequenceState) -> None:
        self.model.admit(row, row.tokens)

    @override
    def release(self, row: SequenceState) -> None:
        self.model.release(row)

    @override
    def save(self, writer: SnapshotWriter) -> Saved:
        return self.model.save_rows(writer)

    @override
    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        self.model.restore_rows(saved, reader)

    @override
    def __call__(self, batch: Sequence[Proposal]) -> list[Verdict]:
        """Test each proposal and append what is emitted to its row.

        Raises:
            ModelError: the target's logits are not finite.
        """
        if not batch:
            return []
        read = [self.model.length(proposal.draft.row) for proposal in batch]
        logits_NV, starts = self._target_logits(batch)
        samplings = [one.draft.row.sampling or self._sampling for one in batch for _ in range(len(one.verifiable) + 1)]
        target_probs_NV = to_probs(logits_NV, samplings, self._probs_dtype)
        levels = self._rule.levels(batch, target_probs_NV, starts)
        outcomes = [
            self._decide_row(proposal, levels[i], target_probs_NV[starts[i] : starts[i + 1]])
            for i, proposal in enumerate(batch)
        ]
        supervision = self._supervise(batch, outcomes, logits_NV, starts)
        logprobs = _collect_logprobs(batch, outcomes, logits_NV, starts)
        return [self._extend_row(*parts) for parts in zip(batch, read, outcomes, supervision, logprobs, strict=True)]

    def _supervise(
        self,
        batch: Sequence[Proposal],
        outcomes: Sequence[tuple[Decision, ...]],
        logits_NV: Tensor,
        starts: Sequence[int],
    ) -> list[Supervision]:
        """Return the supervision of each row; empty for rows that collect no examples."""
        numbers = [number for number, proposal in enumerate(batch) if proposal.draft.row.collects_examples]
        logits_NV, starts = _straighten(batch, outcomes, logits_NV, starts)
        if len(numbers) == len(batch):
            return self._teacher(batch, outcomes, logits_NV, starts)
        chosen = [batch[number] for number in numbers], [outcomes[number] for number in numbers]
        found = self._teacher(*chosen, logits_NV, [starts[number] for number in numbers]) if numbers else []
        supervision = [Supervision()] * len(batch)
        for number, one in zip(numbers, found, strict=True):
            supervision[number] = one
        return supervision

    def _decide_row(
        self, proposal: Proposal, levels: Sequence[Levels], target_probs_MV: Tensor
    ) -> tuple[Decision, ...]:
        """Decide one row's proposed tokens, up to the end of the sequence."""
        row, tree = proposal.draft.row, proposal.draft.tree
        if tree:
            decisions = decide_tree(tree, target_probs_MV, row.rng)
        else:
            decisions = decide(proposal, levels, target_probs_MV, self._rule, row.rng)
        return truncate(decisions, row.remaining_tokens, self._eos_ids, row.stop_strings)

    def _target_logits(self, batch: Sequence[Proposal]) -> tuple[Tensor, list[int]]:
        """Return the logits at every verifiable token and after the last, rows joined, and the start of each row."""
        rows = [proposal.draft.row for proposal in batch]
        counts = [len(proposal.verifiable) + 1 for proposal in batch]
        fed = [
            [*row.tokens[self.model.length(row) :], *proposal.verifiable]
            for row, proposal in zip(rows, batch, strict=True)
        ]
        logits_NV, _ = self.model.forward(rows, fed, counts, parents=_parents(batch, fed))
        logits_NV, starts = logits_NV.masked_fill(self._forbidden_V, -torch.inf), [0, *accumulate(counts)]
        # A NaN anywhere in a line becomes its maximum; -inf is a mask, unless the whole line is.
        finite_N = logits_NV.amax(-1).isfinite()
        if not bool(finite_N.all()):
            raise ModelError(_describe_nonfinite(rows, starts, finite_N.tolist()))
        return logits_NV, starts

    def _extend_row(
        self,
        proposal: Proposal,
        read: int,
        decisions: tuple[Decision, ...],
        supervision: Supervision,
        logprobs: tuple[TokenLogprobs, ...],
    ) -> Verdict:
        row, emitted = proposal.draft.row, _emitted_tokens(decisions)
        if proposal.draft.tree:
            unread = len(row.tokens) - read
            path = [*range(unread), *(unread + index for index in accepted_path(decisions))]
            self.model.keep_path(row, read, path)
        row.tokens.extend(emitted)
        for token in emitted:
            row.pieces.extend(self._context[token])
        row.remaining_tokens -= len(emitted)
        row.block += 1
        stopped = emitted[-1] in self._eos_ids or (row.stop_strings is not None and row.stop_strings.complete)
        row.finish = "stop" if stopped else "" if row.remaining_tokens else "length"
        self.model.roll_back(row, len(row.tokens) - 1)
        accepted = sum(decision.outcome is Outcome.ACCEPTED for decision in decisions)
        rejected = sum(decision.outcome is Outcome.REJECTED for decision in decisions)
        return Verdict(proposal, decisions, emitted, accepted + rejected, accepted, *supervision, logprobs)
