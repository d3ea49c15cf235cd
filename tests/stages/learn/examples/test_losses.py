"""Every loss against what it is on whole vocabularies, and the direction in which it pulls."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from soft_target_tables import SoftTarget
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stages.learn.examples.losses import (
    LOSSES,
    StudentBatch,
    TeacherBatch,
    acceptance_loss,
    direct_divergence,
    expected_acceptance,
    greedy_agreement,
    hybrid_loss,
    trie_divergence,
    trie_loss,
)

D = 5
NO_NGRAMS = torch.zeros(1)


def distribution(seed: int) -> Tensor:
    return torch.randn(D, generator=torch.Generator().manual_seed(seed)).mul(1.5).softmax(-1)


def soft_target(target_D: Tensor, kept: int = D, depth: int = 0, share: float = 0.5) -> SoftTarget:
    """A distribution's likeliest pieces; `share` of each group is the token that is this one piece."""
    top = target_D.topk(kept)
    ids, group = tuple(top.indices.tolist()), tuple(top.values.tolist())
    direct = tuple(share * mass for mass in group) if depth == 0 else (0.0,) * kept
    return SoftTarget(1, depth, ids, group, direct, max(0.0, 1 - sum(group)))


def both(
    logits_ND: Tensor, *soft_targets: SoftTarget, emitted: Sequence[int] | None = None
) -> tuple[StudentBatch, TeacherBatch]:
    """The pieces emitted are the teachers' likeliest, as in greedy decoding, unless given."""
    pieces = [one.ids[one.group.index(max(one.group))] for one in soft_targets] if emitted is None else list(emitted)
    ids_NT, group_NT, direct_NT, valid_NT = (
        pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        for rows in zip(*((one.ids, one.group, one.direct, [True] * len(one.ids)) for one in soft_targets), strict=True)
    )
    rest_N, first_N = (
        torch.tensor(row) for row in zip(*((one.rest, one.depth == 0) for one in soft_targets), strict=True)
    )
    teacher = TeacherBatch(ids_NT, valid_NT, group_NT, direct_NT, rest_N, first_N, torch.tensor(pieces))
    return StudentBatch(logits_ND, teacher), teacher


seeds = st.integers(0, 10_000)


@given(seeds)
def test_the_divergence_is_that_of_the_whole_distributions(seed: int):
    target_D, logits_D = distribution(seed), distribution(seed + 1).log()
    found = trie_divergence(*both(logits_D[None], soft_target(target_D)))
    assert float(found) == pytest.approx(float(-(target_D * logits_D).sum()), rel=1e-4)


@given(seeds)
def test_the_expected_acceptance_is_the_overlap_of_the_whole_distributions(seed: int):
    target_D, drafter_D = distribution(seed), distribution(seed + 1)
    found = expected_acceptance(*both(drafter_D.log()[None], soft_target(target_D)))
    assert float(found) == pytest.approx(float(torch.minimum(target_D, drafter_D).sum()), abs=1e-5)


@given(seeds, st.integers(1, D))
def test_buckets_bound_what_the_whole_distributions_give(seed: int, kept: int):
    target_D, drafter_D = distribution(seed), distribution(seed + 1)
    student, teacher = both(drafter_D.log()[None], soft_target(target_D, kept))
    entropy = float(torch.special.entr(target_D).sum())
    own_entropy = float(torch.special.entr(teacher.group_NT).sum() + torch.special.entr(teacher.rest_N).sum())
    whole = float(-(target_D * drafter_D.log()).sum()) - entropy
    assert float(trie_divergence(student, teacher)) - own_entropy <= whole + 1e-4
    assert float(expected_acceptance(student, teacher)) >= float(torch.minimum(target_D, drafter_D).sum()) - 1e-5


@given(seeds)
def test_the_divergence_is_least_where_the_distributions_agree(seed: int):
    target_D = distribution(seed)
    logits_D = target_D.log().clone().requires_grad_()
    trie_divergence(*both(logits_D[None], soft_target(target_D))).sum().backward()
    assert logits_D.grad.abs().max() < 1e-5


def test_the_gradient_of_the_divergence_is_the_difference_of_the_distributions():
    target_D, logits_D = distribution(3), distribution(4).log().requires_grad_()
    trie_loss(*both(logits_D[None], soft_target(target_D)), NO_NGRAMS).backward()
    assert torch.allclose(logits_D.grad, logits_D.detach().exp() - target_D, atol=1e-5)


def test_direct_divergence_compares_the_distributions_renormalised_to_direct_maps():
    target = SoftTarget(1, 0, (0, 1, 2), (0.5, 0.3, 0.1), (0.4, 0.0, 0.1), 0.1)
    drafter_D = torch.tensor([0.2, 0.3, 0.3, 0.1, 0.1])
    q, p = torch.tensor([0.4, 0.6]), torch.tensor([0.8, 0.2])  # over pieces 0 and 2
    found = direct_divergence(*both(drafter_D.log()[None], target))
    assert float(found) == pytest.approx(float((q * (q / p).log()).sum()), rel=1e-4)


