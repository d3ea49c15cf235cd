"""Distillation losses over the teacher's top pieces and one bucket for the rest.

Both distributions are compared on the teacher's top pieces plus one bucket for all other pieces, so nothing of the
vocabulary's size is stored. On the buckets a divergence is at most, and an expected acceptance at least, its value on
the full distributions.

Shapes: N supervised positions, T top pieces (padded), D drafter ids, M pieces of accepted n-grams (may be 0).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from stages.contract.blocks import Numbers
from stages.learn.examples.soft_targets import SoftTargetTable

TINY = 1e-8


@dataclass(frozen=True)
class TeacherBatch:
    """Soft targets of one batch as tensors."""

    ids_NT: Tensor  # top pieces; padding repeats id 0 with probability 0
    valid_NT: Tensor  # False at padding
    # group_NT, direct_NT: the target's probabilities (see `SoftTargetTable`)
    group_NT: Tensor
    direct_NT: Tensor
    rest_N: Tensor  # the remaining probability
    first_N: Tensor  # True at the beginning of a token
    emitted_N: Tensor  # the piece of the text at that position; -1 where the token is not spelt

    @staticmethod
    def from_table(table: SoftTargetTable, emitted_N: Tensor) -> "TeacherBatch":
        """Copy a table of soft targets to the device of `emitted_N`."""

        def copy(values: Numbers, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.from_numpy(values).to(emitted_N.device, dtype)

        return TeacherBatch(
            copy(table.ids_NT, torch.long),
            copy(table.valid_NT, torch.bool),
            copy(table.group_NT),
            copy(table.direct_NT),
            copy(table.rest_N),
            copy(table.depths_N == 0, torch.bool),
            emitted_N,
        )


@dataclass(frozen=True)
class StudentBatch:
    """The drafter's distribution at the same positions, on the same buckets, computed where it is first read."""

    logits_ND: Tensor  # forbidden pieces at -inf
    teacher: TeacherBatch

    @cached_property
    def log_top_NT(self) -> Tensor:  # noqa: N802  (the shape)
        """Log probabilities of the teacher's top pieces; meaningless at padding."""
        return self.logits_ND.log_softmax(-1).gather(1, self.teacher.ids_NT).clamp(min=-40)

    @cached_property
    def rest_N(self) -> Tensor:  # noqa: N802  (the shape)
        """The probability of all other pieces."""
        top_N = self.log_top_NT.exp().masked_fill(~self.teacher.valid_NT, 0).sum(-1)
        return (1 - top_N).clamp(min=TINY)

    @cached_property
    def argmax_N(self) -> Tensor:  # noqa: N802  (the shape)
        """The most probable piece, among the teacher's top pieces or not."""
        return self.logits_ND.argmax(-1)


def trie_divergence(student: StudentBatch, teacher: TeacherBatch) -> Tensor:
    """Return the forward KL(target || drafter), level by level, without the constant entropy of the target (N,)."""
    top_N = (teacher.group_NT * student.log_top_NT).masked_fill(~teacher.valid_NT, 0).sum(-1)
    return -(top_N + teacher.rest_N * student.rest_N.log())


def expected_acceptance(student: StudentBatch, teacher: TeacherBatch) -> Tensor:
    """Return the sum of min(target, drafter): the probability that a piece drawn from the drafter is accepted (N,)."""
    valid_NT = torch.minimum(student.log_top_NT.exp(), teacher.group_NT).masked_fill(~teacher.valid_NT, 0)
    return valid_NT.sum(-1) + torch.minimum(student.rest_N, teacher.rest_N)


def greedy_agreement(student: StudentBatch, teacher: TeacherBatch) -> Tensor:
    """Return 1 where the drafter's most probable piece is the emitted one: the acceptance at temperature 0 (N,)."""
    return (student.argmax_N == teacher.emitted_N).float()


