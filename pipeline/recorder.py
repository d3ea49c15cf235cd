"""From live verdicts to events: the one bridge between tensors and the log."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp

from stages.contract.blocks import (
    ENTROPY,
    OWN_LOG,
    Decision,
    Draft,
    Proposal,
    ProposedToken,
    SequenceState,
    Verdict,
)
from stages.sampling.logprobs import RawValues
from store.events import BlockDone, DraftSource, Outcome, PromptCompleted, PromptRejected, TokenDecision, Translation


@dataclass(frozen=True)
class Versions:
    """What was in service during a block."""

    drafter: int
    head: int
    cache: int


@dataclass(frozen=True)
class Seconds:
    """Wall time of a block per stage, one row's equal share."""

    decode: float
    translate: float
    verify: float


@dataclass
class PromptCounters:
    """Counts of one prompt while it is in flight, by field of `PromptCompleted`.

    The counts `lookup_*` are of all copied drafts: from the row's own text and from the memory.
    """

    started: float
    blocks: int = 0
    drafted: int = 0
    judged: int = 0
    accepted: int = 0
    lookup_blocks: int = 0
    lookup_drafted: int = 0
    lookup_judged: int = 0
    lookup_accepted: int = 0
    own_accepted: int = 0

    def add(self, verdict: Verdict) -> None:
        """Count one block. Copied drafts are counted separately: they are no evidence about the drafter."""
        self.blocks += 1
        drafted = _count_drafted(verdict.proposal)
        if verdict.proposal.draft.source is DraftSource.MODEL:
            self.drafted += drafted
            self.judged += verdict.judged
            self.accepted += verdict.accepted
            return
        self.lookup_blocks += 1
        self.lookup_drafted += drafted
        self.lookup_judged += verdict.judged
        self.lookup_accepted += verdict.accepted
        found = [one for one in verdict.decisions if one.candidate and one.candidate.source is DraftSource.LOOKUP]
        self.own_accepted += sum(one.outcome is Outcome.ACCEPTED for one in found)


def _count_candidates(proposal: Proposal) -> int:
    """Number of candidates of a tree that are no drafted pieces: copies and alternatives."""
    return len(proposal.verifiable) - len(proposal.tokens) if proposal.draft.tree else 0


def _count_drafted(proposal: Proposal) -> int:
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
    """Makes events of what the loop sees. `bytes_of` returns the bytes of a target id, None for special ones. Without
    text both texts of a prompt are empty and the bytes of all tokens None; their ids stay. Without decisions there are
    only events of blocks and prompts.
    """

    def __init__(
        self,
        target: str,
        bytes_of: Callable[[int], bytes | None],
        decode: Callable[[list[int]], str],
        *,
        text: bool = True,
        decisions: bool = True,
    ) -> None:
        self._target, self._text, self._decisions = target, text, decisions
        self._bytes_of = bytes_of if text else lambda token: None
        self._decode = decode if text else lambda tokens: ""

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
        """One event per proposed, emitted or dropped token of a block, in order of the index.

        A candidate of a tree is `depth` tokens after the text, the bonus one after the last accepted candidate.
        """
        if not self._decisions:
            return
        draft, tokens, features_KF = verdict.proposal.draft, verdict.proposal.tokens, verdict.proposal.draft.features_KF
        begin = draft.row.emitted - len(verdict.emitted)  # position of the block's first token in the completion
        # Per piece the drafter's own log probability and entropy, where they are known.
        raw_pieces = [] if features_KF is None else features_KF[:, OWN_LOG : ENTROPY + 1].tolist()
        accepted = sum(decision.outcome is Outcome.ACCEPTED for decision in verdict.decisions)
        for decision in verdict.decisions:
            place = decision.index
            if draft.tree:
                candidate = decision.candidate
                place = candidate.depth if candidate else accepted
            raw = verdict.raw.get(decision.index)
            yield self._make_decision(decision, draft, begin + place, versions, raw_pieces, raw)
        translated = tokens[-1].stop if tokens else 0
        if not draft.tree and len(verdict.decisions) >= len(tokens) and translated < len(draft.pieces):
            text = ProposedToken(None, translated, len(draft.pieces), ())
            dropped = Decision(len(tokens), text, Outcome.UNTRANSLATABLE, None, None)
            yield self._make_decision(dropped, draft, begin + len(tokens), versions, raw_pieces, None)

    def _make_decision(
        self,
        decision: Decision,
        draft: Draft,
        position: int,
        versions: Versions,
        raw_pieces: Sequence[tuple[float, float]],
        raw: RawValues | None,
    ) -> TokenDecision:
        row, proposed, candidate = draft.row, decision.proposed, decision.candidate
        own = raw_pieces[proposed.start : proposed.stop] if proposed else ()
        return TokenDecision(
            offset=row.offset,
            prompt_id=row.prompt_id,
            dataset=row.dataset,
            target=self._target,
            block=row.block - 1,
            position=position,
            index=decision.index,
            pieces=draft.pieces[proposed.start : proposed.stop] if proposed else (),
            translation=proposed.translation if proposed else Translation.NONE,
            proposed_id=decision.token,
            proposed_bytes=None if decision.token is None else self._bytes_of(decision.token),
            outcome=decision.outcome,
            emitted_id=decision.emitted,
            emitted_bytes=None if decision.emitted is None else self._bytes_of(decision.emitted),
            origin=decision.origin,
            drafter_levels=decision.drafter_levels,
            target_levels=decision.target_levels,
            uniform=decision.uniform,
            head_estimate=draft.survival[proposed.stop - 1] if proposed and draft.survival else None,
            entropy=draft.entropies[proposed.start] if proposed else None,
            drafter_version=versions.drafter,
            head_version=versions.head,
            cache_version=versions.cache,
            drafter=candidate.source if candidate else draft.source,
            parent=candidate.parent if candidate else None,
            context=candidate.context if candidate else None,
            count=candidate.count if candidate else None,
            chance=candidate.chance if candidate else None,
            target_raw_probability=raw.proposed if raw else None,
            emitted_raw_probability=raw.emitted if raw else None,
            target_raw_entropy=raw.entropy if raw else None,
            drafter_raw_probability=exp(sum(log for log, _ in own)) if own else None,
            drafter_raw_entropy=own[0][1] if own else None,
        )

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
            finished=now,
            drafter_version=versions.drafter,
            **vars(counters),
            predicted=min(row.predicted, row.emitted),
            noise=None if row.noise is None or row.private else row.noise.key,
        )
