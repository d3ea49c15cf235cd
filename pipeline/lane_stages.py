"""The three stages of a block, and what the loop asks of each."""

from dataclasses import dataclass
from typing import Protocol

from stages.blocks import Draft, Proposal, Row, Verdict
from stages.ngram_cache import Cache
from stages.stage import Stage


class Decoding(Stage[Row, Draft], Protocol):
    """Drafting that is told what became of its drafts."""

    def observe(self, verdicts: list[Verdict]) -> None:
        """Called once per block, after verification."""
        ...


class Translating(Stage[Draft, Proposal], Protocol):
    """Translation that remembers which n-grams the target emitted."""

    @property
    def cache_version(self) -> int:
        """Changes of the n-gram cache so far."""
        ...

    @property
    def cache(self) -> Cache:
        """The n-grams that are now active."""
        ...

    def observe(self, verdicts: list[Verdict]) -> None:
        """Called once per block, after verification."""
        ...


@dataclass(frozen=True)
class Stages:
    """Those of one target."""

    decode: Decoding
    translate: Translating
    verify: Stage[Proposal, Verdict]

    def all(self) -> tuple[Stage, ...]:
        """In the order of a block."""
        return (self.decode, self.translate, self.verify)
