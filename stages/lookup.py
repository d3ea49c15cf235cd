"""Lookup: a second drafter that costs nothing. Where a text repeats itself, what followed the last time is drafted.

Known as prompt lookup (Saxena 2023) or LLMA (arXiv 2304.04487). A copied piece has probability 1 under its law, so the
rules of verification hold as they are, at any temperature. Which of the two drafts is chosen from the past alone: a
choice that looked at what the model draws now would change the law that the model's pieces were drawn from.

Shapes: K pieces of a draft, D ids of the drafter's vocabulary.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from stages.blocks import Draft, Row, Verdict
from stages.costs import Costs
from stages.decode import Decode
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from stages.suffix_index import Match, SuffixIndex, continuation
from store.events import Outcome

# Matches of 2, 3, 4-5, 6-8, 9-16 and more pieces are told apart.
LENGTH_EDGES = (3, 4, 6, 9, 17)
EVERY_MODEL_TURN = 32  # after so many lookups in a row at matches of one length the model drafts, to be compared


@dataclass
class _Ratio:
    """A ratio of two sums in which what is older counts less. It starts as a guess of some weight."""

    above: float
    below: float
    keep: float

    def add(self, above: float, below: float) -> None:
        self.above = self.keep * self.above + above
        self.below = self.keep * self.below + below

    @property
    def value(self) -> float:
        return self.above / self.below

    def save(self) -> Json:
        return [self.above, self.below]

    def restore(self, saved: Json) -> None:
        self.above, self.below = saved


class Payoff:
    """What a block brings by either drafter, in pieces accepted (and one emitted besides) per target pass spent.

    A copied piece is judged in every block, also when the model drafted: what was emitted shows whether it would have
    been accepted. So lookups are learned about without being tried. The chance of a copied piece depends on how many
    before it are known to repeat, the copied ones included.

    Args:
        costs: of passes.
        rows: of a batch; they are taken to do alike.
    """

    def __init__(self, costs: Costs, rows: int = 1) -> None:
        self._costs, self._rows, self._pass = costs, rows, costs.verifying(rows)
        buckets = range(len(LENGTH_EDGES) + 1)
        self._copied = [_Ratio(0.8, 4.0, 0.98) for _ in buckets]  # pessimistic: the model drafts and copies are judged
        self._model = _Ratio(5.0, 4.0, 0.95)
        self._model_at = [_Ratio(0.0, 0.0, 0.95) for _ in buckets]
        self._turns = [0 for _ in buckets]

    def best(self, match: int, most: int) -> int:
        """How many pieces to copy after a match of that length, `most` at most; 0 where the model does better."""
        length, rate, chance, accepted = 0, 1.0, 1.0, 0.0
        for count in range(1, most + 1):
            chance *= self._copied[_bucket(match + count - 1)].value
            accepted += chance
            new_rate = (1 + accepted) * self._pass / self._costs.verifying(self._rows * (1 + count))
            if new_rate > rate:
                length, rate = count, new_rate
        due = self._turns[_bucket(match)] >= EVERY_MODEL_TURN
        return 0 if due or rate <= self._of_model(match) else length

    def _of_model(self, match: int) -> float:
        """The model's rate at matches of that length, leaning on its rate everywhere while little is known."""
        here, weight = self._model_at[_bucket(match)], 4
        return (here.above + weight * self._model.value) / (here.below + weight)

    def note_copy(self, match: int, copied: Sequence[int], emitted: Sequence[int]) -> None:
        """A copy that was or could have been drafted, and the pieces emitted instead of it or by it."""
        for number, (piece, true) in enumerate(zip(copied, emitted, strict=False)):
            self._copied[_bucket(match + number)].add(float(piece == true), 1.0)
            if piece != true:
                return

    def note_lookup(self, match: int) -> None:
        """A lookup was drafted."""
        self._turns[_bucket(match)] += 1

    def note_model(self, match: int | None, drafted: int, accepted: int) -> None:
        """The model drafted so many pieces, of which so many were accepted, with or without a match."""
        found = 1.0 + accepted, self._costs.block([drafted] * self._rows) / self._pass
        self._model.add(*found)
        if match is not None:
            self._model_at[_bucket(match)].add(*found)
            self._turns[_bucket(match)] = 0

    def save(self) -> Json:
        """See `stages.snapshot`."""
        return {"ratios": [ratio.save() for ratio in self._ratios()], "turns": list(self._turns)}

    def restore(self, saved: Json) -> None:
        """See `stages.snapshot`."""
        for ratio, value in zip(self._ratios(), saved["ratios"], strict=True):
            ratio.restore(value)
        self._turns = list(saved["turns"])

    def _ratios(self) -> list[_Ratio]:
        return [*self._copied, self._model, *self._model_at]


