"""Rules of verification: the probabilities that a test compares, and the residual after a rejection.

`trie`, `tli` and `match` are one rule (they differ in what may be drafted and in the law that a piece counts as drawn
from) and exact at any temperature. `paper` is the paper's own and is not.

Shapes: N positions, V target tokens, K pieces of a draft, D drafter ids, S sums.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from stages.blocks import STOP, Draft, Proposal, ProposedToken, Test
from stages.trie import Trie

Levels = tuple[tuple[float, ...], tuple[float, ...]]  # drafter's and target's probability of the option, per level


class Rule(Protocol):
    """How a proposal is tested against the target's law. Pure: reads the trie as it was when translating."""

    def levels(self, batch: Sequence[Proposal], laws_NV: Tensor, starts: Sequence[int]) -> list[list[Levels]]:
        """Per row and proposed token the two probabilities of each level.

        Args:
            batch: the proposals.
            laws_NV: the target's laws, rows joined; row i has those from `starts[i]`, one per proposed token.
        """
        ...

    def residual(self, proposal: Proposal, index: int, level: int, law_V: Tensor) -> Tensor:
        """Weights (V) of the token to emit when proposed token `index` was rejected at `level`."""
        ...


def as_drawn(draft: Draft) -> Tensor:
    """The laws that the pieces were drawn from (K, D)."""
    return draft.laws_KD


def as_certain(draft: Draft) -> Tensor:
    """Point laws on the drafted pieces (K, D): what the drafter would have done anyway.

    With them the test becomes "draw from the target and go on while equal": a token is accepted with exactly the
    target's probability, and the residual is the target's law without it.
    """
    pieces_K1 = torch.tensor(draft.pieces, device=draft.laws_KD.device, dtype=torch.long)[:, None]
    return torch.zeros_like(draft.laws_KD).scatter_(1, pieces_K1, 1.0)


def segment_sums(values_NV: Tensor, segments: Sequence[tuple[int, Iterable[int]]]) -> list[float]:
    """Sum of `values_NV[n, i]` over the indices i of each segment (n, indices), in one transfer to the host."""
    flat, segment = [], []
    width = values_NV.shape[-1]
    for number, (row, indices) in enumerate(segments):
        for index in indices:
            flat.append(row * width + index)
            segment.append(number)
    device = values_NV.device
    sums_S = torch.zeros(len(segments), dtype=values_NV.dtype, device=device)
    if flat:
        flat_index, segment_index = torch.tensor([flat, segment], device=device)
        sums_S.index_add_(0, segment_index, values_NV.reshape(-1)[flat_index])
    return [float(total) for total in sums_S.tolist()]


def _option_members(test: Test) -> Sequence[int]:
    """The target tokens that the drafted option stands for."""
    if test.option == STOP:
        return () if test.node.token is None else (test.node.token,)
    child = test.node.children.get(test.option)
    return child.members if child else ()


def _take(proposed: ProposedToken, drafter: Iterator[float], target: Iterator[float]) -> Levels:
    count = len(proposed.tests)
    return tuple(islice(drafter, count)), tuple(islice(target, count))


class TrieRule:
    """The exact walk of DESIGN section 4.

    Args:
        trie: the active trie that the proposals were parsed with.
        draft_laws: under which laws the pieces count as drawn: `as_drawn`, or `as_certain` for `match`.
    """

    def __init__(self, trie: Trie, draft_laws: Callable[[Draft], Tensor] = as_drawn) -> None:
        self._trie, self._draft_laws = trie, draft_laws

    def levels(self, batch: Sequence[Proposal], laws_NV: Tensor, starts: Sequence[int]) -> list[list[Levels]]:
        """See `Rule`. Two gathers for the whole batch: one over the target's laws, one over the drafter's."""
        placed = [
            (start + index, test)
            for proposal, start in zip(batch, starts, strict=False)
            for index, proposed in enumerate(proposal.tokens)
            for test in proposed.tests
        ]
        # The test is made on the numbers that are logged: rounded to the laws' precision.
        target = iter(laws_NV.new_tensor(self._target_levels(placed, laws_NV)).tolist())
        drafter = iter(laws_NV.new_tensor(self._drafter_levels(batch)).tolist())
        return [[_take(proposed, drafter, target) for proposed in proposal.tokens] for proposal in batch]

    def _target_levels(self, placed: Sequence[tuple[int, Test]], laws_NV: Tensor) -> list[float]:
        segments: list[tuple[int, Iterable[int]]] = []
        for position, test in placed:
            segments.append((position, _option_members(test)))
            segments.append((position, () if test.node is self._trie.root else test.node.members))
        sums = segment_sums(laws_NV, segments)
        return [
            option if test.node is self._trie.root else option / node if node else 0.0
            for (_, test), option, node in zip(placed, sums[::2], sums[1::2], strict=True)
        ]

    def _drafter_levels(self, batch: Sequence[Proposal]) -> list[float]:
        drafts = [proposal.draft for proposal in batch]
        offsets = torch.tensor([0, *(len(draft.pieces) for draft in drafts)]).cumsum(0).tolist()
        tests = [
            (offset, draft, test)
            for offset, draft, proposal in zip(offsets, drafts, batch, strict=False)
            for proposed in proposal.tokens
            for test in proposed.tests
        ]
        segments: list[tuple[int, Iterable[int]]] = []
        for offset, draft, test in tests:
            place = offset + (test.law or 0)
            segments.append((place, () if test.law is None else (draft.pieces[test.law],)))
            segments.append((place, () if test.law is None else _children_of(test)))
        laws_ND = torch.cat([self._draft_laws(draft) for draft in drafts])
        sums = segment_sums(laws_ND, segments)
        return [
            _drafter_level(test, piece, children)
            for (_, _, test), piece, children in zip(tests, sums[::2], sums[1::2], strict=True)
        ]

    def residual(self, proposal: Proposal, index: int, level: int, law_V: Tensor) -> Tensor:
        """See `Rule`. What the target has more of than the drafter, option by option, spread by the target's law."""
        test = proposal.tokens[index].tests[level]
        laws_KD = self._draft_laws(proposal.draft)
        weights_V = (
            self._root_residual(test, laws_KD, law_V)
            if test.node is self._trie.root
            else _node_residual(test, laws_KD, law_V)
        )
        # A rejection proves that the target has more of something; only rounding can hide it.
        return weights_V if float(weights_V.sum()) > 0 else law_V

    def _root_residual(self, test: Test, laws_KD: Tensor, law_V: Tensor) -> Tensor:
        drafter_D = laws_KD[test.law or 0].to(law_V.dtype)
        if test.excluded is not None and test.excluded.children:
            drafter_D = drafter_D.clone()
            drafter_D[torch.tensor(list(test.excluded.children), device=drafter_D.device)] = 0
            drafter_D = drafter_D / drafter_D.sum()
        group_of_V = self._trie.group_of_token_V
        target_D = law_V.new_zeros(drafter_D.shape[0] + 1).index_add_(0, group_of_V, law_V)
        kept_D = torch.ones_like(target_D)  # tokens outside the trie: the drafter never proposes them
        kept_D[:-1] = (1 - drafter_D / target_D[:-1]).nan_to_num(nan=0.0).clamp_(min=0)
        return law_V * kept_D[group_of_V]


