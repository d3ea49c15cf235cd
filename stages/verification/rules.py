"""Rules of verification: the probabilities that a test compares, and the residual after a rejection.

`MODES` has the modes of verification by name: each is a rule with its requirements on drafting and translation.

Shapes: N positions, V target tokens, K pieces of a draft, D drafter ids, S sums.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from math import inf, isfinite, nan, prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from stages.contract.blocks import STOP, Draft, Proposal, ProposedToken, Test
from stages.ngrams.trie import Trie
from stages.verification.parsing import Parse, Spelling, parse, parse_longest

Levels = tuple[tuple[float, ...], tuple[float, ...]]  # drafter's and target's probability of the option, per level


class Rule(Protocol):
    """Tests a proposal against the target's distribution. Pure: reads the trie as it was during translation."""

    def levels(self, batch: Sequence[Proposal], target_probs_NV: Tensor, starts: Sequence[int]) -> list[list[Levels]]:
        """Return per row and proposed token the two probabilities of each level. The target's distributions of all rows
        are joined; row i has those from `starts[i]`, one per proposed token.
        """
        ...

    def residual(self, proposal: Proposal, index: int, level: int, target_probs_V: Tensor) -> Tensor:
        """Return the weights (V,) of the token to emit after proposed token `index` was rejected at `level`."""
        ...


def sampled_probs(draft: Draft) -> Tensor:
    """Return the distributions that the pieces were drawn from (K, D).

    >>> draft = Draft(None, (0,), torch.tensor([[0.8, 0.2]]), (), None, ())
    >>> sampled_probs(draft), one_hot_probs(draft)
    (tensor([[0.8000, 0.2000]]), tensor([[1., 0.]]))
    """
    return draft.draft_probs_KD


def one_hot_probs(draft: Draft) -> Tensor:
    """Return point masses on the drafted pieces (K, D), as if drafting were deterministic.

    With them the test is equivalent to drawing from the target and continuing while the tokens are equal: a token is
    accepted with exactly the target's probability, and the residual is the target's distribution without it.
    """
    pieces_K1 = torch.tensor(draft.pieces, device=draft.draft_probs_KD.device, dtype=torch.long)[:, None]
    return torch.zeros_like(draft.draft_probs_KD).scatter_(1, pieces_K1, 1.0)


def segment_sums(values_NV: Tensor, segments: Sequence[tuple[int, Iterable[int]]]) -> list[float]:
    """Sum `values_NV[n, i]` over the indices i of each segment (n, indices), in one transfer to the host.

    >>> segment_sums(torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]), [(0, (1, 2)), (0, ()), (1, (0,))])
    [0.5, 0.0, 1.0]
    """
    flat, segment = [], []
    width = values_NV.shape[-1]
    for number, (row, indices) in enumerate(segments):
        for index in indices:
            flat.append(row * width + index)
            segment.append(number)
    device = values_NV.device
    if device.type == "cpu":  # a few calls of NumPy take less time than as many of torch
        values = values_NV.numpy().reshape(-1)[np.array(flat, np.intp)]
        sums: list[float] = np.bincount(np.array(segment, np.intp), values, len(segments)).tolist()
        return sums
    sums_S = torch.zeros(len(segments), dtype=values_NV.dtype, device=device)
    if flat:
        flat_index, segment_index = torch.tensor([flat, segment], device=device)
        sums_S.index_add_(0, segment_index, values_NV.reshape(-1)[flat_index])
    return [float(total) for total in sums_S.tolist()]


def _round_levels(numbers: Sequence[float], dtype: torch.dtype) -> list[float]:
    """Round numbers to the precision of a type; of float32, the usual one, without a tensor."""
    if dtype is torch.float32:
        rounded: list[float] = np.array(numbers, np.float32).tolist()
        return rounded
    return torch.tensor(numbers, dtype=dtype).tolist()


def option_members(test: Test) -> Sequence[int]:
    """Return the target tokens that the drafted option comprises."""
    if test.option == STOP:
        return () if test.node.token is None else (test.node.token,)
    child = test.node.children.get(test.option)
    return child.members if child else ()


