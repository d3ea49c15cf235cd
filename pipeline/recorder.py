"""From live verdicts to events: the one bridge between tensors and the log."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import TypedDict

from stages.contract.blocks import (
    ENTROPY,
    OWN_LOG,
    Candidate,
    Decision,
    Draft,
    Proposal,
    ProposedToken,
    SequenceState,
    Verdict,
)
from store.events import BlockDone, DraftSource, Outcome, PromptCompleted, PromptRejected, TokenDecision, Translation


@dataclass(frozen=True)
class Versions:
    """What was in service during a block."""

    drafter: int
    head: int
    cache: int


class _Place(TypedDict):
    """Fields of a `TokenDecision`: the place of the token, and what drafted it."""

    offset: int
    prompt_id: str
    dataset: str
    target: str
    block: int
    position: int
    index: int
    drafter_version: int
    head_version: int
    cache_version: int
    drafter: DraftSource


class _RawOfDrafter(TypedDict):
    """Fields of a `TokenDecision`: how likely the drafter itself found the token's pieces."""

    drafter_raw_probability: float | None
    drafter_raw_entropy: float | None


@dataclass(frozen=True)
class _Block:
    """What the decisions of a block are recorded with."""

    verdict: Verdict  # on the block
    begin: int  # position of its first token in the completion
    versions: Versions  # in service when it was drafted
    # per drafted piece the drafter's own log probability and entropy; empty where it is not known
    raw_pieces: Sequence[tuple[float, float]]

    @classmethod
    def from_verdict(cls, verdict: Verdict, versions: Versions) -> "_Block":
        """Make it of a verdict that was appended to its row."""
        draft = verdict.proposal.draft
        features_KF = draft.features_KF
        raw = [] if features_KF is None else features_KF[:, OWN_LOG : ENTROPY + 1].tolist()
        return cls(verdict, draft.row.emitted - len(verdict.emitted), versions, raw)

    @property
    def draft(self) -> Draft:
        """The draft that the verdict is on: pieces, or a tree of target tokens."""
        return self.verdict.proposal.draft

    def raw_of_drafter(self, proposed: ProposedToken | None) -> _RawOfDrafter:
        """Return the fields of a token; None without pieces."""
        own = self.raw_pieces[proposed.start : proposed.stop] if proposed else ()
        return {
            "drafter_raw_probability": exp(sum(log for log, _ in own)) if own else None,
            "drafter_raw_entropy": own[0][1] if own else None,
        }


@dataclass(frozen=True)
class Seconds:
    """Wall time of a block per stage, one row's equal share."""

    decode: float
    translate: float
    verify: float


@dataclass
class PromptCounters:
    """Counts of one prompt while it is in flight.

    The counts `lookup_*` are of all copied drafts: from the row's own text and from the memory.
    """

    started: float
    blocks: int = 0
    drafted: int = 0
    judged: int = 0
    accepted: int = 0
    first_judged: int = 0
    first_accepted: int = 0
    lookup_blocks: int = 0
    lookup_drafted: int = 0
    lookup_judged: int = 0
    lookup_accepted: int = 0
    own_accepted: int = 0

    def add(self, verdict: Verdict) -> None:
        """Count one block. Copied drafts are counted separately: they are no evidence about the drafter."""
        self.blocks += 1
        if verdict.proposal.draft.source is not DraftSource.MODEL:
            self._add_copied(verdict)
            return
        self.drafted += _count_drafted(verdict.proposal)
        self.judged += verdict.judged
        self.accepted += verdict.accepted
        self.first_judged += verdict.judged > 0
        self.first_accepted += any(one.outcome is Outcome.ACCEPTED for one in verdict.decisions[:1])

    def _add_copied(self, verdict: Verdict) -> None:
        self.lookup_blocks += 1
        self.lookup_drafted += _count_drafted(verdict.proposal)
        self.lookup_judged += verdict.judged
        self.lookup_accepted += verdict.accepted
        self.own_accepted += _count_own(verdict)


