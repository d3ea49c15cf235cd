"""Positions of texts with the features that a draft has there.

Shapes: N positions, X features, D drafter ids.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stages.contract.blocks import Numbers, TrainingExample
from stages.drafting.target_states import SIZE
from stages.learn.examples.losses import TeacherBatch


@dataclass(frozen=True)
class Places:
    """Positions of texts."""

    features_NX: Tensor  # hidden states of the drafter and the target
    forbidden_ND: Tensor  # True for ids that may not be drafted
    teacher: TeacherBatch  # the soft targets

    def logits(self, weight_DX: Tensor) -> Tensor:
        """Return the logits (N, D)."""
        return (self.features_NX @ weight_DX.T).masked_fill_(self.forbidden_ND, -torch.inf)

    def take(self, chosen_N: Tensor) -> "Places":
        """Return some of the positions, by mask or index."""
        teacher = TeacherBatch(*(getattr(self.teacher, field.name)[chosen_N] for field in fields(self.teacher)))
        return Places(self.features_NX[chosen_N], self.forbidden_ND[chosen_N], teacher)


class LaterPlaces(NamedTuple):
    """Positions as drafts from a token earlier reach them: which of all positions, and their features."""

    lines: Tensor
    features_NX: Tensor


def find_states(
    example: TrainingExample, positions_N: Numbers, first_N: Numbers, back: int
) -> tuple[Numbers, Numbers, Numbers]:
    """Find the state that a draft reads at each position of an example's text, if it begins `back` tokens before that
    of the position.

    Args:
        example: the text, with states.
        positions_N: supervised positions of the text in order; those of branches, which have no states, follow it.
        first_N: where tokens begin.
        back: 0 for drafts that begin with the position's own token.

    Returns:
        which of the positions have a state (indices); the number of pieces from the draft's beginning to each of these;
        their states.
    """
    in_text_N = positions_N <= len(example.pieces)
    starts = positions_N[in_text_N & first_N]
    nothing = np.zeros(0, np.int64)
    if example.states is None or len(example.states) != len(starts):
        return nothing, nothing, np.zeros((0, SIZE), np.int8)
    begins_N = np.searchsorted(starts, positions_N, side="right") - 1 - back
    (found,) = ((begins_N > 0) & in_text_N).nonzero()
    begins = begins_N[found]
    return found, positions_N[found] - starts[begins], example.states[begins - 1]