class TrieRule(Rule):
    """Exact: the target's distribution is propagated through the trie, and each level of a token is tested.

    The pieces are 0 "snow", 1 "ball", 2 "the"; the target tokens are 0 "snow", 1 "snowball" (pieces 0, 1), 2 "the". The
    draft is "snow", "ball", which is the token "snowball" with two levels. Level 1 compares "begins with snow": the
    drafter gives 0.75, the target 0.25 + 0.25. Level 2 compares "ball" with stopping after "snow": 0.75 and 0.25 / 0.5.
    The drafter's distributions in the test are `sampled_probs`, or `one_hot_probs` for mode `match`.

    >>> trie = Trie(target_size=3, drafter_size=3)
    >>> trie.insert_all([((0,), 0), ((0, 1), 1), ((2,), 2)])
    >>> draft_probs_KD = torch.tensor([[0.75, 0.0, 0.25], [0.0, 0.75, 0.25]])  # K = 2 pieces, D = 3
    >>> draft = Draft(None, (0, 1), draft_probs_KD, (), None, ())
    >>> proposal = Proposal(draft, parse(trie, draft.pieces))
    >>> target_probs_NV = torch.tensor([[0.25, 0.25, 0.5]])  # N = 1 proposed token, V = 3
    >>> rule = TrieRule(trie)
    >>> rule.levels([proposal], target_probs_NV, starts=[0])  # per row and token: (drafter, target)
    [[((0.75, 0.75), (0.5, 0.5))]]

    After a rejection at level 1 the target has more of "the" alone, by 0.5 - 0.25; after one at level 2 it has more of
    "snow": half of its 0.25, as 0.5 - 0.25 of the 0.5 that stop there.

    >>> rule.residual(proposal, index=0, level=0, target_probs_V=target_probs_NV[0])
    tensor([0.0000, 0.0000, 0.2500])
    >>> rule.residual(proposal, index=0, level=1, target_probs_V=target_probs_NV[0])
    tensor([0.1250, 0.0000, 0.0000])

    With `one_hot_probs` the token is accepted with the target's own probability, 0.5 * 0.5 = 0.25.

    >>> TrieRule(trie, one_hot_probs).levels([proposal], target_probs_NV, starts=[0])
    [[((1.0, 1.0), (0.5, 0.5))]]
    """

    def __init__(self, trie: Trie, draft_distributions: Callable[[Draft], Tensor] = sampled_probs) -> None:
        self._trie, self._draft_distributions = trie, draft_distributions

    @override
    def levels(self, batch: Sequence[Proposal], target_probs_NV: Tensor, starts: Sequence[int]) -> list[list[Levels]]:
        """Compute the levels with two gathers per batch: one of the target's distributions, one of the drafter's."""
        placed = [
            (start + index, test)
            for proposal, start in zip(batch, starts, strict=False)
            for index, proposed in enumerate(proposal.tokens)
            for test in proposed.tests
        ]
        if not placed:
            return [[] for _ in batch]
        # The test is made on the numbers that are logged: rounded to the distributions' precision.
        target = iter(_round_levels(self._target_levels(placed, target_probs_NV), target_probs_NV.dtype))
        drafter = iter(_round_levels(self._drafter_levels(batch), target_probs_NV.dtype))
        return [
            [
                (tuple(islice(drafter, len(proposed.tests))), tuple(islice(target, len(proposed.tests))))
                for proposed in proposal.tokens
            ]
            for proposal in batch
        ]

    def _target_levels(self, placed: Sequence[tuple[int, Test]], target_probs_NV: Tensor) -> list[float]:
        segments: list[tuple[int, Iterable[int]]] = []
        for position, test in placed:
            segments.append((position, option_members(test)))
            segments.append((position, () if test.node is self._trie.root else test.node.members))
        sums = segment_sums(target_probs_NV, segments)
        return [
            option if test.node is self._trie.root else option / node if node else 0.0
            for (_, test), option, node in zip(placed, sums[::2], sums[1::2], strict=True)
        ]

    def _drafter_levels(self, batch: Sequence[Proposal]) -> list[float]:
        drafts = [proposal.draft for proposal in batch]
        offsets = accumulate((len(draft.pieces) for draft in drafts), initial=0)
        tests = [
            (offset, draft, test)
            for offset, draft, proposal in zip(offsets, drafts, batch, strict=False)
            for proposed in proposal.tokens
            for test in proposed.tests
        ]
        segments: list[tuple[int, Iterable[int]]] = []
        for offset, draft, test in tests:
            place = offset + (test.position or 0)
            segments.append((place, () if test.position is None else (draft.pieces[test.position],)))
            segments.append((place, () if test.position is None else _excluded_children(test)))
        distributions = [self._draft_distributions(draft) for draft in drafts]
        draft_probs_ND = torch.cat(distributions) if len(drafts) > 1 else distributions[0]
        sums = segment_sums(draft_probs_ND, segments)
        finite = list(map(isfinite, draft_probs_ND.sum(-1).tolist()))
        return [
            _drafter_level(test, piece, children) if test.position is None or finite[offset + test.position] else nan
            for (offset, _, test), piece, children in zip(tests, sums[::2], sums[1::2], strict=True)
        ]

    @override
    def residual(self, proposal: Proposal, index: int, level: int, target_probs_V: Tensor) -> Tensor:
        """Return max(0, target - drafter) per option, divided among its tokens by the target's distribution."""
        test = proposal.tokens[index].tests[level]
        draft_probs_KD = self._draft_distributions(proposal.draft)
        if test.position is not None and not bool(draft_probs_KD[test.position].sum().isfinite()):
            return self._remaining_probs(test, target_probs_V)
        weights_V = (
            self._root_residual(test, draft_probs_KD, target_probs_V)
            if test.node is self._trie.root
            else _node_residual(test, draft_probs_KD, target_probs_V)
        )
        # After a rejection some option has more mass under the target; only rounding can make the sum 0.
        return weights_V if float(weights_V.sum()) > 0 else target_probs_V

    def _remaining_probs(self, test: Test, target_probs_V: Tensor) -> Tensor:
        """Return the target's distribution restricted to the passed levels: all tokens, or the node's members."""
        if test.node is self._trie.root:
            return target_probs_V
        members_M = torch.tensor(test.node.members, device=target_probs_V.device)
        return torch.zeros_like(target_probs_V).index_copy_(0, members_M, target_probs_V[members_M])

    def _root_residual(self, test: Test, draft_probs_KD: Tensor, target_probs_V: Tensor) -> Tensor:
        drafter_D = draft_probs_KD[test.position or 0].to(target_probs_V.dtype)
        if test.excluded is not None and test.excluded.children:
            drafter_D = drafter_D.clone()
            drafter_D[torch.tensor(list(test.excluded.children), device=drafter_D.device)] = 0
            drafter_D = (drafter_D / drafter_D.sum()).nan_to_num(nan=0.0)
        group_of_V = self._trie.group_of_token_V
        target_D = target_probs_V.new_zeros(drafter_D.shape[0] + 1).index_add_(0, group_of_V, target_probs_V)
        kept_D = torch.ones_like(target_D)  # tokens outside the trie: the drafter never proposes them
        kept_D[:-1] = (1 - drafter_D / target_D[:-1]).nan_to_num(nan=0.0).clamp_(min=0)
        return target_probs_V * kept_D[group_of_V]


