"""Every loss against what it is on whole vocabularies, and the direction in which it pulls."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stages.blocks import Teaching
from stages.losses import (
    Student,
    Taught,
    acceptance_loss,
    direct_divergence,
    direct_loss,
    expected_acceptance,
    greedy_agreement,
    hybrid_loss,
    trie_divergence,
    trie_loss,
)

D = 5
NO_NGRAMS = torch.zeros(1)


def law(seed: int) -> Tensor:
    return torch.randn(D, generator=torch.Generator().manual_seed(seed)).mul(1.5).softmax(-1)


def teaching(target_D: Tensor, kept: int = D, depth: int = 0, share: float = 0.5) -> Teaching:
    """A law's likeliest pieces; `share` of each group is the token that is this one piece."""
    top = target_D.topk(kept)
    ids, group = tuple(top.indices.tolist()), tuple(top.values.tolist())
    direct = tuple(share * mass for mass in group) if depth == 0 else (0.0,) * kept
    return Teaching(1, depth, ids, group, direct, max(0.0, 1 - sum(group)))


def both(logits_ND: Tensor, *teachings: Teaching, emitted: Sequence[int] | None = None) -> tuple[Student, Taught]:
    """The pieces emitted are the teachers' likeliest, as in greedy decoding, unless given."""
    pieces = [one.ids[one.group.index(max(one.group))] for one in teachings] if emitted is None else list(emitted)
    taught = Taught.of(teachings, torch.tensor(pieces))
    return Student.of(logits_ND, taught), taught


seeds = st.integers(0, 10_000)


@given(seeds)
def test_the_divergence_is_that_of_the_whole_laws(seed: int):
    target_D, logits_D = law(seed), law(seed + 1).log()
    found = trie_divergence(*both(logits_D[None], teaching(target_D)))
    assert float(found) == pytest.approx(float(-(target_D * logits_D).sum()), rel=1e-4)


@given(seeds)
def test_the_expected_acceptance_is_the_overlap_of_the_whole_laws(seed: int):
    target_D, drafter_D = law(seed), law(seed + 1)
    found = expected_acceptance(*both(drafter_D.log()[None], teaching(target_D)))
    assert float(found) == pytest.approx(float(torch.minimum(target_D, drafter_D).sum()), abs=1e-5)


@given(seeds, st.integers(1, D))
def test_buckets_bound_what_the_whole_laws_give(seed: int, kept: int):
    target_D, drafter_D = law(seed), law(seed + 1)
    student, taught = both(drafter_D.log()[None], teaching(target_D, kept))
    entropy = float(torch.special.entr(target_D).sum())
    own_entropy = float(torch.special.entr(taught.group_NT).sum() + torch.special.entr(taught.rest_N).sum())
    whole = float(-(target_D * drafter_D.log()).sum()) - entropy
    assert float(trie_divergence(student, taught)) - own_entropy <= whole + 1e-4
    assert float(expected_acceptance(student, taught)) >= float(torch.minimum(target_D, drafter_D).sum()) - 1e-5


@given(seeds)
def test_the_divergence_is_least_where_the_laws_agree(seed: int):
    target_D = law(seed)
    logits_D = target_D.log().clone().requires_grad_()
    trie_divergence(*both(logits_D[None], teaching(target_D))).sum().backward()
    assert logits_D.grad.abs().max() < 1e-5


@pytest.mark.parametrize("loss", [trie_loss, acceptance_loss(0.5), acceptance_loss(1.0), direct_loss, hybrid_loss(0.2)])
def test_a_step_down_moves_the_drafter_towards_the_target(loss):
    target_D = torch.tensor([0.7, 0.1, 0.1, 0.05, 0.05])
    logits_D = torch.zeros(D, requires_grad=True)
    student, taught = both(logits_D[None], teaching(target_D))
    loss(student, taught, NO_NGRAMS).backward()
    assert logits_D.grad[0] < 0, "the logit of what the target says more often must rise"
    assert logits_D.grad[3] > 0
    assert logits_D.grad.sum() == pytest.approx(0, abs=1e-6)


def test_the_gradient_of_the_divergence_is_the_difference_of_the_laws():
    target_D, logits_D = law(3), law(4).log().requires_grad_()
    trie_loss(*both(logits_D[None], teaching(target_D)), NO_NGRAMS).backward()
    assert torch.allclose(logits_D.grad, logits_D.detach().exp() - target_D, atol=1e-5)


def test_direct_divergence_compares_the_laws_renormalised_to_direct_maps():
    target = Teaching(1, 0, (0, 1, 2), (0.5, 0.3, 0.1), (0.4, 0.0, 0.1), 0.1)
    drafter_D = torch.tensor([0.2, 0.3, 0.3, 0.1, 0.1])
    q, p = torch.tensor([0.4, 0.6]), torch.tensor([0.8, 0.2])  # over pieces 0 and 2
    found = direct_divergence(*both(drafter_D.log()[None], target))
    assert float(found) == pytest.approx(float((q * (q / p).log()).sum()), rel=1e-4)


