"""Soft targets: the target's distribution mapped to drafter pieces, at every emitted token and optionally after
rejections.

The probability of every target token is added to its first piece, so at the beginning of a token the target's
distribution is a complete distribution over the drafter's vocabulary and needs no alignment. Within a token of several
pieces the following distributions are conditionals. Only the most probable pieces are stored; the rest is one number.

The teacher has its own temperature. At 0 a distribution carries nothing about the second-best tokens; at 1 the best
token has too little weight, and a first piece that many tokens share outweighs a more probable token (measurements in
docs/experiments.md; the paper does not state its choice).

Shapes: N positions, V target tokens, D drafter ids, T top pieces.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from stages.contract.blocks import Decision, OffPolicySpan, Proposal, SoftTarget
from stages.vocabulary.pair import Pair
from store.events import Outcome


class Supervision(NamedTuple):
    """The soft targets that one block gives one sequence."""

    soft_targets: tuple[SoftTarget, ...] = ()  # at every emitted token, in order
    span: OffPolicySpan | None = None


class Teacher(Protocol):
    """Makes soft targets from the target's logits. Called once per block, before the sequences are extended; pure."""

    def __call__(
        self,
        batch: Sequence[Proposal],
        outcomes: Sequence[tuple[Decision, ...]],
        logits_NV: Tensor,
        starts: Sequence[int],
    ) -> list[Supervision]:
        """Make the supervision of each sequence.

        Args:
            batch: the proposals.
            outcomes: per sequence the decisions that were made.
            logits_NV: the target's, sequences concatenated; those of sequence i begin at `starts[i]`, one per
                verifiable token and one after the last.
            starts: per sequence the index of its first logits.
        """
        ...


class PieceIndex:
    """All target tokens sorted by their pieces: the tokens that share a prefix are one range."""

    def __init__(self, pair: Pair) -> None:
        spelt = sorted((pieces, token) for token, pieces in enumerate(pair.pieces) if pieces)
        self._pieces = [pieces for pieces, _ in spelt]
        self.tokens = [token for _, token in spelt]

    def find_range(self, prefix: tuple[int, ...]) -> range:
        """Return the range of the tokens whose pieces begin with `prefix`."""
        after = (*prefix[:-1], prefix[-1] + 1)
        return range(bisect_left(self._pieces, prefix), bisect_left(self._pieces, after))

    def split_by_piece(self, places: range, depth: int) -> list[tuple[int | None, range]]:
        """Split a range by the piece at `depth`; None for the token that ends before it."""

        def piece_at(place: int) -> int | None:
            pieces = self._pieces[place]
            return pieces[depth] if len(pieces) > depth else None

        groups = [(piece, list(found)) for piece, found in groupby(places, piece_at)]
        return [(piece, range(found[0], found[-1] + 1)) for piece, found in groups]