def _excluded_children(test: Test) -> Iterable[int]:
    if test.option == STOP:
        return test.node.children
    return test.excluded.children if test.excluded else ()


def _drafter_level(test: Test, piece: float, children: float) -> float:
    """Return the drafter's probability of the drafted option. `piece` is the probability of the piece that decided;
    `children` the summed probability of the pieces that would have led deeper (for STOP), or that the STOP before
    excluded.
    """
    if test.position is None:
        return 1.0
    others = max(1 - children, piece)  # the piece is among them, so rounding must not make them less likely
    if test.option == STOP:
        return others
    return piece / others if others else 0.0


def _node_residual(test: Test, draft_probs_KD: Tensor, target_probs_V: Tensor) -> Tensor:
    """Return the residual at an inner node with M members and O options: its children, and STOP if it is a token."""
    node, device = test.node, target_probs_V.device
    options: list[Sequence[int]] = [child.members for child in node.children.values()]
    options += [] if node.token is None else [(node.token,)]
    members_M = torch.tensor([token for tokens in options for token in tokens], device=device)
    option_M = torch.arange(len(options), device=device).repeat_interleave(
        torch.tensor(list(map(len, options)), device=device)
    )
    drafter_O = target_probs_V.new_zeros(len(options))
    if test.position is not None:
        children = torch.tensor(list(node.children), dtype=torch.long, device=device)
        drafter_O[: len(children)] = draft_probs_KD[test.position][children].to(target_probs_V.dtype)
    if node.token is not None:
        drafter_O[-1] = 1 - drafter_O[:-1].sum()
    distribution_M = target_probs_V[members_M]
    mass_O = target_probs_V.new_zeros(len(options)).index_add_(0, option_M, distribution_M)
    kept_O = (1 - drafter_O * distribution_M.sum() / mass_O).nan_to_num(nan=0.0).clamp(min=0)
    return torch.zeros_like(target_probs_V).index_copy_(0, members_M, distribution_M * kept_O[option_M])


