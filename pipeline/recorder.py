"""From live verdicts to events: the one bridge between tensors and the log."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from stages.contract.blocks import Candidate, Decision, Draft, SequenceState, Verdict
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
        self.drafted += _count_drafted(verdict.proposal.draft)
        self.judged += verdict.judged
        self.accepted += verdict.accepted
        self.first_judged += verdict.judged > 0
        self.first_accepted += verdict.accepted > 0

    def _add_copied(self, verdict: Verdict) -> None:
        self.lookup_blocks += 1
        self.lookup_drafted += _count_drafted(verdict.proposal.draft)
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


def _count_candidates(draft: Draft) -> int:
    return len(draft.tree.candidates) if draft.tree else 0


def _count_drafted(draft: Draft) -> int:
    """Number of pieces, or of candidates of a tree."""
    return len(draft.pieces) or _count_candidates(draft)


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
        row, candidates = draft.row, _count_candidates(draft)
        return BlockDone(
            offset=row.offset,
            dataset=row.dataset,
            block=row.block - 1,
            rows=rows,
            drafted=_count_drafted(draft),
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
        draft = verdict.proposal.draft
        begin = draft.row.emitted - len(verdict.emitted)
        if draft.tree:
            yield from self._tree_decisions(verdict, begin, versions)
            return
        for decision in verdict.decisions:
            yield self._decision(decision, draft, begin, versions)
        translated = verdict.proposal.tokens[-1].stop if verdict.proposal.tokens else 0
        if len(verdict.decisions) >= len(verdict.proposal.tokens) and translated < len(draft.pieces):
            yield self._drop_text(draft, translated, len(verdict.proposal.tokens), begin, versions)

    def _tree_decisions(self, verdict: Verdict, begin: int, versions: Versions) -> Iterator[TokenDecision]:
        """A candidate is `depth` tokens after the text, the bonus one after the last accepted candidate."""
        draft = verdict.proposal.draft
        accepted = sum(decision.outcome is Outcome.ACCEPTED for decision in verdict.decisions)
        for decision in verdict.decisions:
            if decision.candidate is None:
                yield replace(self._decision(decision, draft, begin, versions), position=begin + accepted)
            else:
                yield self._candidate_decision(decision, decision.candidate, draft, begin, versions)

    def _candidate_decision(
        self, decision: Decision, candidate: Candidate, draft: Draft, begin: int, versions: Versions
    ) -> TokenDecision:
        return replace(
            self._decision(decision, draft, begin, versions),
            position=begin + candidate.depth,
            drafter=candidate.source,
            proposed_id=candidate.token,
            proposed_bytes=self._bytes_of(candidate.token),
            parent=candidate.parent,
            context=candidate.context,
            count=candidate.count,
            chance=candidate.chance,
        )

    def _decision(self, decision: Decision, draft: Draft, begin: int, versions: Versions) -> TokenDecision:
        proposed = decision.proposed
        token = proposed.token if proposed else None
        return TokenDecision(
            **self._place(draft, begin, decision.index, versions),
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
        )

    def _drop_text(self, draft: Draft, start: int, index: int, begin: int, versions: Versions) -> TokenDecision:
        return TokenDecision(
            **self._place(draft, begin, index, versions),
            pieces=draft.pieces[start:],
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
            entropy=draft.entropies[start],
        )

    def _place(self, draft: Draft, begin: int, index: int, versions: Versions) -> _Place:
        row = draft.row
        return {
            "offset": row.offset,
            "prompt_id": row.prompt_id,
            "dataset": row.dataset,
            "target": self._target,
            "block": row.block - 1,
            "position": begin + index,
            "index": index,
            "drafter_version": versions.drafter,
            "head_version": versions.head,
            "cache_version": versions.cache,
            "drafter": draft.source,
        }

    def record_completion(
        self, row: SequenceState, counters: PromptCounters, now: float, versions: Versions
    ) -> PromptCompleted:
        """The prompt's summary."""
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
