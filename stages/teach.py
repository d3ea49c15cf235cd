"""Teaching: the target's law, pushed down to drafter pieces, at every emitted token and, if wanted, behind rejections.

Every target token lands on its first piece, so at the beginning of a token the target's law is a complete
distribution over the drafter's vocabulary: nothing has to be aligned. Along a token of several pieces the law goes on
as conditionals. Only the likeliest pieces are kept; the rest is one number.

The teacher has a temperature of its own. At that of greedy decoding a law says nothing about what is nearly right; at 1
it says too little about what is right, and a token with many relatives outweighs a likelier one (measurements in
docs/experiments.md; the paper does not state its choice).

Shapes: N positions, V target tokens, D drafter ids, T kept pieces.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stages.blocks import Branch, Decision, Proposal, Teaching
from stages.pair import Pair
from store.events import Outcome


class Told(NamedTuple):
    """What one block teaches about one row."""

    teachings: tuple[Teaching, ...] = ()  # at every emitted token, in order
    branch: Branch | None = None


class Teacher(Protocol):
    """Makes teaching of the target's logits. Called once per block, before the rows are extended; pure."""

    def __call__(
        self,
        batch: Sequence[Proposal],
        outcomes: Sequence[tuple[Decision, ...]],
        logits_NV: Tensor,
        starts: Sequence[int],
    ) -> list[Told]:
        """What each row is taught.

        Args:
            batch: the proposals.
            outcomes: per row the decisions that happened.
            logits_NV: the target's, rows joined; row i has those from `starts[i]`, one per verifiable token and one
                behind the last.
        """
        ...


class PieceIndex:
    """All target tokens in the order of their pieces: the tokens below a prefix are one range."""

    def __init__(self, pair: Pair) -> None:
        spelt = sorted((pieces, token) for token, pieces in enumerate(pair.pieces) if pieces)
        self._pieces = [pieces for pieces, _ in spelt]
        self.tokens = [token for _, token in spelt]

    def below(self, prefix: tuple[int, ...]) -> range:
        """Places of the tokens whose pieces begin with `prefix`."""
        after = (*prefix[:-1], prefix[-1] + 1)
        return range(bisect_left(self._pieces, prefix), bisect_left(self._pieces, after))

    def next_pieces(self, places: range, depth: int) -> list[tuple[int | None, range]]:
        """Divide a range by the piece at `depth`; None for the token that ends before it."""

        def piece_at(place: int) -> int | None:
            pieces = self._pieces[place]
            return pieces[depth] if len(pieces) > depth else None

        groups = [(piece, list(found)) for piece, found in groupby(places, piece_at)]
        return [(piece, range(found[0], found[-1] + 1)) for piece, found in groups]


