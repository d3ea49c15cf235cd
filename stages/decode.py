"""Decode: the drafter proposes pieces after every row and keeps the law that each was drawn from.

Shapes: B rows, D drafter ids, W hidden width, F head features.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from stages.blocks import Draft, Row, Verdict
from stages.distributions import Sampling, entropy, laws_of, sample_rows
from stages.head import AcceptanceHead, piece_features
from stages.language_model import LanguageModel
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from stages.stopping import AlwaysDraft, Paying, StopRule


@dataclass
class _Growing:
    """The drafts of a batch while they grow, as lists per row; tensors are kept as they come, one per pass.

    Attributes:
        rows: whose drafts these are.
        pieces, entropies, survival: per row, per piece.
        going: per pass the numbers of the rows that drafted in it.
        laws_BD, features_BF: per pass, one line for each of these rows.
    """

    rows: Sequence[Row]
    pieces: list[list[int]]
    entropies: list[list[float]]
    survival: list[list[float]]
    going: list[Sequence[int]] = field(default_factory=list)
    laws_BD: list[Tensor] = field(default_factory=list)
    features_BF: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "_Growing":
        return cls(rows, [[] for _ in rows], [[] for _ in rows], [[] for _ in rows])

    def freeze(self, drafter_size: int, device: torch.device) -> list[Draft]:
        """Drafts, in the order of the rows: the tensors' lines sorted by row, each row's pieces in order."""
        if not self.going:
            nothing_KD = torch.zeros(0, drafter_size, device=device)
            return [Draft(row, (), nothing_KD, (), None, ()) for row in self.rows]
        owners = list(chain(*self.going))
        order = torch.tensor(sorted(range(len(owners)), key=owners.__getitem__), device=device)
        lengths = list(map(len, self.pieces))
        laws_KD = torch.cat(self.laws_BD)[order].split(lengths)
        features_KF = torch.cat(self.features_BF)[order].split(lengths)
        columns = zip(self.rows, self.pieces, laws_KD, self.entropies, features_KF, self.survival, strict=True)
        return [
            Draft(row, tuple(pieces), laws, tuple(entropies), features, tuple(survival))
            for row, pieces, laws, entropies, features, survival in columns
        ]


class Decode:
    """Rows to drafts.

    Args:
        model: the drafter, unmodified.
        head: estimates acceptance.
        stop_rule: decides on one more piece.
        sampling: the transform of the drafter's logits; its result is the recorded law. A row with one of its own is
            drafted by that: a drafter that samples as the target does is accepted oftenest.
        allowed: pieces that may be drafted at all: those that spell some target token.
        max_draft: most pieces of a draft; 0 never drafts.
        end: the drafter's end of sequence, after which nothing is drafted, or None.
        law_dtype: precision of the laws.
        paying: decides whether a block drafts at all; by default it always does.
    """

    def __init__(
        self,
        model: LanguageModel,
        head: AcceptanceHead,
        stop_rule: StopRule,
        sampling: Sampling,
        allowed: Collection[int],
        max_draft: int,
        end: int | None,
        law_dtype: torch.dtype = torch.float32,
        paying: Paying | None = None,
    ) -> None:
        self.model, self.head, self.max_draft = model, head, max_draft
        self._stop_rule, self._sampling, self._end, self._law_dtype = stop_rule, sampling, end, law_dtype
        self._paying = paying or AlwaysDraft()
        self._forbidden_D = model.mask_without(allowed)
        model.restrict(allowed)
        self._read: dict[Row, list[int]] = {}
        self._agreed: dict[Row, int] = {}  # how much of it is part of the row for good

    def admit(self, row: Row) -> None:
        """Read the prompt, if anything will be drafted."""
        self.model.admit(row, row.pieces if self.max_draft else row.pieces[:1])
        self._read[row] = row.pieces[: self.model.length(row)]
        self._agreed[row] = len(self._read[row])

    def release(self, row: Row) -> None:
        """Free the row's keys and values."""
        self.model.release(row)
        del self._read[row], self._agreed[row]

    @property
    def rows(self) -> Collection[Row]:
        """Those admitted now."""
        return self._read.keys()

    def save(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`."""
        kept = [(row, read) for row, read in self._read.items() if keep.keeps(row)]
        rows = [[keep.row(row), list(read), self._agreed[row]] for row, read in kept]
        return {"model": self.model.save_rows(keep), "rows": rows, "paying": self._paying.save()}

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        self.model.restore_rows(saved["model"], kept)
        self._read = {kept.row(number): read for number, read, _ in saved["rows"]}
        self._agreed = {kept.row(number): agreed for number, _, agreed in saved["rows"]}
        self._paying.restore(saved["paying"])

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """What became of the block: it decides whether drafting goes on paying."""
        lengths = [len(verdict.proposal.draft.pieces) for verdict in verdicts]
        self._paying.observe(lengths, sum(len(verdict.emitted) for verdict in verdicts))

    @torch.inference_mode()
    def __call__(self, batch: Sequence[Row], resting: Collection[Row] = ()) -> list[Draft]:
        """Draft after each row until its stop rule, its room or `max_draft` says stop; nothing where that does not pay.

        Args:
            batch: all admitted rows.
            resting: those that are not to be read: their drafts are empty.
        """
        growing = _Growing.of(batch)
        rests = not self._paying.drafts()
        going = [] if rests else [n for n, row in enumerate(batch) if row not in resting and self._may_draft(row)]
        fed = {number: self._unread(batch[number]) for number in going}
        while going:
            self._extend(growing, going, *self._forward(batch, fed))
            open_rows = [number for number in going if self._has_room(growing.pieces[number], batch[number])]
            going = sorted(self._stop_rule.going_on(growing.survival, open_rows))
            fed = {number: growing.pieces[number][-1:] for number in going}
        return growing.freeze(len(self._forbidden_D), self.model.device)

    def _may_draft(self, row: Row) -> bool:
        """Whether there is anything to draft for, and a whole draft fits into the drafter's context for sure."""
        return min(self.max_draft, row.room) > 0 and len(row.pieces) + self.max_draft <= self.model.max_length

    def _has_room(self, pieces: Sequence[int], row: Row) -> bool:
        return len(pieces) < min(self.max_draft, row.room) and pieces[-1] != self._end

    def _unread(self, row: Row) -> list[int]:
        """Roll the model back to what is still true of a row and return what it has not read: one piece or more."""
        read, known = self._read[row], self._agreed[row]
        while known < len(read) and known < len(row.pieces) - 1 and read[known] == row.pieces[known]:
            known += 1
        self.model.roll_back(row, known)
        del read[known:]
        self._agreed[row] = known
        return row.pieces[known:]

    def _forward(self, batch: Sequence[Row], fed: Mapping[int, Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Logits and hidden states behind what is fed, of the fed rows alone."""
        for number, pieces in fed.items():
            self._read[batch[number]].extend(pieces)
        given = [fed.get(number, ()) for number in range(len(batch))]
        return self.model.forward(batch, given, [int(bool(pieces)) for pieces in given], hidden=True)

    def _extend(self, growing: _Growing, going: Sequence[int], logits_BD: Tensor, hidden_BW: Tensor) -> None:
        """Draw one piece for every row that goes on."""
        index = len(growing.going)
        rows = [growing.rows[number] for number in going]
        samplings = [row.sampling or self._sampling for row in rows]
        laws_BD = laws_of(logits_BD.masked_fill(self._forbidden_D, -torch.inf), samplings, self._law_dtype)
        pieces_B = sample_rows(laws_BD, [row.draws for row in rows])
        entropies_B = entropy(laws_BD)
        probability_B = laws_BD.gather(1, pieces_B[:, None])[:, 0]
        features_BF = piece_features(hidden_BW.float(), probability_B.float(), entropies_B.float(), index)
        estimates_B = self.head(features_BF).sigmoid()
        values = torch.stack([pieces_B.double(), entropies_B.double(), estimates_B.double()])
        for number, piece, spread, estimate in zip(going, *values.tolist(), strict=True):
            growing.pieces[number].append(int(piece))
            growing.entropies[number].append(spread)
            survival = growing.survival[number]
            survival.append(estimate * (survival[-1] if survival else 1.0))
        growing.going.append(going)
        growing.laws_BD.append(laws_BD)
        growing.features_BF.append(features_BF)
