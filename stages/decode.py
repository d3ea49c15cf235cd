"""Decode: the drafter proposes pieces after every row and keeps the law that each was drawn from.

Shapes: B rows, D drafter ids, W hidden width, F head features.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from stages.blocks import Draft, Row
from stages.distributions import Sampling, entropy, sample_rows
from stages.head import AcceptanceHead, StopRule, piece_features
from stages.language_model import LanguageModel

LOOK_BACK = 64  # what was read and may have been rejected: the longest draft that settings allow


@dataclass
class _Growing:
    """A draft while it grows."""

    pieces: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    resting: bool = False

    def add(self, piece: int, law_D: Tensor, entropy: float, features_F: Tensor, estimate: float) -> None:
        self.pieces.append(piece)
        self.laws.append(law_D)
        self.entropies.append(entropy)
        self.features.append(features_F)
        self.survival.append(estimate * (self.survival[-1] if self.survival else 1.0))

    def freeze(self, row: Row, drafter_size: int) -> Draft:
        laws_KD = torch.stack(self.laws) if self.laws else torch.zeros(0, drafter_size)
        features_KF = torch.stack(self.features) if self.features else None
        return Draft(row, tuple(self.pieces), laws_KD, tuple(self.entropies), features_KF, tuple(self.survival))


class Decode:
    """Rows to drafts.

    Args:
        model: the drafter, unmodified.
        head: estimates acceptance.
        stop_rule: decides on one more piece.
        sampling: the transform of the drafter's logits; its result is the recorded law.
        allowed: pieces that may be drafted at all: those that spell some target token.
        max_draft: most pieces of a draft; 0 never drafts.
        end: the drafter's end of sequence, after which nothing is drafted, or None.
        law_dtype: precision of the laws.
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
    ) -> None:
        self.model, self.head, self.max_draft = model, head, max_draft
        self._stop_rule, self._sampling, self._end, self._law_dtype = stop_rule, sampling, end, law_dtype
        self._forbidden_D = model.mask_without(allowed)
        self._read: dict[Row, list[int]] = {}

    def admit(self, row: Row) -> None:
        """Read the prompt."""
        self.model.admit(row, row.pieces)
        self._read[row] = row.pieces[: self.model.length(row)]

    def release(self, row: Row) -> None:
        """Free the row's keys and values."""
        self.model.release(row)
        del self._read[row]

    @torch.inference_mode()
    def __call__(self, batch: Sequence[Row]) -> list[Draft]:
        """Draft after each row until its stop rule, its room or `max_draft` says stop."""
        growing = [_Growing(resting=self._is_full(row)) for row in batch]
        limit = max((min(self.max_draft, row.room) for row in batch), default=0)
        if limit == 0 or all(draft.resting for draft in growing):
            return [draft.freeze(row, len(self._forbidden_D)) for draft, row in zip(growing, batch, strict=True)]
        fed = [[] if draft.resting else self._unread(row) for draft, row in zip(growing, batch, strict=True)]
        for index in range(limit):
            logits_B1D, hidden_B1W = self._forward(batch, fed)
            self._extend(batch, growing, index, logits_B1D[:, -1], hidden_B1W[:, -1])
            for draft, row in zip(growing, batch, strict=True):
                draft.resting = draft.resting or self._rests(draft, row)
            if all(draft.resting for draft in growing):
                break
            fed = [[] if draft.resting else draft.pieces[-1:] for draft in growing]
        return [draft.freeze(row, len(self._forbidden_D)) for draft, row in zip(growing, batch, strict=True)]

    def _is_full(self, row: Row) -> bool:
        """Whether a whole draft might not fit into the drafter's context any more: then the target goes on alone."""
        return len(row.pieces) + self.max_draft > self.model.max_length

    def _unread(self, row: Row) -> list[int]:
        """Roll the model back to what is still true of a row and return what it has not read: one piece or more."""
        read = self._read[row]
        start = max(0, len(read) - LOOK_BACK)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(read[start:], row.pieces[start:], strict=False))
        known = min(start + sum(1 for _ in same), len(row.pieces) - 1)
        self.model.roll_back(row, known)
        del read[known:]
        return row.pieces[known:]

    def _forward(self, batch: Sequence[Row], fed: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        for row, pieces in zip(batch, fed, strict=True):
            self._read[row].extend(pieces)
        return self.model.forward(batch, fed, keep=1, hidden=True)

    def _extend(
        self, batch: Sequence[Row], growing: Sequence[_Growing], index: int, logits_BD: Tensor, hidden_BW: Tensor
    ) -> None:
        """Draw one piece for every row that does not rest."""
        active = [number for number, draft in enumerate(growing) if not draft.resting]
        if len(active) < len(growing):
            logits_BD, hidden_BW = logits_BD[active], hidden_BW[active]
        laws_BD = self._sampling.law(logits_BD.masked_fill(self._forbidden_D, -torch.inf), self._law_dtype)
        pieces_B = sample_rows(laws_BD, [batch[number].draws for number in active])
        entropies_B = entropy(laws_BD)
        probability_B = laws_BD.gather(1, pieces_B[:, None])[:, 0]
        features_BF = piece_features(hidden_BW.float(), probability_B.float(), entropies_B.float(), index)
        estimates_B = self.head(features_BF).sigmoid()
        values = torch.stack([pieces_B.double(), entropies_B.double(), estimates_B.double()]).tolist()
        for place, number in enumerate(active):
            piece, spread, estimate = (column[place] for column in values)
            growing[number].add(int(piece), laws_BD[place], spread, features_BF[place], estimate)

    def _rests(self, draft: _Growing, row: Row) -> bool:
        if len(draft.pieces) >= min(self.max_draft, row.room) or draft.pieces[-1] == self._end:
            return True
        return not self._stop_rule.goes_on(tuple(draft.survival))
