"""The three stages of a block, as the loop calls them."""

from dataclasses import dataclass
from typing import Any, Protocol

from stages.contract.blocks import Draft, Proposal, SequenceState, Verdict
from stages.contract.stage import Stage
from stages.drafting.costs import StageSeconds
from stages.translate import Translate


class Decoding(Stage[SequenceState, Draft], Protocol):
    """The drafting stage, which also receives the outcome of its drafts."""

    def observe(self, verdicts: list[Verdict], seconds: StageSeconds | None) -> None:
        """Called once per block, after verification, with the seconds of its stages; None if the block also read
        prompts.
        """
        ...

    def resume_speculation(self) -> None:
        """End a pause and try the drafter again. Called between blocks after a drift or a change of the drafter."""
        ...

    def respond_to_drift(self) -> None:
        """Adapt to changed text. Called between blocks after a drift that the learner acted upon."""
        ...

    def report(self) -> None:
        """Warn of unusable drafts, if there were any. Called at the end of a run."""
        ...


@dataclass(frozen=True)
class Stages:
    """The stages of one target."""

    decode: Decoding
    translate: Translate
    verify: Stage[Proposal, Verdict]

    def all(self) -> tuple[Stage[Any, Any], ...]:
        """Return the stages in the order of a block."""
        return (self.decode, self.translate, self.verify)
