"""Stages, a drift watch and a publisher that do nothing but keep the loop's contract with them in sight."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pipeline.loop import Loop, Stages, UnfitPromptError
from pipeline.records import Recorder
from stages.blocks import Decision, Draft, Lesson, Proposal, ProposedToken, Row, Verdict
from stages.draws import SeededDraws
from store.events import (
    Drifted,
    Origin,
    Outcome,
    PromptCompleted,
    PromptReceived,
    PromptRejected,
    Updated,
    VersionPublished,
)

OVERLONG = "too long"


class StubStage:
    """Keeps the order of its rows as a stage does, and checks every call against it."""

    def __init__(self) -> None:
        self.order: list[Row] = []
        self.admitted: list[int] = []
        self.released: list[int] = []
        self.calls: list[tuple[int, ...]] = []

    def admit(self, row: Row) -> None:
        self.admitted.append(row.offset)
        self.order.append(row)

    def release(self, row: Row) -> None:
        self.released.append(row.offset)
        place = self.order.index(row)
        last = self.order.pop()
        if last is not row:
            self.order[place] = last

    def called_with(self, rows: Sequence[Row]) -> None:
        assert [row.offset for row in rows] == [row.offset for row in self.order], "all admitted rows, in order"
        assert rows, "a stage need not be called for nobody"
        self.calls.append(tuple(row.offset for row in rows))


class StubDecode(StubStage):
    def __call__(self, batch: Sequence[Row]) -> list[Draft]:
        self.called_with(batch)
        return [Draft(row, (5,), torch.ones(1, 1), (0.5,), None, (0.9,)) for row in batch]


class StubTranslate(StubStage):
    """The n-gram cache gets a new entry in every block."""

    cache_version = 0

    def __call__(self, batch: Sequence[Draft]) -> list[Proposal]:
        self.called_with([draft.row for draft in batch])
        return [Proposal(draft, (ProposedToken(50, 0, 1, ()),)) for draft in batch]

    def observe(self, verdicts: list[Verdict]) -> None:
        self.called_with([verdict.proposal.draft.row for verdict in verdicts])
        self.cache_version += 1


class StubVerify(StubStage):
    """Accepts everything: one token per block, until the row's room is used up."""

    def __call__(self, batch: Sequence[Proposal]) -> list[Verdict]:
        self.called_with([proposal.draft.row for proposal in batch])
        return [self._accept(proposal) for proposal in batch]

    def _accept(self, proposal: Proposal) -> Verdict:
        row = proposal.draft.row
        row.tokens.append(50)
        row.room -= 1
        row.block += 1
        row.finish = "" if row.room else "length"
        decision = Decision(0, proposal.tokens[0], Outcome.ACCEPTED, 50, Origin.ACCEPTED, (0.5,), (0.5,), 0.25, 1)
        return Verdict(proposal, (decision,), (50,), 1, 1)


class StubDistill(StubStage):
    """Every prompt gives one update of the drafter."""

    def __init__(self) -> None:
        super().__init__()
        self.drafter_version = self.head_version = 0
        self.resets: list[int] = []  # the drafter's version at each

    def __call__(self, batch: Sequence[Lesson]) -> list[tuple[Updated, ...]]:
        updates = []
        for lesson in batch:
            self.drafter_version += 1
            updates.append((self._update(lesson.offset),))
        return updates

    def reset_head(self) -> None:
        self.head_version += 1
        self.resets.append(self.drafter_version)

    def _update(self, offset: int) -> Updated:
        versions = {"drafter_version": self.drafter_version, "head_version": self.head_version}
        return Updated(offset, "drafter", "trie", 1.0, 3, None, None, True, "as asked", 0.0, **versions)


class StubDrift:
    """Alarms after the prompts that it was told to, with the given action."""

    def __init__(self, actions: dict[int, str]) -> None:
        self._actions = actions

    def observe(self, prompt: PromptCompleted) -> Drifted | None:
        action = self._actions.get(prompt.offset)
        return Drifted(prompt.offset, prompt.dataset, "stub", "fall", 0.8, 0.2, action) if action else None


class StubPublisher:
    """A floor, a version after every prompt, and an end."""

    def floor(self) -> Iterator[VersionPublished]:
        yield self._version(0, "floor")

    def after(self, prompt: PromptCompleted, drifted: Drifted | None) -> Iterator[VersionPublished]:
        yield self._version(prompt.offset, "drift" if drifted else "interval")

    def end(self) -> Iterator[VersionPublished]:
        yield self._version(99, "end")

    @staticmethod
    def _version(offset: int, reason: str) -> VersionPublished:
        return VersionPublished(offset, 0, None, reason, 0, 0, 0, 0, None, "versions/0", "")


class Clock:
    """Each look at it is a second later."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def prepare(prompt: PromptReceived) -> Row:
    """A row that takes as many blocks as its text has characters."""
    if prompt.text == OVERLONG:
        raise UnfitPromptError("it is too long")
    draws = SeededDraws(0, prompt.offset)
    return Row(prompt.offset, prompt.prompt_id, prompt.dataset, prompt.text, [1], 1, [1], draws, len(prompt.text))


def stub_loop(batch: int = 1, drifts: dict[int, str] | None = None, **parts: Any) -> Loop:
    """A loop over stubs; `parts` replace some of its arguments."""
    arguments: dict[str, Any] = {
        "stages": Stages(StubDecode(), StubTranslate(), StubVerify(), StubDistill()),
        "prepare": prepare,
        "recorder": Recorder("big", lambda token: bytes([token]), lambda tokens: f"{len(tokens)} tokens"),
        "drift": StubDrift(drifts or {}),
        "publisher": StubPublisher(),
        "clock": Clock(),
    }
    return Loop(**{**arguments, **parts}, batch=batch)


def prompts_of(*texts: str | None) -> Iterator[PromptReceived | PromptRejected]:
    """Prompts of these texts; None stands for a row of the source that was no prompt."""
    offset = 0
    for line, text in enumerate(texts, 1):
        if text is None:
            yield PromptRejected("lengths", line, "no text")
        else:
            yield PromptReceived(offset, f"lengths:{line}", "lengths", line, text)
            offset += 1