def _bucket(match: int) -> int:
    return bisect_right(LENGTH_EDGES, match)


@dataclass(frozen=True)
class LookupDraft(Draft):
    """A draft that was copied from the row's own text. Its laws are certain; it has no features and no survival."""


@dataclass
class _Trail:
    """What is kept of a row: its index, and what a lookup would draft in the present block."""

    index: SuffixIndex
    match: Match | None = None
    copied: tuple[int, ...] = ()
    length: int = 0  # pieces of the row when it was last drafted for


class DecodeOrLookup:
    """Rows to drafts, by a model or by lookup, whichever has paid better of late.

    A row that is looked up rests in the model, which reads what it missed when its turn comes. Like the cache of
    n-grams the payoff changes between blocks alone, in `observe`.

    Args:
        decode: the model's drafting.
        payoff: what either way brings; one per target.
        allowed: pieces that may be drafted at all.
        drafter_size: D.
        max_draft: most pieces copied.
        law_dtype: precision of the laws.
    """

    def __init__(
        self,
        decode: Decode,
        payoff: Payoff,
        allowed: Collection[int],
        drafter_size: int,
        max_draft: int,
        law_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._decode, self._payoff, self._allowed = decode, payoff, frozenset(allowed)
        self._drafter_size, self._max_draft, self._law_dtype = drafter_size, max_draft, law_dtype
        self._trails: dict[Row, _Trail] = {}

    def admit(self, row: Row) -> None:
        """Read the prompt."""
        self._decode.admit(row)
        self._trails[row] = _Trail(SuffixIndex())

    def release(self, row: Row) -> None:
        """Forget the row."""
        self._decode.release(row)
        del self._trails[row]

    def __call__(self, batch: Sequence[Row]) -> list[Draft]:
        """Draft after each row."""
        copies = {row: copied for row in batch if (copied := self._chosen(row))}
        drafts = self._decode(batch, resting=copies.keys())
        return [
            self._lookup_draft(row, copies[row]) if row in copies else draft
            for row, draft in zip(batch, drafts, strict=True)
        ]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Learn what became of the block's drafts. Called once per block, after verification."""
        if by_model := [one for one in verdicts if not isinstance(one.proposal.draft, LookupDraft)]:
            self._decode.observe(by_model)
        for verdict in verdicts:
            draft = verdict.proposal.draft
            trail = self._trails[draft.row]
            match = trail.match.length if trail.match else None
            if match is not None:
                self._payoff.note_copy(match, trail.copied, draft.row.pieces[trail.length :])
            if match is not None and isinstance(draft, LookupDraft):
                self._payoff.note_lookup(match)
            else:
                self._payoff.note_model(match, len(draft.pieces), _accepted_pieces(verdict))

    def save(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`. The trails follow from the rows' texts."""
        return {"decode": self._decode.save(keep), "payoff": self._payoff.save()}

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        self._decode.restore(saved["decode"], kept)
        self._payoff.restore(saved["payoff"])
        self._trails = {row: _Trail(SuffixIndex()) for row in self._decode.rows}

    def _chosen(self, row: Row) -> tuple[int, ...]:
        """The pieces to copy in this block; none where there is no match or the model does better."""
        trail = self._trails[row]
        trail.index.read(row.pieces)
        trail.match, trail.copied, trail.length = trail.index.find(row.pieces), (), len(row.pieces)
        if trail.match is None:
            return ()
        copied = continuation(row.pieces, trail.match.place, min(self._max_draft, row.room))
        trail.copied = tuple(takewhile(self._allowed.__contains__, copied))
        return trail.copied[: self._payoff.best(trail.match.length, len(trail.copied))]

    def _lookup_draft(self, row: Row, pieces: tuple[int, ...]) -> LookupDraft:
        laws_KD = torch.zeros(len(pieces), self._drafter_size, dtype=self._law_dtype, device=self._decode.model.device)
        laws_KD[torch.arange(len(pieces)), torch.tensor(pieces)] = 1.0
        return LookupDraft(row, pieces, laws_KD, (0.0,) * len(pieces), None, ())


def _accepted_pieces(verdict: Verdict) -> int:
    """How many pieces of the draft became accepted tokens."""
    ends = [
        decision.proposed.stop
        for decision in verdict.decisions
        if decision.proposed and decision.outcome is Outcome.ACCEPTED
    ]
    return max(ends, default=0)
