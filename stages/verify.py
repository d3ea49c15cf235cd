"""Verify: one forward pass of the target for all proposals, and the decision of each row's tokens.

How one row is decided, and why the distribution is kept: chain_decisions.py and tree_decisions.py.

Shapes: N positions of all rows, M positions of one row, V target tokens.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from math import isfinite

import torch
from torch import Tensor
from typing_extensions import override

from stages.contract.blocks import Decision, Proposal, SequenceState, TopLogits, Verdict
from stages.contract.snapshot import State
from stages.contract.stage import Stage
from stages.engine.models.language_model import LanguageModel
from stages.learn.examples.teacher import TrieTeacher
from stages.prompts.prompt_reader import PromptReader
from stages.sampling.distributions import find_peaks, read_peaks
from stages.sampling.drawing import RowDistributions
from stages.sampling.logprobs import RawValues, RejectedPlace, TokenLogprobs, compute_logprobs, compute_raw_values
from stages.sampling.params import SamplingParams
from stages.verification.chain_decisions import decide
from stages.verification.emitted_tokens import accepted_path, emitted_tokens, emitting_lines, truncate
from stages.verification.rules import Levels, Rule
from stages.verification.target_distributions import TargetDistributions
from stages.verification.tree_decisions import decide_tree, name_pieces
from store.errors import ModelError
from store.events import Outcome


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
    """Return the logits with those of a tree reduced to its emitted tokens, in order, and the start of each row. A copy
    only if some of those tokens do not follow each other in the logits.
    """
    lines = [
        [start + line for line in emitting_lines(decisions)] if proposal.draft.tree else list(range(start, stop))
        for proposal, decisions, (start, stop) in zip(batch, outcomes, pairwise(starts), strict=True)
    ]
    if all(own[-1] - own[0] == len(own) - 1 for own in lines):  # in the order of the text, they never go back
        return logits_NV, [own[0] for own in lines]
    places_N = torch.tensor(list(chain(*lines)), device=logits_NV.device)
    return logits_NV[places_N], [0, *accumulate(map(len, lines))]


def _score_prompt(row: SequenceState, read: int, logits_NV: Tensor) -> None:
    """Add the log probabilities of the tokens that follow N places of a row's prompt, of which `read` were read before.

    A prompt is read in passes of bounded size, so no more than these N lines of logits are ever held.
    """
    assert row.prompt_logprobs is not None
    tokens = row.tokens[read + 1 : read + 1 + len(logits_NV)]
    if tokens:
        found = compute_logprobs(logits_NV[: len(tokens)], tokens, [row.logprobs or 0] * len(tokens))
        _check_finite([row], [one.logprob or 0.0 for one in found], [0])
        row.prompt_logprobs += found


def _collect_logprobs(
    batch: Sequence[Proposal], outcomes: Sequence[Sequence[Decision]], logits_NV: Tensor, starts: Sequence[int]
) -> list[tuple[TokenLogprobs, ...]]:
    """Return per row the log probabilities of its emitted tokens; empty for rows that do not request them."""
    requested = [proposal.draft.row.logprobs for proposal in batch]
    wanted = [
        (i, starts[i] + line, token, most)
        for i, most in enumerate(requested)
        if most is not None
        for line, token in zip(emitting_lines(outcomes[i]), emitted_tokens(outcomes[i]), strict=True)
    ]
    found: list[list[TokenLogprobs]] = [[] for _ in batch]
    if wanted:
        rows, places, tokens, most = zip(*wanted, strict=True)
        for i, one in zip(rows, compute_logprobs(logits_NV[list(places)], tokens, most), strict=True):
            found[i].append(one)
    return [tuple(row_logprobs) for row_logprobs in found]


def _collect_raw_values(
    batch: Sequence[Proposal], outcomes: Sequence[Sequence[Decision]], logits_NV: Tensor, starts: Sequence[int]
) -> list[dict[int, RawValues]]:
    """Return per row the raw values of its rejected token, by index; none for private rows, whose decisions are not
    recorded.

    Next to a pass over four-bit weights, those of accepted tokens too would take more than 1% of its time.
    """
    rejected: list[tuple[int, int]] = []
    places: list[RejectedPlace] = []
    for row, (proposal, decisions) in enumerate(zip(batch, outcomes, strict=True)):
        if proposal.draft.row.private:
            continue
        for one in decisions:
            if one.emitted is not None and one.outcome is Outcome.REJECTED:
                rejected.append((row, one.index))
                line = one.candidate.parent + 1 if one.candidate else one.index
                places.append(RejectedPlace(starts[row] + line, one.token, one.emitted))
    found: list[dict[int, RawValues]] = [{} for _ in batch]
    for (row, index), values in zip(rejected, compute_raw_values(logits_NV, places), strict=True):
        found[row][index] = values
    return found


def _check_finite(rows: Sequence[SequenceState], peaks: Sequence[float], starts: Sequence[int]) -> None:
    """Raise a `ModelError` for the first row with target logits that are NaN or infinite.

    NaN anywhere in a line is its peak; -inf is a mask, unless the whole line is.
    """
    line = next((line for line, peak in enumerate(peaks) if not isfinite(peak)), None)
    if line is not None:
        row = rows[max(i for i in range(len(rows)) if starts[i] <= line)]
        raise ModelError(
            f"the target's logits must be finite, got NaN or infinity for prompt {row.prompt_id} after "
            f"{len(row.tokens)} tokens; check the target's weights, or load it in a wider type (--set dtype=float32)"
        )


class Verify(Stage[Proposal, Verdict]):
    """Proposals to verdicts, by one forward pass of the target for the whole batch. Appends to the rows.

    Args:
        sampling: the sampling transform; the transform of a row takes precedence.
        context: per target id the pieces that the drafter reads for it.
        tokenizer_size: number of ids of the tokenizer; further outputs of the model are never emitted.
        reader: reads prompts; by default each is read in one pass, when its row is admitted.
        project: reduces the target's hidden states, for drafters that read them.
        reads_states: whether drafts depend on these now; examples of rows that collect any have them in any case.
    """

    def __init__(
        self,
        model: LanguageModel,
        rule: Rule,
        sampling: SamplingParams,
        context: Sequence[tuple[int, ...]],
        tokenizer_size: int,
        eos_ids: Collection[int],
        teacher: TrieTeacher | None,
        probs_dtype: torch.dtype = torch.float32,
        reader: PromptReader | None = None,
        project: Callable[[Tensor], Tensor] | None = None,
        reads_states: Callable[[], bool] = lambda: True,
    ) -> None:
        self.model, self.reader, self._project, self._reads_states = model, reader, project, reads_states
        self._rule, self._context, self._eos_ids = rule, context, frozenset(eos_ids)
        self._tokenizer_size = tokenizer_size
        self._teacher, self._probs_dtype = teacher, probs_dtype
        self._distribute = TargetDistributions(sampling, probs_dtype)

    @override
    def admit(self, row: SequenceState) -> None:
        if self.reader:
            self.reader.admit(row)
        else:
            self.model.admit(row, row.tokens)

    @override
    def release(self, row: SequenceState) -> None:
        (self.reader or self.model).release(row)

    @override
    def state_dict(self, rows: Collection[SequenceState]) -> State:
        return self.model.state_dict(rows)

    @override
    def load_state_dict(self, state: State) -> None:
        self.model.load_state_dict(state)

    @override
    def __call__(self, batch: Sequence[Proposal]) -> list[Verdict]:
        """Test each proposal and append what is emitted to its row. A row whose prompt is being read emits nothing.
        Raises `ModelError` if the target's logits are not finite.
        """
        if not batch:
            return []
        ready = [proposal for proposal in batch if not proposal.draft.row.sits_out]
        read = [self.model.length(proposal.draft.row) for proposal in ready]
        logits_NV, hidden_NW, starts = self._target_logits(batch, ready)
        verdicts = iter(self._decide(ready, read, logits_NV, hidden_NW, starts) if ready else ())
        found = [Verdict(one, (), (), 0, 0) if one.draft.row.sits_out else next(verdicts) for one in batch]
        if self.reader:
            self.reader.after_pass()
        return found

    def _decide(
        self,
        batch: Sequence[Proposal],
        read: Sequence[int],
        logits_NV: Tensor,
        hidden_NW: Tensor,
        starts: Sequence[int],
    ) -> list[Verdict]:
        """Decide proposals, given each row's number of cached tokens before the pass, and what the pass returned."""
        peaks_N = find_peaks(logits_NV)
        _check_finite([proposal.draft.row for proposal in batch], read_peaks(logits_NV, peaks_N), starts)
        target_probs_NV, targets = self._distribute(batch, logits_NV, peaks_N, starts)
        levels = self._rule.levels(batch, target_probs_NV, starts)
        outcomes = list(map(self._decide_row, batch, levels, targets))
        soft_targets = self._supervise(batch, outcomes, logits_NV, starts)
        logprobs = _collect_logprobs(batch, outcomes, logits_NV, starts)
        raw = _collect_raw_values(batch, outcomes, logits_NV, starts)
        states: Sequence[Tensor | None] = [None] * len(batch)
        collects = any(one.draft.row.collects_soft_targets for one in batch)
        if self._project is not None and (collects or self._reads_states()):
            # the reduced states that the emitted tokens were drawn from (tokens, S)
            emitting = [emitting_lines(decisions) for decisions in outcomes]
            places = [start + line for start, own in zip(starts, emitting, strict=False) for line in own]
            states = self._project(hidden_NW[places]).split(list(map(len, emitting)))
        columns = zip(batch, read, outcomes, soft_targets, logprobs, states, raw, strict=True)
        return [self._extend_row(*parts) for parts in columns]

    def _supervise(
        self,
        batch: Sequence[Proposal],
        outcomes: Sequence[tuple[Decision, ...]],
        logits_NV: Tensor,
        starts: Sequence[int],
    ) -> list[TopLogits | None]:
        """Return the soft targets of each row; None for rows that collect no examples."""
        numbers = [number for number, proposal in enumerate(batch) if proposal.draft.row.collects_soft_targets]
        if not numbers or self._teacher is None:
            return [None] * len(batch)
        logits_NV, starts = _straighten(batch, outcomes, logits_NV, starts)
        chosen = [batch[number] for number in numbers], [outcomes[number] for number in numbers]
        found = self._teacher(*chosen, logits_NV, [starts[number] for number in numbers])
        by_number = dict(zip(numbers, found, strict=True))
        return [by_number.get(number) for number in range(len(batch))]

    def _decide_row(
        self, proposal: Proposal, levels: Sequence[Levels], target: RowDistributions
    ) -> tuple[Decision, ...]:
        """Decide one row's proposed tokens, up to the end of the sequence."""
        row, tree = proposal.draft.row, proposal.draft.tree
        if tree:
            decisions = name_pieces(decide_tree(tree, target, row.rng), proposal.tokens, levels)
        else:
            decisions = decide(proposal, levels, target, self._rule, row.rng)
        return truncate(decisions, row.remaining_tokens, row.find_ends(self._eos_ids), row.stop_strings)

    def _target_logits(self, batch: Sequence[Proposal], ready: Sequence[Proposal]) -> tuple[Tensor, Tensor, list[int]]:
        """Compute a pass over the whole batch, which also reads of the prompts of the rows that are not ready. Returns
        of the ready rows the logits at every verifiable token and after the last, rows joined, the hidden states there
        if they are projected (the logits again if not), and the start of each row.
        """
        prompts = self.reader.next_tokens() if self.reader else {}
        fed = [self._new_tokens(proposal, prompts) for proposal in batch]
        everyone = [proposal.draft.row for proposal in batch]
        scored = [row.reading and row.prompt_logprobs is not None for row in everyone]
        read = [self.model.length(row) for row in everyone]
        counts = [0 if one.draft.row.sits_out else len(one.verifiable) + 1 for one in batch]
        wanted = [len(new) if scores else count for scores, new, count in zip(scored, fed, counts, strict=True)]
        options = {} if self._project is None else {"hidden": True}
        logits_NV, hidden_NW = self.model.forward(everyone, fed, wanted, parents=_parents(batch, fed), **options)
        starts = [0, *accumulate(filter(None, counts))]
        if self._tokenizer_size < logits_NV.shape[1]:
            with torch.inference_mode():  # the logits are those of this pass alone, so they are masked in place
                logits_NV[:, self._tokenizer_size :] = -torch.inf
        if any(scored):
            lines = [range(stop - number, stop) for number, stop in zip(wanted, accumulate(wanted), strict=True)]
            for row, scores, before, own in zip(everyone, scored, read, lines, strict=True):
                if scores and own:
                    _score_prompt(row, before, logits_NV[own.start : own.stop])
            kept = [line for scores, own in zip(scored, lines, strict=True) if not scores for line in own]
            plain, logits_NV = hidden_NW is logits_NV, logits_NV[kept]
            hidden_NW = logits_NV if plain else hidden_NW[kept]
        return logits_NV, hidden_NW, starts

    def _new_tokens(self, proposal: Proposal, prompts: Mapping[SequenceState, Sequence[int]]) -> Sequence[int]:
        row = proposal.draft.row
        if row.sits_out:
            return prompts.get(row, ())
        return [*row.tokens[self.model.length(row) :], *proposal.verifiable]

    def _extend_row(
        self,
        proposal: Proposal,
        read: int,
        decisions: tuple[Decision, ...],
        soft_targets: TopLogits | None,
        logprobs: tuple[TokenLogprobs, ...],
        states: Tensor | None,
        raw: dict[int, RawValues],
    ) -> Verdict:
        row, emitted = proposal.draft.row, emitted_tokens(decisions)
        if proposal.draft.tree:
            unread = len(row.tokens) - read
            path = [*range(unread), *(unread + index for index in accepted_path(decisions))]
            self.model.keep_path(row, read, path)
        row.tokens.extend(emitted)
        for token in emitted:
            row.pieces.extend(self._context[token])
        row.remaining_tokens -= len(emitted)
        row.block += 1
        row.target_state = None if states is None else states[-1]
        stopped = emitted[-1] in row.find_ends(self._eos_ids) or (
            row.stop_strings is not None and row.stop_strings.complete
        )
        row.finish = "stop" if stopped else "" if row.remaining_tokens else "length"
        self.model.roll_back(row, len(row.tokens) - 1)
        accepted = sum(decision.outcome is Outcome.ACCEPTED for decision in decisions)
        rejected = sum(decision.outcome is Outcome.REJECTED for decision in decisions)
        return Verdict(proposal, decisions, emitted, accepted + rejected, accepted, soft_targets, logprobs, states, raw)