def _count_own(verdict: Verdict) -> int:
    """Number of accepted tokens that were copied from the sequence's own text."""
    return sum(
        decision.outcome is Outcome.ACCEPTED and decision.candidate.source is DraftSource.LOOKUP
        for decision in verdict.decisions
        if decision.candidate is not None
    )


def _count_candidates(proposal: Proposal) -> int:
    """Number of candidates of a tree that are no drafted pieces: copies and alternatives."""
    return len(proposal.verifiable) - len(proposal.tokens) if proposal.draft.tree else 0


def _count_drafted(proposal: Proposal) -> int:
    """Number of pieces and of other candidates of a tree."""
    return len(proposal.draft.pieces) + _count_candidates(proposal)


def without_text(event: PromptRejected) -> PromptRejected:
    """Return the rejection without the quoted text of the row, which reasons have after `, got`."""
    return replace(event, reason=event.reason.partition(", got ")[0])


def shown_tokens(row: SequenceState, emitted: Sequence[int]) -> Sequence[int]:
    """Those of a row's last tokens that are text: the one that ended the sequence is none, even where its name has
    bytes."""
    by_stop_string = row.stop_strings is not None and row.stop_strings.complete
    return emitted[:-1] if row.finish == "stop" and not by_stop_string else emitted


class Recorder:
    """Makes events of what the loop sees.

    Args:
        target: the target's name.
        bytes_of: bytes of a target id, None for special ones.
        decode: text of target ids.
        text: whether events hold text. Without it both texts of a prompt are empty and the bytes of all tokens None;
            their ids stay.
    """

    def __init__(
        self,
        target: str,
        bytes_of: Callable[[int], bytes | None],
        decode: Callable[[list[int]], str],
        *,
        text: bool = True,
    ) -> None:
        self._target, self._text = target, text
        self._bytes_of = bytes_of if text else _no_bytes
        self._decode = decode if text else _no_text

    def record_block(self, verdict: Verdict, rows: int, seconds: Seconds) -> BlockDone:
        """The block's summary. Call it after the verdict was appended to its row."""
        draft = verdict.proposal.draft
        row, candidates = draft.row, _count_candidates(verdict.proposal)
        return BlockDone(
            offset=row.offset,
            dataset=row.dataset,
            block=row.block - 1,
            rows=rows,
            drafted=_count_drafted(verdict.proposal),
            proposed=len(verdict.proposal.tokens) + candidates,
            judged=verdict.judged,
            accepted=verdict.accepted,
            emitted=len(verdict.emitted),
            seconds_decode=seconds.decode,
            seconds_translate=seconds.translate,
            seconds_verify=seconds.verify,
            drafter=draft.source,
            candidates=candidates,
            expected_tokens=draft.expected_tokens,
            expected_seconds=draft.expected_seconds,
            action=draft.action,
            propensity=draft.propensity,
        )

    def record_decisions(self, verdict: Verdict, versions: Versions) -> Iterator[TokenDecision]:
        """One event per proposed, emitted or dropped token of a block, in order of the index."""
        block = _Block.from_verdict(verdict, versions)
        draft, tokens = block.draft, verdict.proposal.tokens
        if draft.tree:
            yield from self._tree_decisions(block)
            return
        for decision in verdict.decisions:
            yield self._decision(decision, block)
        translated = tokens[-1].stop if tokens else 0
        if len(verdict.decisions) >= len(tokens) and translated < len(draft.pieces):
            yield self._drop_text(block, ProposedToken(None, translated, len(draft.pieces), ()), len(tokens))

    def _tree_decisions(self, block: "_Block") -> Iterator[TokenDecision]:
        """A candidate is `depth` tokens after the text, the bonus one after the last accepted candidate."""
        decisions = block.verdict.decisions
        accepted = sum(decision.outcome is Outcome.ACCEPTED for decision in decisions)
        for decision in decisions:
            if decision.candidate is None:
                yield replace(self._decision(decision, block), position=block.begin + accepted)
            else:
                yield self._candidate_decision(decision, decision.candidate, block)

    def _candidate_decision(self, decision: Decision, candidate: Candidate, block: "_Block") -> TokenDecision:
        return replace(
            self._decision(decision, block),
            position=block.begin + candidate.depth,
            drafter=candidate.source,
            proposed_id=candidate.token,
            proposed_bytes=self._bytes_of(candidate.token),
            parent=candidate.parent,
            context=candidate.context,
            count=candidate.count,
            chance=candidate.chance,
        )

    def _decision(self, decision: Decision, block: "_Block") -> TokenDecision:
        draft, proposed, raw = block.draft, decision.proposed, block.verdict.raw.get(decision.index)
        token = proposed.token if proposed else None
        return TokenDecision(
            **self._place(block, decision.index),
            **block.raw_of_drafter(proposed),
            pieces=draft.pieces[proposed.start : proposed.stop] if proposed else (),
            translation=proposed.translation if proposed else Translation.NONE,
            proposed_id=token,
            proposed_bytes=None if token is None else self._bytes_of(token),
            outcome=decision.outcome,
            emitted_id=decision.emitted,
            emitted_bytes=None if decision.emitted is None else self._bytes_of(decision.emitted),
            origin=decision.origin,
            drafter_levels=decision.drafter_levels,
            target_levels=decision.target_levels,
            uniform=decision.uniform,
            head_estimate=draft.survival[proposed.stop - 1] if proposed and draft.survival else None,
            entropy=draft.entropies[proposed.start] if proposed else None,
            target_raw_probability=raw.proposed if raw else None,
            emitted_raw_probability=raw.emitted if raw else None,
            target_raw_entropy=raw.entropy if raw else None,
        )

    def _drop_text(self, block: "_Block", dropped: ProposedToken, index: int) -> TokenDecision:
        draft = block.draft
        return TokenDecision(
            **self._place(block, index),
            **block.raw_of_drafter(dropped),
            pieces=draft.pieces[dropped.start :],
            translation=Translation.NONE,
            proposed_id=None,
            proposed_bytes=None,
            outcome=Outcome.UNTRANSLATABLE,
            emitted_id=None,
            emitted_bytes=None,
            origin=None,
            drafter_levels=(),
            target_levels=(),
            uniform=None,
            head_estimate=draft.survival[-1] if draft.survival else None,
            entropy=draft.entropies[dropped.start],
        )

    def _place(self, block: "_Block", index: int) -> _Place:
        draft, row = block.draft, block.draft.row
        return {
            "offset": row.offset,
            "prompt_id": row.prompt_id,
            "dataset": row.dataset,
            "target": self._target,
            "block": row.block - 1,
            "position": block.begin + index,
            "index": index,
            "drafter_version": block.versions.drafter,
            "head_version": block.versions.head,
            "cache_version": block.versions.cache,
            "drafter": draft.source,
        }

    def record_completion(
        self, row: SequenceState, counters: PromptCounters, now: float, versions: Versions
    ) -> PromptCompleted:
        """Make the event of a completed prompt, with its totals."""
        emitted = shown_tokens(row, row.tokens[row.prompt_length :])
        return PromptCompleted(
            offset=row.offset,
            prompt_id=row.prompt_id,
            dataset=row.dataset,
            target=self._target,
            prompt_text=row.text if self._text and not row.private else "",
            completion_text="" if row.private else self._decode(list(emitted)),
            finish=row.finish,
            prompt_tokens=row.prompt_length,
            emitted=row.emitted,
            blocks=counters.blocks,
            drafted=counters.drafted,
            judged=counters.judged,
            accepted=counters.accepted,
            first_judged=counters.first_judged,
            first_accepted=counters.first_accepted,
            started=counters.started,
            finished=now,
            drafter_version=versions.drafter,
            lookup_blocks=counters.lookup_blocks,
            lookup_drafted=counters.lookup_drafted,
            lookup_judged=counters.lookup_judged,
            lookup_accepted=counters.lookup_accepted,
            own_accepted=counters.own_accepted,
            predicted=min(row.predicted, row.emitted),
            frequency=row.frequency,
        )


def _no_bytes(token: int) -> None:
    return None


def _no_text(tokens: list[int]) -> str:
    return ""
