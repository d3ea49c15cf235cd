"""Lessons: what one finished prompt teaches, gathered block by block."""

from dataclasses import dataclass, field
from math import prod

import torch

from stages.blocks import STOP, Branch, Decision, Label, Lesson, Row, Teaching, Verdict
from stages.lookup import LookupDraft
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from store.events import Outcome, Translation


def _piece_acceptances(decision: Decision) -> dict[int, float]:
    """Per drafted piece (index in the draft) the chance with which the tests that it decided were passed.

    The test of a STOP belongs to the piece that was looked at; where the pieces ran out, to the token's last.
    """
    found: dict[int, float] = {}
    proposed = decision.proposed
    if proposed is None or decision.outcome not in (Outcome.ACCEPTED, Outcome.REJECTED):
        return found
    judged = proposed.tests[: decision.passed_levels + (decision.outcome is Outcome.REJECTED)]
    for test, drafter, target in zip(judged, decision.drafter_levels, decision.target_levels, strict=False):
        piece = proposed.stop - 1 if test.option == STOP and test.law is None else test.law
        if piece is not None:
            found[piece] = found.get(piece, 1.0) * min(1.0, target / drafter)
    return found


def labels_of(verdict: Verdict) -> list[Label]:
    """One label per judged piece of a block."""
    draft = verdict.proposal.draft
    if draft.features_KF is None:
        return []
    acceptance: dict[int, list[float]] = {}
    for decision in verdict.decisions:
        for piece, chance in _piece_acceptances(decision).items():
            acceptance.setdefault(piece, []).append(chance)
    # Copies: a view would keep, and carry to another process, the features of the whole batch.
    return [Label(draft.features_KF[piece].clone(), prod(chances)) for piece, chances in sorted(acceptance.items())]


def _ngram_positions(verdict: Verdict) -> list[int]:
    """Where in the row's pieces the accepted n-grams of a block lie."""
    begins = [teaching.position for teaching in verdict.teachings if teaching.depth == 0]
    found: list[int] = []
    for begin, decision in zip(begins, verdict.decisions, strict=False):
        proposed = decision.proposed
        if decision.outcome is Outcome.ACCEPTED and proposed and proposed.translation is Translation.NGRAM:
            found += range(begin, begin + proposed.stop - proposed.start)
    return found


@dataclass
class Notebook:
    """Notes on one row while it is in flight."""

    teachings: list[Teaching] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    ngram_positions: list[int] = field(default_factory=list)
    judged: int = 0
    branches: list[Branch] = field(default_factory=list)

    def note(self, verdict: Verdict) -> None:
        """Add a block's teaching and labels."""
        self.teachings += verdict.teachings
        self.labels += labels_of(verdict)
        self.ngram_positions += _ngram_positions(verdict)
        if not isinstance(verdict.proposal.draft, LookupDraft):  # what the drafter gained shows in its own drafts
            self.judged += verdict.judged
        if verdict.branch:
            self.branches.append(verdict.branch)

    def lesson(self, row: Row, target: str) -> Lesson:
        """The whole prompt as a lesson in that target's laws."""
        return Lesson(
            row.offset,
            target,
            tuple(row.pieces),
            tuple(self.teachings),
            tuple(self.labels),
            tuple(self.ngram_positions),
            self.judged,
            tuple(self.branches),
        )

    def save(self, row: Row, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`."""
        features = [label.features_F for label in self.labels]
        return {
            "lesson": keep.lesson(self.lesson(row, "")),
            "features": keep.tensor(torch.stack(features)) if features else None,
            "acceptances": [label.acceptance for label in self.labels],
        }

    @classmethod
    def restored(cls, saved: Json, kept: SnapshotReader) -> "Notebook":
        """What goes on where `save` was called."""
        lesson = kept.lesson(saved["lesson"])
        features = () if saved["features"] is None else kept.tensor(saved["features"])
        labels = list(map(Label, features, saved["acceptances"]))
        noted = list(lesson.teachings), labels, list(lesson.ngram_positions), lesson.judged, list(lesson.branches)
        return cls(*noted)
