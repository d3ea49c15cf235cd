"""From live verdicts to events: the one bridge between tensors and the log."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from stages.blocks import Decision, Draft, Row, Verdict
from stages.lookup import LookupDraft
from store.events import BlockDone, Drafter, Outcome, PromptCompleted, PromptRejected, TokenDecision, Translation


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
class Tally:
    """Counts of one prompt while it is in flight."""

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

    def add(self, verdict: Verdict) -> None:
        """Count one block. What was looked up says nothing about the model: it is counted apart."""
        self.blocks += 1
        if _drafter(verdict.proposal.draft) is Drafter.LOOKUP:
            self._add_lookup(verdict)
            return
        self.drafted += len(verdict.proposal.draft.pieces)
        self.judged += verdict.judged
        self.accepted += verdict.accepted
        self.first_judged += verdict.judged > 0
        self.first_accepted += verdict.accepted > 0

    def _add_lookup(self, verdict: Verdict) -> None:
        self.lookup_blocks += 1
        self.lookup_drafted += len(verdict.proposal.draft.pieces)
        self.lookup_judged += verdict.judged
        self.lookup_accepted += verdict.accepted


def _drafter(draft: Draft) -> Drafter:
    return Drafter.LOOKUP if isinstance(draft, LookupDraft) else Drafter.MODEL


def without_text(event: PromptRejected) -> PromptRejected:
    """The same rejection without what was found in the row, which reasons quote behind `, got`."""
    return replace(event, reason=event.reason.partition(", got ")[0])


def shown_tokens(row: Row, emitted: Sequence[int]) -> Sequence[int]:
    """Those of a row's last tokens that are text: the one that ended the sequence is none, even where its name has
    bytes."""
    by_stop_string = row.ending is not None and row.ending.complete
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

    def block(self, verdict: Verdict, rows: int, seconds: Seconds) -> BlockDone:
        """The block's summary. Call it after the verdict was appended to its row."""
        row = verdict.proposal.draft.row
        return BlockDone(
            offset=row.offset,
            dataset=row.dataset,
            block=row.block - 1,
            rows=rows,
            drafted=len(verdict.proposal.draft.pieces),
            proposed=len(verdict.proposal.tokens),
            judged=verdict.judged,
            accepted=verdict.accepted,
            emitted=len(verdict.emitted),
            seconds_decode=seconds.decode,
            seconds_translate=seconds.translate,
            seconds_verify=seconds.verify,
            drafter=_drafter(verdict.proposal.draft),
        )

    def decisions(self, verdict: Verdict, versions: Versions) -> Iterator[TokenDecision]:
        """One event per proposed, emitted or dropped token of a block, in order."""
        draft = verdict.proposal.draft
        begin = draft.row.emitted - len(verdict.emitted)
        for decision in verdict.decisions:
            yield self._decision(decision, draft, begin, versions)
        translated = verdict.proposal.tokens[-1].stop if verdict.proposal.tokens else 0
        if len(verdict.decisions) >= len(verdict.proposal.tokens) and translated < len(draft.pieces):
            yield self._dropped(draft, translated, len(verdict.proposal.tokens), begin, versions)

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

    def _dropped(self, draft: Draft, start: int, index: int, begin: int, versions: Versions) -> TokenDecision:
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

    def _place(self, draft: Draft, begin: int, index: int, versions: Versions) -> dict:
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
            "drafter": _drafter(draft),
        }

    def completed(self, row: Row, tally: Tally, now: float, versions: Versions) -> PromptCompleted:
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
            blocks=tally.blocks,
            drafted=tally.drafted,
            judged=tally.judged,
            accepted=tally.accepted,
            first_judged=tally.first_judged,
            first_accepted=tally.first_accepted,
            started=tally.started,
            finished=now,
            drafter_version=versions.drafter,
            lookup_blocks=tally.lookup_blocks,
            lookup_drafted=tally.lookup_drafted,
            lookup_judged=tally.lookup_judged,
            lookup_accepted=tally.lookup_accepted,
        )


def _no_bytes(token: int) -> None:
    return None


def _no_text(tokens: list[int]) -> str:
    return ""
