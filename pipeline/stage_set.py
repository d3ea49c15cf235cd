"""The three stages of a block, as the loop calls them."""

from dataclasses import dataclass
from typing import Any

from stages.choose import ChooseDraft
from stages.contract.blocks import Proposal, Verdict
from stages.contract.stage import Stage
from stages.translate import Translate


@dataclass(frozen=True)
class Stages:
    """The stages of one target."""

    decode: ChooseDraft
    translate: Translate
    verify: Stage[Proposal, Verdict]

    def all(self) -> tuple[Stage[Any, Any], ...]:
        """Return the stages in the order of a block."""
        return (self.decode, self.translate, self.verify)