class PushDown:
    """Makes teaching of the target's logits.

    Args:
        pair: the two vocabularies.
        kept: T, pieces kept of each law.
        device: of the target's logits.
        temperature: of the laws that are taught, above 0.
        off_policy: whether to teach behind the first rejection too: the target computed its laws there all the same.
    """

    def __init__(
        self, pair: Pair, kept: int, device: torch.device, *, temperature: float = 1.0, off_policy: bool = False
    ) -> None:
        self._temperature = temperature
        self._pair, self._kept, self._index, self._off_policy = pair, kept, PieceIndex(pair), off_policy
        first = [pieces[0] if pieces else pair.drafter_size for pieces in pair.pieces]
        self._first_piece_V = torch.tensor(first, device=device)
        self._is_direct_V = torch.tensor(
            [pieces is not None and len(pieces) == 1 for pieces in pair.pieces], device=device
        )

    @torch.inference_mode()
    def __call__(
        self,
        batch: Sequence[Proposal],
        outcomes: Sequence[tuple[Decision, ...]],
        logits_NV: Tensor,
        starts: Sequence[int],
    ) -> list[Told]:
        """See `Teacher`."""
        emitted = [tuple(d.emitted for d in decisions if d.emitted is not None) for decisions in outcomes]
        begins = [len(proposal.draft.row.pieces) for proposal in batch]
        told = self._along(begins, emitted, logits_NV, starts)
        branches: list[Branch | None] = [None] * len(batch)
        if self._off_policy:
            branches = self._branches(batch, outcomes, logits_NV, starts)
        return [Told(teachings, branch) for teachings, branch in zip(told, branches, strict=True)]

    def _along(
        self, begins: Sequence[int], paths: Sequence[Sequence[int]], logits_NV: Tensor, starts: Sequence[int]
    ) -> list[tuple[Teaching, ...]]:
        """Teaching at each token of a path per row: its first piece, then what follows in the token.

        Args:
            begins: per row the position of the path's first piece.
            paths: target tokens per row; the law at the i-th is `logits_NV[starts[row] + i]`.
        """
        places = [start + i for start, path in zip(starts, paths, strict=False) for i in range(len(path))]
        laws_NV = (logits_NV[places].float() / self._temperature).softmax(-1)[:, : len(self._pair.pieces)]
        firsts, laws = iter(self._first_level(laws_NV)), iter(laws_NV)
        taught = []
        for position, path in zip(begins, paths, strict=True):
            of_row: list[Teaching] = []
            for token in path:
                of_row.append(Teaching(position, 0, *next(firsts)))
                of_row += self._deeper_levels(position, token, next(laws))
                position += len(self._pair.context[token])
            taught.append(tuple(of_row))
        return taught

    def _branches(
        self,
        batch: Sequence[Proposal],
        outcomes: Sequence[tuple[Decision, ...]],
        logits_NV: Tensor,
        starts: Sequence[int],
    ) -> list[Branch | None]:
        """Per row the branch from its rejected token on, if the target read anything there."""
        rejected = [_rejected(proposal, decisions) for proposal, decisions in zip(batch, outcomes, strict=True)]
        cut = [
            (0, ()) if index is None else (proposal.tokens[index].start, proposal.verifiable[index + 1 :])
            for proposal, index in zip(batch, rejected, strict=True)
        ]
        begins = [
            0 if index is None else len(proposal.draft.row.pieces) + proposal.tokens[index].stop
            for proposal, index in zip(batch, rejected, strict=True)
        ]
        behind = [start + (index or 0) + 1 for start, index in zip(starts, rejected, strict=False)]
        taught = self._along(begins, [path for _, path in cut], logits_NV, behind)
        return [
            Branch(
                len(proposal.draft.row.pieces) + start,
                proposal.draft.pieces[start : proposal.tokens[len(proposal.verifiable) - 1].stop],
                teachings,
            )
            if teachings
            else None
            for proposal, (start, _), teachings in zip(batch, cut, taught, strict=True)
        ]

    def _first_level(
        self, laws_NV: Tensor
    ) -> list[tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...], float]]:
        """(ids, group, direct, rest) of each law."""
        zeros_ND = laws_NV.new_zeros(len(laws_NV), self._pair.drafter_size + 1)
        index_NV = self._first_piece_V.expand_as(laws_NV)
        group_ND = zeros_ND.scatter_add(1, index_NV, laws_NV)[:, :-1]
        direct_ND = zeros_ND.scatter_add(1, index_NV, laws_NV * self._is_direct_V)[:, :-1]
        top = group_ND.topk(min(self._kept, group_ND.shape[1]))
        rows = zip(top.indices.tolist(), top.values.tolist(), direct_ND.gather(1, top.indices).tolist(), strict=True)
        return [(tuple(ids), tuple(group), tuple(direct), max(0.0, 1 - sum(group))) for ids, group, direct in rows]

    def _deeper_levels(self, position: int, token: int, law_V: Tensor) -> list[Teaching]:
        pieces = self._pair.pieces[token] or ()
        return [self._conditional(position + depth, pieces[:depth], law_V) for depth in range(1, len(pieces))]

    def _conditional(self, position: int, prefix: tuple[int, ...], law_V: Tensor) -> Teaching:
        """The target's law over the next piece of a token that begins with `prefix`; `rest` is that it ends there."""
        places = self._index.below(prefix)
        tokens = self._index.tokens[places.start : places.stop]
        masses = dict(zip(places, law_V[tokens].double().tolist(), strict=True))
        total = sum(masses.values()) or 1.0
        divided = self._index.next_pieces(places, len(prefix))
        options = sorted(
            ((sum(masses[place] for place in below) / total, piece) for piece, below in divided if piece is not None),
            reverse=True,
        )[: self._kept]
        ids, group = tuple(piece for _, piece in options), tuple(mass for mass, _ in options)
        return Teaching(position, len(prefix), ids, group, (0.0,) * len(ids), max(0.0, 1 - sum(group)))


def _rejected(proposal: Proposal, decisions: Sequence[Decision]) -> int | None:
    """Index of the rejected token, if it has a name: then the target read it."""
    found = next((one.index for one in decisions if one.outcome is Outcome.REJECTED), None)
    return found if found is not None and found < len(proposal.verifiable) else None


def teach_nothing(
    batch: Sequence[Proposal], outcomes: Sequence[tuple[Decision, ...]], logits_NV: Tensor, starts: Sequence[int]
) -> list[Told]:
    """For streams that nobody learns from."""
    return [Told() for _ in batch]