class TrieTeacher(Teacher):
    """Makes soft targets from the target's logits over the trie of drafter pieces.

    The pieces are 0 "snow", 1 "ball", 2 "the"; the target tokens are 0 "snow", 1 "snowball" (pieces 0, 1), 2 "the". The
    target emits "snowball" after one piece. Where the token begins, "snow" has the mass of both tokens that begin with
    it, 0.25 + 0.375; of that, 0.25 is the token "snow" itself. After "snow" the next piece is "ball" with
    0.375 / 0.625 = 0.6, and the rest, 0.4, is the end of the token.

    >>> from stages.contract.blocks import Draft, SequenceState
    >>> from stages.sampling.random_source import SeededRandomSource
    >>> from store.events import Origin
    >>> spelling = (0,), (0, 1), (2,)
    >>> pair = Pair(pieces=spelling, context=spelling, drafter_size=3, digest="", unspelt=0)
    >>> teacher = TrieTeacher(pair, top_k=2, device=torch.device("cpu"))
    >>> rng = SeededRandomSource(seed=0, offset=0)
    >>> row = SequenceState(0, "id", "dataset", "text", [2], 1, [2], rng, remaining_tokens=9)
    >>> proposal = Proposal(Draft(row, (), torch.zeros(0, 3), (), None, ()), ())  # nothing was drafted
    >>> decisions = (Decision(0, None, Outcome.UNDRAFTED, emitted=1, origin=Origin.BONUS),)
    >>> logits_NV = torch.tensor([[0.25, 0.375, 0.375]]).log()  # N = 1 position, V = 3
    >>> (supervision,) = teacher([proposal], [decisions], logits_NV, starts=[0])
    >>> def show(*numbers):
    ...     return tuple(round(number, 3) for number in numbers)
    >>> first, second = supervision.soft_targets
    >>> first.position, first.depth, first.ids, show(*first.group), show(*first.direct), show(first.rest)
    (1, 0, (0, 2), (0.625, 0.375), (0.25, 0.375), (0.0,))
    >>> second.position, second.depth, second.ids, show(*second.group), show(second.rest)
    (2, 1, (1,), (0.6,), (0.4,))

    Args:
        pair: the two vocabularies.
        top_k: T, the number of pieces stored of each distribution.
        device: of the target's logits.
        temperature: of the teacher's distributions, above 0.
        off_policy: whether to make soft targets after the first rejection too; the target has computed its
            distributions there anyway.
    """

    def __init__(
        self, pair: Pair, top_k: int, device: torch.device, *, temperature: float = 1.0, off_policy: bool = False
    ) -> None:
        self._temperature = temperature
        self._pair, self._top_k, self._index, self._off_policy = pair, top_k, PieceIndex(pair), off_policy
        first = [pieces[0] if pieces else pair.drafter_size for pieces in pair.pieces]
        self._first_piece_V = torch.tensor(first, device=device)
        self._is_direct_V = torch.tensor(
            [pieces is not None and len(pieces) == 1 for pieces in pair.pieces], device=device
        )

    @override
    @torch.inference_mode()
    def __call__(
        self,
        batch: Sequence[Proposal],
        outcomes: Sequence[tuple[Decision, ...]],
        logits_NV: Tensor,
        starts: Sequence[int],
    ) -> list[Supervision]:
        emitted = [tuple(d.emitted for d in decisions if d.emitted is not None) for decisions in outcomes]
        begins = [len(proposal.draft.row.pieces) for proposal in batch]
        paths = self._make_path_targets(begins, emitted, logits_NV, starts)
        branches: list[OffPolicySpan | None] = [None] * len(batch)
        if self._off_policy:
            branches = self._make_spans(batch, outcomes, logits_NV, starts)
        return [Supervision(soft_targets, branch) for soft_targets, branch in zip(paths, branches, strict=True)]

    def _make_path_targets(
        self, begins: Sequence[int], paths: Sequence[Sequence[int]], logits_NV: Tensor, starts: Sequence[int]
    ) -> list[tuple[SoftTarget, ...]]:
        """Make the soft targets of one path of tokens per sequence: at the first piece of each token, then within it.

        Args:
            begins: per sequence the position of the path's first piece.
            paths: target tokens per sequence; the distribution at the i-th is `logits_NV[starts[row] + i]`.
        """
        places = [start + i for start, path in zip(starts, paths, strict=False) for i in range(len(path))]
        target_probs_NV = (logits_NV[places].float() / self._temperature).softmax(-1)[:, : len(self._pair.pieces)]
        firsts, distributions = iter(self._make_first_level(target_probs_NV)), iter(target_probs_NV)
        targets = []
        for position, path in zip(begins, paths, strict=True):
            of_row: list[SoftTarget] = []
            for token in path:
                of_row.append(SoftTarget(position, 0, *next(firsts)))
                of_row += self._make_deeper_levels(position, token, next(distributions))
                position += len(self._pair.context[token])
            targets.append(tuple(of_row))
        return targets

    def _make_spans(
        self,
        batch: Sequence[Proposal],
        outcomes: Sequence[tuple[Decision, ...]],
        logits_NV: Tensor,
        starts: Sequence[int],
    ) -> list[OffPolicySpan | None]:
        """Make, per sequence, the span from its rejected token on, if the target read any token there."""
        found = enumerate(map(_find_rejected, batch, outcomes))
        rejected = [(batch[row], row, index) for row, index in found if index is not None]
        begins = [len(one.draft.row.pieces) + one.tokens[index].stop for one, _, index in rejected]
        after = [starts[row] + index + 1 for _, row, index in rejected]
        paths = [one.verifiable[index + 1 :] for one, _, index in rejected]
        branches: list[OffPolicySpan | None] = [None] * len(batch)
        along = self._make_path_targets(begins, paths, logits_NV, after)
        for (one, row, index), soft_targets in zip(rejected, along, strict=True):
            if soft_targets:
                start, last = one.tokens[index].start, one.tokens[len(one.verifiable) - 1]
                pieces = one.draft.pieces[start : last.stop]
                branches[row] = OffPolicySpan(len(one.draft.row.pieces) + start, pieces, soft_targets)
        return branches

    def _make_first_level(
        self, target_probs_NV: Tensor
    ) -> list[tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...], float]]:
        """Return (ids, group, direct, rest) of each distribution, at the first piece of a token."""
        zeros_ND = target_probs_NV.new_zeros(len(target_probs_NV), self._pair.drafter_size + 1)
        index_NV = self._first_piece_V.expand_as(target_probs_NV)
        group_ND = zeros_ND.scatter_add(1, index_NV, target_probs_NV)[:, :-1]
        direct_ND = zeros_ND.scatter_add(1, index_NV, target_probs_NV * self._is_direct_V)[:, :-1]
        top = group_ND.topk(min(self._top_k, group_ND.shape[1]))
        rows = zip(top.indices.tolist(), top.values.tolist(), direct_ND.gather(1, top.indices).tolist(), strict=True)
        return [(tuple(ids), tuple(group), tuple(direct), max(0.0, 1 - sum(group))) for ids, group, direct in rows]

    def _make_deeper_levels(self, position: int, token: int, target_probs_V: Tensor) -> list[SoftTarget]:
        pieces = self._pair.pieces[token] or ()
        return [
            self._make_conditional(position + depth, pieces[:depth], target_probs_V) for depth in range(1, len(pieces))
        ]

    def _make_conditional(self, position: int, prefix: tuple[int, ...], target_probs_V: Tensor) -> SoftTarget:
        """Make the target's distribution over the next piece of a token that begins with `prefix`.

        `rest` includes the probability that the token ends after the prefix.
        """
        places = self._index.find_range(prefix)
        tokens = self._index.tokens[places.start : places.stop]
        masses = dict(zip(places, target_probs_V[tokens].double().tolist(), strict=True))
        total = sum(masses.values()) or 1.0
        divided = self._index.split_by_piece(places, len(prefix))
        options = sorted(
            ((sum(masses[place] for place in below) / total, piece) for piece, below in divided if piece is not None),
            reverse=True,
        )[: self._top_k]
        ids, group = tuple(piece for _, piece in options), tuple(mass for mass, _ in options)
        return SoftTarget(position, len(prefix), ids, group, (0.0,) * len(ids), max(0.0, 1 - sum(group)))


def _find_rejected(proposal: Proposal, decisions: Sequence[Decision]) -> int | None:
    """Return the index of the rejected token if it was verifiable, so that the target has read it."""
    found = next((one.index for one in decisions if one.outcome is Outcome.REJECTED), None)
    return found if found is not None and found < len(proposal.verifiable) else None


def supervise_nothing(
    batch: Sequence[Proposal], outcomes: Sequence[tuple[Decision, ...]], logits_NV: Tensor, starts: Sequence[int]
) -> list[Supervision]:
    """Return no supervision, for streams without a learner."""
    return [Supervision() for _ in batch]
