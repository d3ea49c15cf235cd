"""Lookup: drafts that are copied from earlier text where that is faster than the drafter's model."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from typing_extensions import override

from stages.contract.blocks import Draft, SequenceState, Verdict
from stages.contract.snapshot import Saved, SnapshotReader, SnapshotWriter
from stages.contract.stage import Stage
from stages.decode import Decode
from stages.drafting.costs import Costs
from stages.drafting.prompt_lookup import PromptLookup
from stages.drafting.sources import CopySource, DraftSourceSelector, Offer
from store.events import DraftSource


class CopySettings(Protocol):
    """The settings of drafting that sources read."""

    lookup: bool
    max_lookup: int


def _prompt_lookup(
    settings: CopySettings, selector: DraftSourceSelector, allowed: Collection[int]
) -> CopySource | None:
    return PromptLookup(selector, allowed, settings.max_lookup) if settings.lookup else None


# By the name under which drafts are logged: a factory that returns a source if the settings enable it. Each source has
# its own selector.
SOURCES: dict[DraftSource, Callable[[CopySettings, DraftSourceSelector, Collection[int]], CopySource | None]] = {
    DraftSource.LOOKUP: _prompt_lookup,
}


def make_sources(settings: CopySettings, costs: Costs, rows: int, allowed: Collection[int]) -> list[CopySource]:
    """Make the sources that the settings enable.

    Args:
        settings: the settings of drafting.
        costs: costs of the models' passes.
        rows: number of rows of a batch.
        allowed: pieces that may be drafted.
    """
    made = (make(settings, DraftSourceSelector(costs, rows), allowed) for make in SOURCES.values())
    return [source for source in made if source]


class DecodeOrLookup(Stage[SequenceState, Draft]):
    """Rows to drafts, by the model or by a copying source, whichever had the higher recent rate.

    The model skips a row for which pieces are copied, and reads the missed pieces the next time it drafts for the row.

    Args:
        decode: the model's drafting.
        sources: sources of copies; if several offer a copy, the one with the highest expected rate is used.
    """

    def __init__(self, decode: Decode, sources: Sequence[CopySource]) -> None:
        self._decode, self._sources = decode, sources

    @override
    def admit(self, row: SequenceState) -> None:
        self._decode.admit(row)
        for source in self._sources:
            source.admit(row)

    @override
    def release(self, row: SequenceState) -> None:
        self._decode.release(row)
        for source in self._sources:
            source.release(row)

    @override
    def __call__(self, batch: Sequence[SequenceState]) -> list[Draft]:
        copies = {row: copied for row in batch if (copied := self._choose_source(row))}
        drafts = self._decode(batch, skipped=copies.keys())
        return [
            self._make_copied_draft(row, *copies[row]) if row in copies else draft
            for row, draft in zip(batch, drafts, strict=True)
        ]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Update the policy and the sources with the block's verdicts. Called once per block, after verification."""
        if by_model := [one for one in verdicts if one.proposal.draft.source is DraftSource.MODEL]:
            self._decode.observe(by_model)
        for verdict in verdicts:
            for source in self._sources:
                source.observe(verdict)

    def resume_speculation(self) -> None:
        """Draft with the model again from the next block on. Copying is never paused."""
        self._decode.resume_speculation()

    def report(self) -> None:
        """Log how many drafts ended at a distribution that was not finite."""
        self._decode.report()

    @override
    def save(self, writer: SnapshotWriter) -> dict[str, Saved]:
        return {"decode": self._decode.save(writer), **{source.key: source.save() for source in self._sources}}

    @override
    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        """Restore the state of each source; a source that the saved run did not have starts without history."""
        state = reader.decode(dict[str, Saved], saved)
        self._decode.restore(state["decode"], reader)
        for source in self._sources:
            if source.key in state:
                source.restore(state[source.key], reader)
            for row in self._decode.admitted_rows:
                source.admit(row)

    def _choose_source(self, row: SequenceState) -> tuple[DraftSource, tuple[int, ...]] | None:
        """Return the source that drafts for a row in this block, and its pieces; None if the model drafts."""
        best: tuple[DraftSource, Offer] | None = None
        for source in self._sources:
            offer = source.offer(row)  # every source, as each observes the verdict
            if offer and (best is None or offer.rate > best[1].rate):
                best = source.source, offer
        return best and (best[0], best[1].pieces)

    def _make_copied_draft(self, row: SequenceState, source: DraftSource, pieces: tuple[int, ...]) -> Draft:
        model = self._decode.model
        draft_probs_KD = torch.zeros(
            len(pieces), model.vocabulary_size, dtype=self._decode.probs_dtype, device=model.device
        )
        draft_probs_KD[torch.arange(len(pieces)), torch.tensor(pieces)] = 1.0
        return Draft(row, pieces, draft_probs_KD, (0.0,) * len(pieces), None, (), source)
