"""Replaces the drafter if none is loaded, and all drafts are copied."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from stages.contract.blocks import Draft, SequenceState
from stages.contract.stage import Stage
from stages.drafting.costs import ReadPrompts

NO_PROBS = torch.zeros(0, 0)


class NoModel(Stage[SequenceState, Draft]):
    """Drafts nothing. Replaces `Decode`."""

    speculates = False  # whether the model drafts at all: no
    prompts = ReadPrompts()  # those that the model read in the last block: none
    acceptance: Callable[[], float] | None = None  # of the model's drafts: there are none
    admitted_rows: Collection[SequenceState] = ()  # those that a checkpoint restored: none

    @override
    def __call__(
        self,
        batch: Sequence[SequenceState],
        skipped: Collection[SequenceState] = (),
        *,
        whole: bool = False,
    ) -> list[Draft]:
        return [Draft(row, (), self.empty_probs(), (), None, ()) for row in batch]

    def has_space(self, row: SequenceState) -> bool:
        """Return whether a draft fits into the drafter's context."""
        return False

    def has_read(self, row: SequenceState) -> bool:
        return False

    def empty_probs(self) -> Tensor:
        """Return the distributions of a draft without pieces (0, 0)."""
        return NO_PROBS

    def count_drawn(self, draft: Draft) -> int:
        """Return the number of pieces that were drawn for a draft: none."""
        return 0

    def report(self) -> None:
        """Log nothing: no draft was cut short."""
