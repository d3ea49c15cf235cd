"""Verify: keep the target's law whatever the drafter proposed (design, section 4).

The target's law is pushed down the trie: a node's probability is the sum over the tokens at and below it. Level by
level a drafted option is accepted with probability min(1, target / drafter); after a rejection another option of the
same node is drawn from what the target has more of, then a token below it from the target's law, and the block ends.
Greedy is the limit at temperature 0 of the same lines.

Shapes: N positions of all rows, V target tokens.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise
from operator import mul

import torch
from torch import Tensor

from stages.acceptance import Levels, Rule
from stages.blocks import Decision, Proposal, ProposedToken, Row, Verdict
from stages.distributions import Sampling, laws_of, sample
from stages.draws import Draws, to_float32_grid
from stages.ending import Ending
from stages.language_model import LanguageModel
from stages.logprobs import TokenLogprobs, logprobs_of
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from stages.teach import Teacher, Told
from store.events import Origin, Outcome


def passed_levels(levels: Levels, uniform: float) -> int:
    """How many levels one uniform number passes: level l iff it is below the product of the first l acceptances."""
    ratios = (min(1.0, target / drafter) for drafter, target in zip(*levels, strict=True))
    return sum(1 for acceptance in accumulate(ratios, mul) if uniform < acceptance)


def _outcome_law(levels: Levels) -> Tensor:
    """Probabilities of: accepted, rejected at the last level, ..., rejected at the first."""
    ratios = [min(1.0, target / drafter) for drafter, target in zip(*levels, strict=True)]
    edges = [1.0, *accumulate(ratios, mul)]
    rejected = [above - below for above, below in pairwise(edges)]
    return torch.tensor([edges[-1], *reversed(rejected)], dtype=torch.float64)


def decide(
    proposal: Proposal, levels: Sequence[Levels], laws_MV: Tensor, rule: Rule, draws: Draws
) -> tuple[Decision, ...]:
    """The outcome of every proposed token and what is emitted, for one row.

    Args:
        proposal: m translated tokens.
        levels: per proposed token its options' probabilities under the drafter and the target.
        laws_MV: the target's laws at each proposed token and, if all have a name, behind the last.
        rule: gives the residual.
        draws: one number per tested token, one for the token drawn at the end.
    """
    decisions: list[Decision] = []
    for index, (proposed, token_levels) in enumerate(zip(proposal.tokens, levels, strict=True)):
        uniform = to_float32_grid(draws.uniform(_outcome_law(token_levels)))
        passed = passed_levels(token_levels, uniform)
        if passed < len(token_levels[0]):
            weights_V = rule.residual(proposal, index, passed, laws_MV[index])
            emitted = sample(weights_V, draws)
            decisions.append(
                Decision(index, proposed, Outcome.REJECTED, emitted, Origin.RESIDUAL, *token_levels, uniform, passed)
            )
            return (*decisions, *_unjudged(proposal.tokens, levels, index + 1))
        decisions.append(
            Decision(index, proposed, Outcome.ACCEPTED, proposed.token, Origin.ACCEPTED, *token_levels, uniform, passed)
        )
    bonus = Decision(len(decisions), None, Outcome.UNDRAFTED, sample(laws_MV[-1], draws), Origin.BONUS)
    return (*decisions, bonus)


def _unjudged(tokens: Sequence[ProposedToken], levels: Sequence[Levels], start: int) -> list[Decision]:
    return [
        Decision(index, tokens[index], Outcome.UNJUDGED, None, None, *levels[index])
        for index in range(start, len(tokens))
    ]


def cut(
    decisions: Sequence[Decision], room: int, ends: Collection[int], ending: Ending | None = None
) -> tuple[Decision, ...]:
    """Decisions up to the one that emits an end of sequence, completes a stop string or fills the room; later ones
    never happened."""
    emitted = 0
    for number, decision in enumerate(decisions, start=1):
        emitted += decision.emitted is not None
        if emitted == room or decision.emitted in ends:
            decisions = decisions[:number]
            break
    stop = ending.after(_emitted(decisions)) if ending else None  # what emits comes before what does not
    return tuple(decisions[:stop])


def _emitted(decisions: Iterable[Decision]) -> tuple[int, ...]:
    return tuple(decision.emitted for decision in decisions if decision.emitted is not None)


def _logprobs(
    batch: Sequence[Proposal], outcomes: Sequence[Sequence[Decision]], logits_NV: Tensor, starts: Sequence[int]
) -> list[tuple[TokenLogprobs, ...]]:
    """Per row the log probabilities of what it emits, where it asks for them."""
    asked = [proposal.draft.row.logprobs for proposal in batch]
    wanted = [
        (i, starts[i] + decision.index, decision.emitted, most)
        for i, most in enumerate(asked)
        if most is not None
        for decision in outcomes[i]
        if decision.emitted is not None
    ]
    found: list[list[TokenLogprobs]] = [[] for _ in batch]
    if wanted:
        rows, places, tokens, most = zip(*wanted, strict=True)
        for i, one in zip(rows, logprobs_of(logits_NV[list(places)], tokens, most), strict=True):
            found[i].append(one)
    return [tuple(of_row) for of_row in found]


class Verify:
    """Proposals to verdicts, by one forward pass of the target for the whole batch. Appends to the rows.

    Args:
        model: the target.
        rule: how a proposal is tested.
        sampling: the transform that the user asked for; a row may have one of its own.
        context: per target id the drafter pieces that the drafter will read for it.
        known: number of ids that the tokenizer knows; what the model's output layer has beyond is never emitted.
        ends: the ids that end a sequence.
        teach: makes teaching from the target's laws; one that returns nothing when nobody learns.
        law_dtype: precision of the laws.
    """

    def __init__(
        self,
        model: LanguageModel,
        rule: Rule,
        sampling: Sampling,
        context: Sequence[tuple[int, ...]],
        known: int,
        ends: Collection[int],
        teach: Teacher,
        law_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self._rule, self._sampling, self._context, self._ends = rule, sampling, context, frozenset(ends)
        self._forbidden_V = torch.arange(model.vocabulary_size, device=model.device) >= known
        self._teach, self._law_dtype = teach, law_dtype

    def admit(self, row: Row) -> None:
        """Read the prompt."""
        self.model.admit(row, row.tokens)

    def release(self, row: Row) -> None:
        """Free the row's keys and values."""
        self.model.release(row)

    def save(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`."""
        return self.model.save_rows(keep)

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        self.model.restore_rows(saved, kept)

    def __call__(self, batch: Sequence[Proposal]) -> list[Verdict]:
        """Test each proposal and append what is emitted to its row."""
        if not batch:
            return []
        logits_NV, starts = self._target_logits(batch)
        samplings = [one.draft.row.sampling or self._sampling for one in batch for _ in range(len(one.verifiable) + 1)]
        laws_NV = laws_of(logits_NV, samplings, self._law_dtype)
        levels = self._rule.levels(batch, laws_NV, starts)
        outcomes = [
            self._outcome(proposal, levels[i], laws_NV[starts[i] : starts[i + 1]]) for i, proposal in enumerate(batch)
        ]
        told = self._told(batch, outcomes, logits_NV, starts)
        logprobs = _logprobs(batch, outcomes, logits_NV, starts)
        return [self._close(*parts) for parts in zip(batch, outcomes, told, logprobs, strict=True)]

    def _told(
        self,
        batch: Sequence[Proposal],
        outcomes: Sequence[tuple[Decision, ...]],
        logits_NV: Tensor,
        starts: Sequence[int],
    ) -> list[Told]:
        """What each row is taught; nothing is computed for those that give no lesson."""
        taught = [number for number, proposal in enumerate(batch) if proposal.draft.row.teaches]
        if len(taught) == len(batch):
            return self._teach(batch, outcomes, logits_NV, starts)
        chosen = [batch[number] for number in taught], [outcomes[number] for number in taught]
        found = self._teach(*chosen, logits_NV, [starts[number] for number in taught]) if taught else []
        told = [Told()] * len(batch)
        for number, one in zip(taught, found, strict=True):
            told[number] = one
        return told

    def _outcome(self, proposal: Proposal, levels: Sequence[Levels], laws_MV: Tensor) -> tuple[Decision, ...]:
        """What is decided for one row, as far as the row goes."""
        row = proposal.draft.row
        return cut(decide(proposal, levels, laws_MV, self._rule, row.draws), row.room, self._ends, row.ending)

    def _target_logits(self, batch: Sequence[Proposal]) -> tuple[Tensor, list[int]]:
        """Logits at every verifiable token and behind the last, all rows joined, and where each row begins."""
        rows = [proposal.draft.row for proposal in batch]
        counts = [len(proposal.verifiable) + 1 for proposal in batch]
        fed = [
            [*row.tokens[self.model.length(row) :], *proposal.verifiable]
            for row, proposal in zip(rows, batch, strict=True)
        ]
        logits_NV, _ = self.model.forward(rows, fed, counts)
        return logits_NV.masked_fill(self._forbidden_V, -torch.inf), [0, *accumulate(counts)]

    def _close(
        self, proposal: Proposal, decisions: tuple[Decision, ...], told: Told, logprobs: tuple[TokenLogprobs, ...]
    ) -> Verdict:
        row, emitted = proposal.draft.row, _emitted(decisions)
        row.tokens.extend(emitted)
        for token in emitted:
            row.pieces.extend(self._context[token])
        row.room -= len(emitted)
        row.block += 1
        stopped = emitted[-1] in self._ends or (row.ending is not None and row.ending.complete)
        row.finish = "stop" if stopped else "" if row.room else "length"
        self.model.roll_back(row, len(row.tokens) - 1)
        accepted = sum(decision.outcome is Outcome.ACCEPTED for decision in decisions)
        rejected = sum(decision.outcome is Outcome.REJECTED for decision in decisions)
        return Verdict(proposal, decisions, emitted, accepted + rejected, accepted, *told, logprobs)
