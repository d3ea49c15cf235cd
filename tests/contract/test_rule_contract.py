"""The contract of `Rule`, for every implementation."""

import inspect
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from doubles import row_of

from pipeline.config.sections import DraftSettings
from stages.contract.blocks import Draft, Proposal
from stages.ngrams.trie import Trie
from stages.verification import rules as acceptance
from stages.verification.parsing import parse, parse_longest
from stages.verification.rules import MODES, PaperRule, Rule, TrieRule, one_hot_probs, sampled_probs

SPELLING = ((0,), (1,), (0, 1), (0, 1, 2, 0), (2,), None, (1, 3))
PIECES = 4
DRAFTS = [(), (0,), (0, 1), (0, 1, 2), (0, 1, 2, 0), (1, 3, 2), (2, 3), (3,), (0, 2, 1, 1), (1, 0, 1, 0)]


def new_trie() -> Trie:
    trie = Trie(len(SPELLING), PIECES)
    trie.insert_all((pieces, token) for token, pieces in enumerate(SPELLING) if pieces)
    return trie


TRIE = new_trie()
RULES: dict[str, tuple[Callable[[], Rule], Callable]] = {
    "TrieRule, sampled": (lambda: TrieRule(TRIE, sampled_probs), parse),
    "TrieRule, one-hot": (lambda: TrieRule(TRIE, one_hot_probs), parse),
    "PaperRule": (lambda: PaperRule(TRIE, SPELLING), parse_longest),
}
every_rule = pytest.mark.parametrize(("make", "cut"), RULES.values(), ids=list(RULES))


def proposals(cut: Callable) -> list[Proposal]:
    generator = torch.Generator().manual_seed(0)
    distributions = [torch.rand(len(pieces), PIECES, generator=generator).softmax(-1) for pieces in DRAFTS]
    drafts = [
        Draft(row_of([0]), pieces, draft_probs_KD, (), None, ())
        for pieces, draft_probs_KD in zip(DRAFTS, distributions, strict=True)
    ]
    return [Proposal(draft, cut(TRIE, draft.pieces)) for draft in drafts]


def to_probs(batch: list[Proposal]) -> tuple[torch.Tensor, list[int]]:
    starts = torch.tensor([0, *(len(proposal.verifiable) + 1 for proposal in batch)]).cumsum(0).tolist()
    target_probs_NV = (2 * torch.randn(starts[-1], len(SPELLING), generator=torch.Generator().manual_seed(1))).softmax(
        -1
    )
    return target_probs_NV, starts


@every_rule
def test_every_proposed_token_has_a_pair_of_probabilities_per_level(make, cut):
    batch = proposals(cut)
    found = make().levels(batch, *to_probs(batch))
    assert len(found) == len(batch)
    for proposal, levels in zip(batch, found, strict=True):
        assert len(levels) == len(proposal.tokens)
        for proposed, (drafter, target) in zip(proposal.tokens, levels, strict=True):
            assert len(drafter) == len(target) == len(proposed.tests) >= 1
            assert all(0 < probability <= 1 + 1e-6 for probability in drafter), "every drafted piece was possible"
            assert all(0 <= probability <= 1 + 1e-6 for probability in target)


@every_rule
def test_pieces_without_a_token_have_probability_zero_under_the_target(make, cut):
    batch = proposals(cut)
    found = make().levels(batch, *to_probs(batch))
    nameless = [
        levels[-1][1][-1] for proposal, levels in zip(batch, found, strict=True)
        if proposal.tokens and proposal.tokens[-1].token is None
    ]  # fmt: skip
    assert len(nameless) >= 2
    assert set(nameless) == {0.0}


@every_rule
def test_levels_of_a_row_do_not_depend_on_the_other_rows_of_the_batch(make, cut):
    batch = proposals(cut)
    target_probs_NV, starts = to_probs(batch)
    together = make().levels(batch, target_probs_NV, starts)
    for number, proposal in enumerate(batch):
        assert make().levels([proposal], target_probs_NV[starts[number] : starts[number + 1]], [0]) == [
            together[number]
        ]


@every_rule
def test_a_rule_is_pure(make, cut):
    batch, rule = proposals(cut), make()
    target_probs_NV, starts = to_probs(batch)
    before = target_probs_NV.clone(), [proposal.draft.draft_probs_KD.clone() for proposal in batch]
    first = rule.levels(batch, target_probs_NV, starts)
    for proposal, start in zip(batch, starts, strict=False):
        for index, proposed in enumerate(proposal.tokens):
            levels = range(len(proposed.tests))
            once = [rule.residual(proposal, index, level, target_probs_NV[start + index]) for level in levels]
            again = [rule.residual(proposal, index, level, target_probs_NV[start + index]) for level in levels]
            assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert rule.levels(batch, target_probs_NV, starts) == first
    assert torch.equal(target_probs_NV, before[0])
    assert all(
        torch.equal(proposal.draft.draft_probs_KD, draft_probs_KD)
        for proposal, draft_probs_KD in zip(batch, before[1], strict=True)
    )


@every_rule
def test_a_residual_can_be_sampled_and_stays_within_the_targets_support(make, cut):
    batch = proposals(cut)
    target_probs_NV, starts = to_probs(batch)
    target_probs_NV[:, 1] = 0  # a token that the target never emits
    target_probs_NV /= target_probs_NV.sum(-1, keepdim=True)
    for proposal, start in zip(batch, starts, strict=False):
        for index, proposed in enumerate(proposal.tokens):
            for level in range(len(proposed.tests)):
                target_probs_V = target_probs_NV[start + index]
                weights_V = make().residual(proposal, index, level, target_probs_V)
                assert weights_V.shape == target_probs_V.shape
                assert weights_V.min() >= 0
                assert 0 < float(weights_V.sum()) <= 1 + 1e-6
                assert weights_V[target_probs_V == 0].sum() == 0


@every_rule
def test_drafts_without_pieces_have_no_levels(make, cut):
    empty = [proposal for proposal in proposals(cut) if not proposal.draft.pieces] * 2
    assert make().levels(empty, torch.full((2, len(SPELLING)), 1 / len(SPELLING)), [0, 1, 2]) == [[], []]


def test_no_implementation_is_missing_from_this_suite():
    found = {name for name, cls in inspect.getmembers(acceptance, inspect.isclass) if Rule in cls.__mro__[1:]}
    assert found == {type(make()).__name__ for make, _ in RULES.values()}
    assert found == {type(mode.make_rule(TRIE, SPELLING)).__name__ for mode in MODES.values()}


def test_every_name_of_the_setting_is_a_mode():
    assert set(MODES) == set(get_args(DraftSettings.model_fields["mode"].annotation))


def test_a_mode_without_ngrams_drafts_direct_maps_only():
    assert MODES["trie"].draftable_pieces(SPELLING) == {0, 1, 2, 3}
    assert MODES["tli"].draftable_pieces(SPELLING) == {0, 1, 2}