def test_direct_divergence_is_of_beginnings_of_tokens_alone():
    inside = SoftTarget(1, 1, (0, 1, 2), (0.5, 0.3, 0.1), (0.4, 0.0, 0.1), 0.1)
    assert float(direct_divergence(*both(distribution(1).log()[None], inside))) == 0


def test_likelier_ngrams_lower_the_loss():
    student, teacher = both(distribution(2).log()[None], soft_target(distribution(1)))
    less, more = (float(hybrid_loss(0.5)(student, teacher, torch.tensor([log]))) for log in (-2.0, -1.0))
    assert less - more == pytest.approx(0.5)


def test_the_acceptance_loss_blends_rejection_with_divergence():
    student, teacher = both(distribution(2).log()[None], soft_target(distribution(1)))
    rejection, divergence = 1 - float(expected_acceptance(student, teacher)), float(trie_divergence(student, teacher))
    for blend in (0.0, 0.3, 1.0):
        found = float(acceptance_loss(blend)(student, teacher, NO_NGRAMS))
        assert found == pytest.approx(blend * rejection + (1 - blend) * divergence, rel=1e-5)


def test_greedy_agreement_is_whether_the_likeliest_piece_is_the_same():
    target_D = torch.tensor([0.1, 0.6, 0.1, 0.1, 0.1])
    drafters = torch.tensor([[0.1, 0.5, 0.2, 0.1, 0.1], [0.5, 0.3, 0.1, 0.05, 0.05]])
    found = greedy_agreement(*both(drafters.log(), soft_target(target_D), soft_target(target_D)))
    assert found.tolist() == [1, 0]


def test_greedy_agreement_is_with_what_was_emitted_and_not_with_the_largest_group():
    """The tokens below one piece may be likelier together than the likeliest token, which is below another."""
    target_D = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.05])
    drafters = torch.tensor([[0.2, 0.5, 0.1, 0.1, 0.1], [0.5, 0.2, 0.1, 0.1, 0.1]])
    found = greedy_agreement(*both(drafters.log(), soft_target(target_D), soft_target(target_D), emitted=[1, 1]))
    assert found.tolist() == [1, 0]
    after_the_end = both(drafters.log(), soft_target(target_D), soft_target(target_D), emitted=[-1, -1])
    assert greedy_agreement(*after_the_end).tolist() == [0, 0]


@pytest.mark.parametrize("measure", [trie_divergence, expected_acceptance, direct_divergence, greedy_agreement])
def test_padding_to_the_longest_soft_target_changes_nothing(measure):
    short, long = soft_target(distribution(1), kept=2), soft_target(distribution(3), kept=D)
    logits_ND = torch.stack([distribution(2).log(), distribution(4).log()])
    together = measure(*both(logits_ND, short, long))
    assert float(together[0]) == pytest.approx(float(measure(*both(logits_ND[:1], short))[0]), abs=1e-6)
    assert float(together[1]) == pytest.approx(float(measure(*both(logits_ND[1:], long))[0]), abs=1e-6)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"n-grams"}))  # which reads no distribution
def test_forbidden_pieces_and_certain_distributions_leave_losses_and_gradients_finite(name: str):
    logits_ND = torch.tensor([[0.0, 90.0, -torch.inf, 1.0, -90.0]], requires_grad=True)
    certain = SoftTarget(1, 0, (0, 1, 2), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0), 0.0)
    value = LOSSES[name](*both(logits_ND, certain), NO_NGRAMS)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(logits_ND.grad).all()


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"n-grams"}))  # which reads no distribution
def test_every_loss_of_the_table_pulls_towards_the_target(name: str):
    """A step against the gradient lowers it; also those with a term for n-grams."""
    target_D, logits_D = distribution(3), distribution(4).log().requires_grad_()
    loss = LOSSES[name]
    before = loss(*both(logits_D[None], soft_target(target_D)), NO_NGRAMS)
    before.backward()
    after = loss(*both((logits_D - 0.1 * logits_D.grad).detach()[None], soft_target(target_D)), NO_NGRAMS)
    assert after.item() < before.item()


def half_and_half(first: bool = True) -> TeacherBatch:
    """The target gives a half to piece 0, half of that to its direct map, and a half to all others."""
    half = torch.tensor([[0.5]])
    kept = torch.tensor([[True]])
    return TeacherBatch(torch.zeros(1, 1).long(), kept, half, half / 2, half[0], torch.tensor([first]), torch.zeros(1))


def test_the_rest_is_a_bucket_of_its_own():
    student = StudentBatch(torch.tensor([[0.25, 0.75]]).log(), half_and_half())
    expected = -(0.5 * torch.tensor(0.25).log() + 0.5 * torch.tensor(0.75).log())
    torch.testing.assert_close(trie_divergence(student, half_and_half())[0], expected)
    assert expected_acceptance(student, half_and_half()).tolist() == pytest.approx([0.25 + 0.5])
