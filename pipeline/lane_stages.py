"""The four stages of one target, and what the loop asks of each."""

from dataclasses import dataclass
from typing import Protocol

from stages.blocks import Draft, Lesson, Proposal, Row, Verdict
from stages.ngram_cache import Cache
from stages.stage import Stage
from store.events import Updated


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


class Learning(Stage[Lesson, tuple[Updated, ...]], Protocol):
    """Distillation whose progress is counted."""

    @property
    def drafter_version(self) -> int:
        """Drafter updates served so far."""
        ...

    @property
    def head_version(self) -> int:
        """Steps and resets of the head so far."""
        ...

    @property
    def busy(self) -> bool:
        """Whether something is being computed beside decoding, which a snapshot would have to wait for."""
        ...

    def wait(self) -> bool:
        """Wait until nothing is computed beside decoding, for who must have the machine alone, and say whether anything
        was. Nothing is adopted."""
        ...

    def end(self) -> tuple[Updated, ...]:
        """Behind the last lesson: wait for an update that is under way and adopt it. May be called again."""
        ...


@dataclass(frozen=True)
class Stages:
    """The four stages of one target."""

    decode: Decoding
    translate: Translating
    verify: Stage[Proposal, Verdict]
    distill: Learning

    def all(self) -> tuple[Stage, ...]:
        """In the order of a block."""
        return (self.decode, self.translate, self.verify, self.distill)
