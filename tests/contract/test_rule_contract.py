"""The contract of `Rule`, over every implementation."""

import inspect
from collections.abc import Callable

import pytest
import torch
from doubles import row_of

from stages import acceptance
from stages.acceptance import PaperRule, Rule, TrieRule, as_certain, as_drawn
from stages.blocks import Draft, Proposal
from stages.translate import parse, parse_longest
from stages.trie import Trie

SPELLING = ((0,), (1,), (0, 1), (0, 1, 2, 0), (2,), None, (1, 3))
PIECES = 4
DRAFTS = [(), (0,), (0, 1), (0, 1, 2), (0, 1, 2, 0), (1, 3, 2), (2, 3), (3,), (0, 2, 1, 1), (1, 0, 1, 0)]


def new_trie() -> Trie:
    trie = Trie(len(SPELLING), PIECES)
    trie.insert_all((pieces, token) for token, pieces in enumerate(SPELLING) if pieces)
    return trie


TRIE = new_trie()
DIRECT = [spelt[0] if spelt and len(spelt) == 1 else PIECES for spelt in SPELLING]
RULES: dict[str, tuple[Callable[[], Rule], Callable]] = {
    "TrieRule, as drawn": (lambda: TrieRule(TRIE, as_drawn), parse),
    "TrieRule, as certain": (lambda: TrieRule(TRIE, as_certain), parse),
    "PaperRule": (lambda: PaperRule(DIRECT), parse_longest),
}
every_rule = pytest.mark.parametrize(("make", "cut"), RULES.values(), ids=list(RULES))


def proposals(cut: Callable) -> list[Proposal]:
    generator = torch.Generator().manual_seed(0)
    laws = [torch.rand(len(pieces), PIECES, generator=generator).softmax(-1) for pieces in DRAFTS]
    drafts = [Draft(row_of([0]), pieces, laws_KD, (), None, ()) for pieces, laws_KD in zip(DRAFTS, laws, strict=True)]
    return [Proposal(draft, cut(TRIE, draft.pieces)) for draft in drafts]


def laws_of(batch: list[Proposal]) -> tuple[torch.Tensor, list[int]]:
    starts = torch.tensor([0, *(len(proposal.verifiable) + 1 for proposal in batch)]).cumsum(0).tolist()
    laws_NV = (2 * torch.randn(starts[-1], len(SPELLING), generator=torch.Generator().manual_seed(1))).softmax(-1)
    return laws_NV, starts


@every_rule
def test_every_proposed_token_has_a_pair_of_probabilities_per_level(make, cut):
    batch = proposals(cut)
    found = make().levels(batch, *laws_of(batch))
    assert len(found) == len(batch)
    for proposal, levels in zip(batch, found, strict=True):
        assert len(levels) == len(proposal.tokens)
        for proposed, (drafter, target) in zip(proposal.tokens, levels, strict=True):
            assert len(drafter) == len(target) == len(proposed.tests) >= 1
            assert all(0 < probability <= 1 + 1e-6 for probability in drafter), "what was drafted was possible"
            assert all(0 <= probability <= 1 + 1e-6 for probability in target)


@every_rule
def test_what_names_no_token_is_impossible_for_the_target(make, cut):
    batch = proposals(cut)
    found = make().levels(batch, *laws_of(batch))
    nameless = [
        levels[-1][1][-1] for proposal, levels in zip(batch, found, strict=True)
        if proposal.tokens and proposal.tokens[-1].token is None
    ]  # fmt: skip
    assert len(nameless) >= 2
    assert set(nameless) == {0.0}


@every_rule
def test_a_row_is_judged_alike_whatever_rows_are_beside_it(make, cut):
    batch = proposals(cut)
    laws_NV, starts = laws_of(batch)
    together = make().levels(batch, laws_NV, starts)
    for number, proposal in enumerate(batch):
        assert make().levels([proposal], laws_NV[starts[number] : starts[number + 1]], [0]) == [together[number]]


@every_rule
def test_a_rule_is_pure(make, cut):
    batch, rule, version = proposals(cut), make(), TRIE.version
    laws_NV, starts = laws_of(batch)
    before = laws_NV.clone(), [proposal.draft.laws_KD.clone() for proposal in batch]
    first = rule.levels(batch, laws_NV, starts)
    for proposal, start in zip(batch, starts, strict=False):
        for index, proposed in enumerate(proposal.tokens):
            levels = range(len(proposed.tests))
            once = [rule.residual(proposal, index, level, laws_NV[start + index]) for level in levels]
            again = [rule.residual(proposal, index, level, laws_NV[start + index]) for level in levels]
            assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert rule.levels(batch, laws_NV, starts) == first
    assert torch.equal(laws_NV, before[0])
    assert all(torch.equal(proposal.draft.laws_KD, laws_KD) for proposal, laws_KD in zip(batch, before[1], strict=True))
    assert TRIE.version == version


@every_rule
def test_a_residual_can_be_drawn_from_and_stays_within_the_targets_law(make, cut):
    batch = proposals(cut)
    laws_NV, starts = laws_of(batch)
    laws_NV[:, 1] = 0  # a token that the target never says
    laws_NV /= laws_NV.sum(-1, keepdim=True)
    for proposal, start in zip(batch, starts, strict=False):
        for index, proposed in enumerate(proposal.tokens):
            for level in range(len(proposed.tests)):
                law_V = laws_NV[start + index]
                weights_V = make().residual(proposal, index, level, law_V)
                assert weights_V.shape == law_V.shape
                assert weights_V.min() >= 0
                assert 0 < float(weights_V.sum()) <= 1 + 1e-6
                assert weights_V[law_V == 0].sum() == 0


@every_rule
def test_drafts_without_pieces_have_no_levels(make, cut):
    empty = [proposal for proposal in proposals(cut) if not proposal.draft.pieces] * 2
    assert make().levels(empty, torch.full((2, len(SPELLING)), 1 / len(SPELLING)), [0, 1, 2]) == [[], []]


def test_no_implementation_is_missing_from_this_suite():
    found = {
        name for name, cls in inspect.getmembers(acceptance, inspect.isclass)
        if {"levels", "residual"} <= vars(cls).keys() and cls is not Rule
    }  # fmt: skip
    assert found == {type(make()).__name__ for make, _ in RULES.values()}