def _children_of(test: Test) -> Iterable[int]:
    if test.option == STOP:
        return test.node.children
    return test.excluded.children if test.excluded else ()


def _drafter_level(test: Test, piece: float, children: float) -> float:
    """The drafter's probability of the drafted option; `piece` is that of the piece that decided, `children` of those
    that would have led deeper (for STOP) or were excluded by the STOP before."""
    if test.law is None:
        return 1.0
    others = max(1 - children, piece)  # the piece is among them, so rounding must not make them less likely
    if test.option == STOP:
        return others
    return piece / others


def _node_residual(test: Test, laws_KD: Tensor, law_V: Tensor) -> Tensor:
    """As at the root, over the members M of the options O of an inner node: its children, and STOP if it is a token."""
    node, device = test.node, law_V.device
    options: list[Sequence[int]] = [child.members for child in node.children.values()]
    options += [] if node.token is None else [(node.token,)]
    members_M = torch.tensor([token for tokens in options for token in tokens], device=device)
    option_M = torch.arange(len(options), device=device).repeat_interleave(
        torch.tensor(list(map(len, options)), device=device)
    )
    drafter_O = law_V.new_zeros(len(options))
    if test.law is not None:
        children = torch.tensor(list(node.children), dtype=torch.long, device=device)
        drafter_O[: len(children)] = laws_KD[test.law][children].to(law_V.dtype)
    if node.token is not None:
        drafter_O[-1] = 1 - drafter_O[:-1].sum()
    law_M = law_V[members_M]
    mass_O = law_V.new_zeros(len(options)).index_add_(0, option_M, law_M)
    kept_O = (1 - drafter_O * law_M.sum() / mass_O).nan_to_num(nan=0.0).clamp(min=0)
    return torch.zeros_like(law_V).index_copy_(0, members_M, law_M * kept_O[option_M])


class PaperRule:
    """The paper's equations 1 and 2: a merged token's probability is the product of its pieces', taken from the direct
    map of its first piece. Biased at temperatures above 0; kept for reproduction.

    Args:
        direct_pieces: per target id the drafter id that it maps to directly, or the drafter's size.
        device: of the laws.
    """

    def __init__(self, direct_pieces: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._direct_piece_V = torch.tensor(direct_pieces, device=device)

    def levels(self, batch: Sequence[Proposal], laws_NV: Tensor, starts: Sequence[int]) -> list[list[Levels]]:
        """See `Rule`. One level per token."""
        return [
            [
                ((_path_probability(proposal.draft, proposed),), (_probability(proposed, laws_NV[start + index]),))
                for index, proposed in enumerate(proposal.tokens)
            ]
            for proposal, start in zip(batch, starts, strict=False)
        ]

    def residual(self, proposal: Proposal, index: int, level: int, law_V: Tensor) -> Tensor:
        """See `Rule`. max(0, target - drafter) with equation 2's drafter law over the target's vocabulary."""
        proposed, draft = proposal.tokens[index], proposal.draft
        drafter_D = draft.laws_KD[proposed.start].to(law_V.dtype)
        drafter_V = torch.cat([drafter_D, drafter_D.new_zeros(1)])[self._direct_piece_V]
        if proposed.token is not None and proposed.stop - proposed.start > 1:
            merged = _path_probability(draft, proposed)
            drafter_V[self._direct_piece_V == draft.pieces[proposed.start]] -= merged
            drafter_V[proposed.token] = merged
        weights_V = (law_V - drafter_V).clamp(min=0)
        return weights_V if float(weights_V.sum()) > 0 else law_V


def _path_probability(draft: Draft, proposed: ProposedToken) -> float:
    return prod(float(draft.laws_KD[i, draft.pieces[i]]) for i in range(proposed.start, proposed.stop))


def _probability(proposed: ProposedToken, law_V: Tensor) -> float:
    return 0.0 if proposed.token is None else float(law_V[proposed.token])