def test_direct_divergence_counts_beginnings_with_direct_maps_alone():
    target_D, logits_ND = law(1), law(2).log().expand(3, D)
    without = Teaching(1, 0, (0, 1), (0.5, 0.5), (0.0, 0.0), 0.0)
    found = direct_divergence(*both(logits_ND, teaching(target_D), teaching(target_D, depth=1), without))
    assert found[0] > 0
    assert found[1:].tolist() == [0, 0]


def test_direct_loss_is_the_mean_over_beginnings():
    logits_ND = law(2).log().expand(3, D)
    student, taught = both(logits_ND, teaching(law(1)), teaching(law(5)), teaching(law(1), depth=1))
    want = direct_divergence(student, taught)[:2].mean()
    assert float(direct_loss(student, taught, NO_NGRAMS)) == pytest.approx(float(want))


def test_the_hybrid_loss_adds_the_weighted_likelihood_of_ngrams():
    logits_ND = law(2).log().expand(2, D)
    student, taught = both(logits_ND, teaching(law(1)), teaching(law(3)))
    log_N = torch.tensor([-1.0, -3.0])
    want = direct_loss(student, taught, log_N) + 0.2 * (1 + 3) / 2
    assert float(hybrid_loss(0.2)(student, taught, log_N)) == pytest.approx(float(want))


def test_the_acceptance_loss_blends_rejection_with_divergence():
    student, taught = both(law(2).log()[None], teaching(law(1)))
    rejection, divergence = 1 - float(expected_acceptance(student, taught)), float(trie_divergence(student, taught))
    for blend in (0.0, 0.3, 1.0):
        found = float(acceptance_loss(blend)(student, taught, NO_NGRAMS))
        assert found == pytest.approx(blend * rejection + (1 - blend) * divergence, rel=1e-5)


def test_greedy_agreement_is_whether_the_likeliest_piece_is_the_same():
    target_D = torch.tensor([0.1, 0.6, 0.1, 0.1, 0.1])
    drafters = torch.tensor([[0.1, 0.5, 0.2, 0.1, 0.1], [0.5, 0.3, 0.1, 0.05, 0.05]])
    found = greedy_agreement(*both(drafters.log(), teaching(target_D), teaching(target_D)))
    assert found.tolist() == [1, 0]


def test_greedy_agreement_asks_for_the_likeliest_piece_itself_and_not_for_more_than_all_the_rest():
    """One other piece may be likelier than the kept ones, or none, with the same sum of the others."""
    target_D = torch.tensor([0.1, 0.6, 0.1, 0.1, 0.1])
    drafters = torch.tensor([[0.16, 0.4, 0.15, 0.15, 0.14], [0.0, 0.4, 0.6, 0.0, 0.0]])
    kept_alone = teaching(target_D, kept=1)
    assert greedy_agreement(*both(drafters.log(), kept_alone, kept_alone)).tolist() == [1, 0]


def test_greedy_agreement_is_with_what_was_emitted_and_not_with_the_largest_group():
    """The tokens below one piece may be likelier together than the likeliest token, which is below another."""
    target_D = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.05])
    drafters = torch.tensor([[0.2, 0.5, 0.1, 0.1, 0.1], [0.5, 0.2, 0.1, 0.1, 0.1]])
    found = greedy_agreement(*both(drafters.log(), teaching(target_D), teaching(target_D), emitted=[1, 1]))
    assert found.tolist() == [1, 0]
    behind_the_end = both(drafters.log(), teaching(target_D), teaching(target_D), emitted=[-1, -1])
    assert greedy_agreement(*behind_the_end).tolist() == [0, 0]


def test_greedy_agreement_is_no_where_another_piece_than_the_kept_ones_must_be_likeliest():
    target_D = torch.tensor([0.1, 0.6, 0.1, 0.1, 0.1])
    drafter_D = torch.tensor([0.02, 0.03, 0.9, 0.02, 0.03])
    assert greedy_agreement(*both(drafter_D.log()[None], teaching(target_D, kept=1))).tolist() == [0]


@pytest.mark.parametrize("measure", [trie_divergence, expected_acceptance, direct_divergence, greedy_agreement])
def test_padding_to_the_longest_teaching_changes_nothing(measure):
    short, long = teaching(law(1), kept=2), teaching(law(3), kept=D)
    logits_ND = torch.stack([law(2).log(), law(4).log()])
    together = measure(*both(logits_ND, short, long))
    assert float(together[0]) == pytest.approx(float(measure(*both(logits_ND[:1], short))[0]), abs=1e-6)
    assert float(together[1]) == pytest.approx(float(measure(*both(logits_ND[1:], long))[0]), abs=1e-6)


@pytest.mark.parametrize("loss", [trie_loss, acceptance_loss(0.5), direct_loss, hybrid_loss(0.2)])
def test_forbidden_pieces_and_certain_laws_leave_losses_and_gradients_finite(loss):
    logits_ND = torch.tensor([[0.0, 90.0, -torch.inf, 1.0, -90.0]], requires_grad=True)
    certain = Teaching(1, 0, (0, 1, 2), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0), 0.0)
    value = loss(*both(logits_ND, certain), NO_NGRAMS)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(logits_ND.grad).all()
