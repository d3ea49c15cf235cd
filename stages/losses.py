"""What the drafter is taught: losses over kept pieces and a rest.

Both laws are compared on the teacher's kept pieces plus one bucket for everything else, so nothing of the vocabulary's
size is stored. On buckets a divergence is at most, and an expected acceptance at least, what it is on the full laws.

Shapes: N taught positions, T kept pieces (padded), D drafter ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.blocks import Teaching

TINY = 1e-8


@dataclass(frozen=True)
class Taught:
    """Teachings of one batch as tensors.

    Attributes:
        ids_NT: kept pieces; padding repeats id 0 with probability 0.
        kept_NT: which are no padding.
        group_NT, direct_NT: the target's probabilities (see `Teaching`).
        rest_N: the remaining probability.
        first_N: True at the beginning of a token.
        emitted_N: the piece that the text has there; -1 where the token is not spelt.
    """

    ids_NT: Tensor
    kept_NT: Tensor
    group_NT: Tensor
    direct_NT: Tensor
    rest_N: Tensor
    first_N: Tensor
    emitted_N: Tensor

    @staticmethod
    def of(teachings: Sequence[Teaching], emitted_N: Tensor) -> "Taught":
        """Stack teachings, padded to the longest, on the device of `emitted_N`."""
        device = emitted_N.device
        width = max(1, *(len(teaching.ids) for teaching in teachings))

        def padded(rows: list[tuple[float, ...]], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype, device=device)

        return Taught(
            padded([t.ids for t in teachings], torch.long),
            padded([(1.0,) * len(t.ids) for t in teachings], torch.bool),
            padded([t.group for t in teachings]),
            padded([t.direct for t in teachings]),
            torch.tensor([t.rest for t in teachings], device=device),
            torch.tensor([t.depth == 0 for t in teachings], device=device),
            emitted_N,
        )


@dataclass(frozen=True)
class Student:
    """The drafter's law at the same positions, on the same buckets."""

    log_kept_NT: Tensor  # log probabilities; meaningless at padding
    rest_N: Tensor
    likeliest_N: Tensor  # the piece of the highest probability, kept or not

    @staticmethod
    def of(logits_ND: Tensor, taught: Taught) -> "Student":
        """Normalise logits (forbidden pieces at -inf) and pick the teacher's pieces."""
        log_kept_NT = logits_ND.log_softmax(-1).gather(1, taught.ids_NT).clamp(min=-40)
        kept_N = log_kept_NT.exp().masked_fill(~taught.kept_NT, 0).sum(-1)
        return Student(log_kept_NT, (1 - kept_N).clamp(min=TINY), logits_ND.argmax(-1))


def trie_divergence(student: Student, taught: Taught) -> Tensor:
    """KL(target || drafter), level by level; the entropy of the target's law is a constant and left out (N,)."""
    kept_N = (taught.group_NT * student.log_kept_NT).masked_fill(~taught.kept_NT, 0).sum(-1)
    return -(kept_N + taught.rest_N * student.rest_N.log())


def expected_acceptance(student: Student, taught: Taught) -> Tensor:
    """Sum of min(target, drafter): the chance that a piece drawn from the drafter is accepted (N,)."""
    kept_NT = torch.minimum(student.log_kept_NT.exp(), taught.group_NT).masked_fill(~taught.kept_NT, 0)
    return kept_NT.sum(-1) + torch.minimum(student.rest_N, taught.rest_N)


def greedy_agreement(student: Student, taught: Taught) -> Tensor:
    """1 where the drafter's likeliest piece is the one emitted: the acceptance at temperature 0 (N,)."""
    return (student.likeliest_N == taught.emitted_N).float()


def direct_divergence(student: Student, taught: Taught) -> Tensor:
    """The paper's first term: KL(drafter || target) over direct maps, both renormalised there (N,).

    The paper leaves the normalisation open; without it the term rewards mass that leaks to pieces without a map.
    """
    direct_NT = taught.kept_NT & (taught.direct_NT > TINY)
    log_student_NT = student.log_kept_NT.masked_fill(~direct_NT, -1e4).log_softmax(-1)
    target_NT = taught.direct_NT / taught.direct_NT.sum(-1, keepdim=True).clamp(min=TINY)
    terms_NT = log_student_NT.exp() * (log_student_NT - target_NT.clamp(min=TINY).log())
    usable_N = taught.first_N & direct_NT.any(-1)
    return terms_NT.masked_fill(~direct_NT, 0).sum(-1) * usable_N


Loss = Callable[[Student, Taught, Tensor], Tensor]


def trie_loss(student: Student, taught: Taught, ngram_log_N: Tensor) -> Tensor:
    """Mean divergence of the pushed-down laws (a scalar)."""
    return trie_divergence(student, taught).mean()


def direct_loss(student: Student, taught: Taught, ngram_log_N: Tensor) -> Tensor:
    """The paper's ablation L_DM (a scalar)."""
    return direct_divergence(student, taught).sum() / taught.first_N.sum().clamp(min=1)


def hybrid_loss(ngram_weight: float) -> Loss:
    """The paper's equations 3 and 4: L_DM plus the weighted negative log-likelihood of accepted n-grams' pieces."""

    def loss(student: Student, taught: Taught, ngram_log_N: Tensor) -> Tensor:
        return direct_loss(student, taught, ngram_log_N) - ngram_weight * ngram_log_N.sum() / taught.first_N.sum()

    return loss


def acceptance_loss(blend: float) -> Loss:
    """Expected rejection, blended with the divergence: the former alone has no gradient where the laws do not meet.

    LK losses (arXiv 2602.23881) motivate maximising the acceptance itself.
    """

    def loss(student: Student, taught: Taught, ngram_log_N: Tensor) -> Tensor:
        rejection_N = 1 - expected_acceptance(student, taught)
        return (blend * rejection_N + (1 - blend) * trie_divergence(student, taught)).mean()

    return loss
