"""Teaching: the target's law, pushed down to drafter pieces, at every emitted token.

Every target token lands on its first piece, so at the beginning of a token the target's law is a complete
distribution over the drafter's vocabulary: nothing has to be aligned. Along a token of several pieces the law goes on
as conditionals. Only the likeliest pieces are kept; the rest is one number.

Laws are taken at temperature 1 whatever the sampling: at low temperatures they say nothing about what is nearly right
(the paper does not state its choice).

Shapes: N positions, V target tokens, D drafter ids, T kept pieces.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from stages.blocks import Proposal, Teaching
from stages.vocabulary import Pair


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
    """

    def __init__(self, pair: Pair, kept: int, device: torch.device) -> None:
        self._pair, self._kept, self._index = pair, kept, PieceIndex(pair)
        first = [pieces[0] if pieces else pair.drafter_size for pieces in pair.pieces]
        self._first_piece_V = torch.tensor(first, device=device)
        self._is_direct_V = torch.tensor(
            [pieces is not None and len(pieces) == 1 for pieces in pair.pieces], device=device
        )

    @torch.inference_mode()
    def __call__(
        self, batch: Sequence[Proposal], emitted: Sequence[tuple[int, ...]], logits_NV: Tensor, starts: Sequence[int]
    ) -> list[tuple[Teaching, ...]]:
        """Teaching for every emitted token of every row, in order; call before the rows are extended."""
        places = [start + i for start, tokens in zip(starts, emitted, strict=False) for i in range(len(tokens))]
        laws_NV = logits_NV[places].float().softmax(-1)[:, : len(self._pair.pieces)]
        firsts = iter(self._first_level(laws_NV))
        laws = iter(laws_NV)
        taught = []
        for proposal, tokens in zip(batch, emitted, strict=True):
            position = len(proposal.draft.row.pieces)
            of_row: list[Teaching] = []
            for token in tokens:
                of_row.append(Teaching(position, 0, *next(firsts)))
                of_row += self._deeper_levels(position, token, next(laws))
                position += len(self._pair.context[token])
            taught.append(tuple(of_row))
        return taught

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


def teach_nothing(
    batch: Sequence[Proposal], emitted: Sequence[tuple[int, ...]], logits_NV: Tensor, starts: Sequence[int]
) -> list[tuple[Teaching, ...]]:
    """For streams that nobody learns from."""
    return [() for _ in batch]