class PaperRule(Rule):
    """The paper's equations 1 and 2: the probability of a merged token is the product over its pieces, and is
    subtracted from that of its first piece's direct map. Biased at temperatures above 0; it exists for reproduction.
    """

    def __init__(self, trie: Trie, spelling: Spelling) -> None:
        groups_V, missing = trie.group_of_token_V, trie.drafter_size
        direct = [pieces[0] if pieces and len(pieces) == 1 else missing for pieces in spelling]
        # A model may have more outputs than its tokenizer has ids.
        self._direct_piece_V = torch.full_like(groups_V, missing)
        self._direct_piece_V[: len(direct)] = torch.tensor(direct, device=groups_V.device)

    @override
    def levels(self, batch: Sequence[Proposal], target_probs_NV: Tensor, starts: Sequence[int]) -> list[list[Levels]]:
        return [
            [
                (
                    (_path_probability(proposal.draft, proposed),),
                    (0.0 if proposed.token is None else float(target_probs_NV[start + index, proposed.token]),),
                )
                for index, proposed in enumerate(proposal.tokens)
            ]
            for proposal, start in zip(batch, starts, strict=False)
        ]

    @override
    def residual(self, proposal: Proposal, index: int, level: int, target_probs_V: Tensor) -> Tensor:
        """Return max(0, target - drafter) with equation 2's drafter distribution over the target's vocabulary."""
        proposed, draft = proposal.tokens[index], proposal.draft
        drafter_D = draft.draft_probs_KD[proposed.start].to(target_probs_V.dtype)
        if not bool(draft.draft_probs_KD[proposed.start : proposed.stop].sum().isfinite()):
            return target_probs_V
        drafter_V = torch.cat([drafter_D, drafter_D.new_zeros(1)])[self._direct_piece_V]
        if proposed.token is not None and proposed.stop - proposed.start > 1:
            merged = _path_probability(draft, proposed)
            drafter_V[self._direct_piece_V == draft.pieces[proposed.start]] -= merged
            drafter_V[proposed.token] = merged
        weights_V = (target_probs_V - drafter_V).clamp(min=0)
        return weights_V if float(weights_V.sum()) > 0 else target_probs_V


def _path_probability(draft: Draft, proposed: ProposedToken) -> float:
    if not bool(draft.draft_probs_KD[proposed.start : proposed.stop].sum().isfinite()):
        return nan
    return prod(float(draft.draft_probs_KD[i, draft.pieces[i]]) for i in range(proposed.start, proposed.stop))


@dataclass(frozen=True)
class Mode:
    """A mode of verification: a rule with its requirements on drafting and translation."""

    make_rule: Callable[[Trie, Spelling], Rule]  # makes the rule from the active trie and each target id's pieces
    # whether emitted text has the target's distribution at any temperature. At temperature 0 every mode is exact.
    exact: bool = True
    # whether target tokens of several pieces are used; if not, none is cached, and only pieces that are a target
    # token by themselves are drafted
    ngrams: bool = True
    copies: bool = True  # whether drafts may be copied, whose pieces all have probability 1
    coupled: bool = False  # whether the noise of every row decides its tokens, not only that of rows with a seed
    parse: Parse = parse  # divides pieces into target tokens

    def draftable_pieces(self, spelling: Spelling) -> set[int]:
        """Return the pieces that may be drafted: those that spell target tokens."""
        longest = inf if self.ngrams else 1
        return {piece for pieces in spelling if pieces and len(pieces) <= longest for piece in pieces}


# By the name of the setting `draft.mode`.
MODES = {
    "trie": Mode(lambda trie, spelling: TrieRule(trie)),
    "coupled": Mode(lambda trie, spelling: TrieRule(trie), coupled=True),
    "match": Mode(lambda trie, spelling: TrieRule(trie, one_hot_probs)),
    "tli": Mode(lambda trie, spelling: TrieRule(trie), ngrams=False),
    "paper": Mode(PaperRule, exact=False, copies=False, parse=parse_longest),
}