def direct_divergence(student: StudentBatch, teacher: TeacherBatch) -> Tensor:
    """Return the paper's first term: the reverse KL(drafter || target) over direct maps, both renormalised there (N,).

    The paper leaves the normalisation open; without it the term rewards probability that leaks to pieces without a map.
    """
    direct_NT = teacher.valid_NT & (teacher.direct_NT > TINY)
    log_student_NT = student.log_top_NT.masked_fill(~direct_NT, -1e4).log_softmax(-1)
    target_NT = teacher.direct_NT / teacher.direct_NT.sum(-1, keepdim=True).clamp(min=TINY)
    terms_NT = log_student_NT.exp() * (log_student_NT - target_NT.clamp(min=TINY).log())
    usable_N = teacher.first_N & direct_NT.any(-1)
    return terms_NT.masked_fill(~direct_NT, 0).sum(-1) * usable_N


# Returns a scalar: a mean over the N positions, because the trainer weights micro-batches by N.
Loss = Callable[[StudentBatch, TeacherBatch, Tensor], Tensor]


def trie_loss(student: StudentBatch, teacher: TeacherBatch, ngram_log_M: Tensor) -> Tensor:
    """Return the mean divergence of the distributions over pieces (a scalar)."""
    return trie_divergence(student, teacher).mean()


def direct_loss(student: StudentBatch, teacher: TeacherBatch, ngram_log_M: Tensor) -> Tensor:
    """Return the loss of the paper's ablation, L_DM (a scalar)."""
    return direct_divergence(student, teacher).sum() / teacher.first_N.sum().clamp(min=1)


def hybrid_loss(ngram_weight: float) -> Loss:
    """Make the loss of the paper's equations 3 and 4: L_DM plus the weighted negative log-likelihood of the pieces of
    accepted n-grams.
    """

    def loss(student: StudentBatch, teacher: TeacherBatch, ngram_log_M: Tensor) -> Tensor:
        return direct_loss(student, teacher, ngram_log_M) + ngram_weight * ngram_loss(student, teacher, ngram_log_M)

    return loss


def ngram_loss(student: StudentBatch, teacher: TeacherBatch, ngram_log_M: Tensor) -> Tensor:
    """Return the second term of the paper's loss alone (a scalar): an ablation of its table 6."""
    return -ngram_log_M.sum() / teacher.first_N.sum().clamp(min=1)


def direct_likelihood(student: StudentBatch, teacher: TeacherBatch) -> Tensor:
    """Return the log probability of the emitted piece where a token begins, weighted by the target's probability that
    the token is this piece alone (N,); 0 where the piece is not among the target's top pieces.
    """
    emitted_NT = teacher.valid_NT & (teacher.ids_NT == teacher.emitted_N[:, None])
    alone_NT = teacher.direct_NT / teacher.group_NT.clamp(min=TINY)
    return (alone_NT * student.log_top_NT).masked_fill(~emitted_NT, 0).sum(-1) * teacher.first_N


def likelihood_loss(ngram_weight: float) -> Loss:
    """Make the ablation of the paper's table 6 that has a negative log-likelihood in both terms."""

    def loss(student: StudentBatch, teacher: TeacherBatch, ngram_log_M: Tensor) -> Tensor:
        direct = -direct_likelihood(student, teacher).sum() / teacher.first_N.sum().clamp(min=1)
        return direct + ngram_weight * ngram_loss(student, teacher, ngram_log_M)

    return loss


def acceptance_loss(blend: float) -> Loss:
    """Make the expected rejection blended with the divergence; the former alone has no gradient where the distributions
    do not overlap.

    LK losses (arXiv 2602.23881) motivate maximising the acceptance itself.
    """

    def loss(student: StudentBatch, teacher: TeacherBatch, ngram_log_M: Tensor) -> Tensor:
        rejection_N = 1 - expected_acceptance(student, teacher)
        return (blend * rejection_N + (1 - blend) * trie_divergence(student, teacher)).mean()

    return loss


NGRAM_WEIGHT = 0.2  # of the n-gram term in the hybrid loss, as in the paper
ACCEPTANCE_BLEND = 0.5  # share of the acceptance in the acceptance loss
LOSSES: dict[str, Loss] = {  # by the name of the setting
    "trie": trie_loss,
    "direct": direct_loss,
    "hybrid": hybrid_loss(NGRAM_WEIGHT),
    "acceptance": acceptance_loss(ACCEPTANCE_BLEND),
    "likelihood": likelihood_loss(NGRAM_WEIGHT),
    "n-grams": ngram_loss,
}
