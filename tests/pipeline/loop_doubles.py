"""Stages, a drift watch, an answer and a publisher that do nothing but keep the loop's contract in sight."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from event_making import drifted, published, updated

from pipeline.clock import Clock as RunClock
from pipeline.coach import LocalCoach
from pipeline.lane_stages import Stages
from pipeline.loop import Lane, Loop, UnfitPromptError
from pipeline.publish import Publisher
from pipeline.records import Recorder
from stages.blocks import Decision, Draft, Lesson, Proposal, ProposedToken, Row, Verdict
from stages.draws import SeededDraws
from store.events import (
    Drifted,
    Event,
    Origin,
    Outcome,
    PromptCompleted,
    PromptReceived,
    PromptRejected,
    Recalled,
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

    def observe(self, verdicts: list[Verdict]) -> None:
        assert tuple(verdict.proposal.draft.row.offset for verdict in verdicts) == self.calls[-1]


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


class StubDistill:
    """Every prompt gives one update of the drafter."""

    def __init__(self) -> None:
        self.drafter_version = self.head_version = 0

    def __call__(self, batch: Sequence[Lesson]) -> list[tuple[Updated, ...]]:
        updates = []
        for lesson in batch:
            self.drafter_version += 1
            updates.append((self._update(lesson),))
        return updates

    def end(self) -> tuple[Updated, ...]:
        return ()

    def _update(self, lesson: Lesson) -> Updated:
        versions = {"drafter_version": self.drafter_version, "head_version": self.head_version}
        return updated(offset=lesson.offset, target=lesson.target, **versions)


class StubDrift:
    """Alarms after the prompts that it was told to, with the given action."""

    def __init__(self, actions: dict[int, str]) -> None:
        self._actions = actions

    def observe(self, prompt: PromptCompleted) -> Drifted | None:
        action = self._actions.get(prompt.offset)
        return drifted(offset=prompt.offset, target=prompt.target, action=action) if action else None


class StubAnswer:
    """A recall that takes nothing back. Knows how often the drafter had learned when it was called."""

    def __init__(self, distill: StubDistill) -> None:
        self.noted: list[tuple[int, int]] = []  # offset of the lesson, drafter's version
        self.given: list[tuple[int, int]] = []
        self._distill = distill

    def note(self, lesson: Lesson) -> None:
        self.noted.append((lesson.offset, self._distill.drafter_version))

    def to(self, drifted: Drifted) -> Iterator[Event]:
        self.given.append((drifted.offset, self._distill.drafter_version))
        self._distill.head_version += 1
        yield Recalled(drifted.offset, drifted.target, None, 3, 2, 0.5, 0.4, 0.0)


class StubPublisher:
    """A floor, a version after every prompt and at every drift, and an end."""

    def __init__(self, target: str = "big") -> None:
        self._target = target

    def floor(self) -> Iterator[VersionPublished]:
        yield self._version(0, "floor")

    def at(self, drifted: Drifted) -> Iterator[VersionPublished]:
        yield self._version(drifted.offset, "drift")

    def after(self, prompt: PromptCompleted) -> Iterator[VersionPublished]:
        yield self._version(prompt.offset, "interval")

    def end(self) -> Iterator[VersionPublished]:
        yield self._version(99, "end")

    def _version(self, offset: int, reason: str) -> VersionPublished:
        return published(offset=offset, target=self._target, reason=reason)


class Clock:
    """Each look at it is a second later."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def prepare(prompt: PromptReceived) -> Row:
    """A row that takes as many blocks as its text has characters."""
    if prompt.text == OVERLONG:
        raise UnfitPromptError("it is too long")
    draws = SeededDraws(0, prompt.offset)
    return Row(prompt.offset, prompt.prompt_id, prompt.dataset, prompt.text, [1], 1, [1], draws, len(prompt.text))


def stub_lane(clock: RunClock, name: str = "big", drifts: dict[int, str] | None = None) -> Lane:
    """A lane over stubs."""
    distill = StubDistill()
    return Lane(
        name,
        Stages(StubDecode(), StubTranslate(), StubVerify()),
        prepare,
        Recorder(name, lambda token: bytes([token]), lambda tokens: f"{len(tokens)} tokens"),
        LocalCoach(distill, StubDrift(drifts or {}), StubAnswer(distill), StubPublisher(name)),
        clock,
    )


def stub_loop(batch: int = 1, drifts: dict[int, str] | None = None, publisher: Publisher | None = None) -> Loop:
    """A loop of one lane over stubs."""
    clock = RunClock(Clock())
    lane = stub_lane(clock, drifts=drifts)
    if publisher:
        lane.coach.publisher = publisher
    return Loop({"big": lane}, lambda offset: "big", batch, clock)


def lane_of(loop: Loop, name: str = "big") -> Any:
    """A lane of the loop, its stubs within reach."""
    return loop.lanes[name]


def prompts_of(*texts: str | None, target: str | None = None) -> Iterator[PromptReceived | PromptRejected]:
    """Prompts of these texts; None stands for a row of the source that was no prompt."""
    offset = 0
    for line, text in enumerate(texts, 1):
        if text is None:
            yield PromptRejected("lengths", line, "no text")
        else:
            yield PromptReceived(offset, f"lengths:{line}", "lengths", line, text, target)
            offset += 1
