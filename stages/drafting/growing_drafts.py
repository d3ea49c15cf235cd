"""The drafts of a batch while the drafter makes them, pass by pass, and what becomes of them: one draft per row.

Shapes: B rows, K pieces of a draft, N lines of all rows, D drafter ids, F head features.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from stages.contract.blocks import AlternativePieces, Draft, SequenceState


@dataclass
class GrowingDrafts:
    """The drafts of a batch during drafting: lists per row, and one tensor per drafter pass."""

    rows: Sequence[SequenceState]  # the B rows of the batch
    greedy: Sequence[bool]  # per row whether its pieces are the likeliest ones, so that their distributions are one-hot
    # pieces, entropies, survival: per row, per piece
    pieces: list[list[int]]
    entropies: list[list[float]]
    survival: list[list[float]]
    active: list[Sequence[int]] = field(default_factory=list)  # per pass the numbers of the rows that drafted in it
    features_BF: list[Tensor] = field(default_factory=list)  # per pass, one line for each of these rows
    sampled: list[Sequence[int]] = field(default_factory=list)  # per pass those of these rows that are not greedy
    draft_probs_BD: list[Tensor] = field(default_factory=list)  # per pass with such rows, one line for each of them
    # of rows whose drafts may become trees, per piece the next likeliest ones
    alternatives: dict[int, list[AlternativePieces]] = field(default_factory=dict)

    @classmethod
    def from_rows(cls, rows: Sequence[SequenceState], greedy: Sequence[bool]) -> "GrowingDrafts":
        """Begin empty drafts. `greedy`: as the attribute."""
        return cls(rows, greedy, [[] for _ in rows], [[] for _ in rows], [[] for _ in rows])

    @property
    def lengths(self) -> list[int]:
        """The number of pieces of each row's draft."""
        return list(map(len, self.pieces))

    def add(self, active: Sequence[int], features_BF: Tensor, values: Sequence[tuple[float, float, float]]) -> None:
        """Append one piece to the draft of each active row."""
        for number, (piece, spread, estimate) in zip(active, values, strict=True):
            self.pieces[number].append(int(piece))
            self.entropies[number].append(spread)
            survival = self.survival[number]
            survival.append(estimate * (survival[-1] if survival else 1.0))
        self.active.append(active)
        self.features_BF.append(features_BF)

    def add_probs(self, sampled: Sequence[int], draft_probs_BD: Tensor) -> None:
        """Append the distributions that the last pieces of the rows that are not greedy were drawn from."""
        if sampled:
            self.sampled.append(sampled)
            self.draft_probs_BD.append(draft_probs_BD)

    def freeze(
        self, drafter_size: int, dtype: torch.dtype, device: torch.device, droppable: Collection[int] = ()
    ) -> list[Draft]:
        """Return one draft per row, in the order of the rows. `droppable`: numbers of those that may be cut."""
        if not self.active:
            nothing_KD = torch.zeros(0, drafter_size, dtype=dtype, device=device)
            return [Draft(row, (), nothing_KD, (), None, ()) for row in self.rows]
        features_KF = _join_by_row(self.active, self.features_BF, len(self.rows))
        one_hot_KD = self._one_hot_probs(drafter_size, dtype, device)
        drawn_KD = _join_by_row(self.sampled, self.draft_probs_BD, len(self.rows)) if self.sampled else one_hot_KD
        both = zip(self.greedy, one_hot_KD, drawn_KD, strict=True)
        draft_probs_KD = [certain if greedy else drawn for greedy, certain, drawn in both]
        columns = zip(self.rows, self.pieces, draft_probs_KD, self.entropies, features_KF, self.survival, strict=True)
        drafts = [
            Draft(row, tuple(pieces), distributions, tuple(entropies), features, tuple(survival))
            for row, pieces, distributions, entropies, features, survival in columns
        ]
        return [
            replace(draft, alternatives=tuple(self.alternatives.get(number, ())), droppable=number in droppable)
            for number, draft in enumerate(drafts)
        ]

    def _one_hot_probs(self, drafter_size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Return per row the distributions of its pieces, which have all mass; those of other rows are empty."""
        own = [pieces if greedy else [] for pieces, greedy in zip(self.pieces, self.greedy, strict=True)]
        pieces_N1 = torch.tensor(list(chain(*own)), dtype=torch.long, device=device)[:, None]
        probs_ND = torch.zeros(len(pieces_N1), drafter_size, dtype=dtype, device=device).scatter_(1, pieces_N1, 1.0)
        return list(probs_ND.split(list(map(len, own))))


def _join_by_row(owners: Sequence[Sequence[int]], passes_BX: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Return per row its lines of all passes, in order. `owners` has the number of the row of each line."""
    joined = list(chain(*owners))
    lengths = [joined.count(row) for row in range(rows)]
    lines_NX = torch.cat(list(passes_BX))
    if max(lengths) < len(joined):  # else they are all of one row
        order = sorted(range(len(joined)), key=joined.__getitem__)
        lines_NX = lines_NX[torch.tensor(order, device=lines_NX.device)]
    return list(lines_NX.split(lengths))
