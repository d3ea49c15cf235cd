"""Stages, a drift monitor, a drift response and a publisher that do nothing but check the loop's contract."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from event_making import make_drifted, make_published, make_updated

from pipeline.learning.local_learner import LocalLearner
from pipeline.learning.publisher import Publisher
from pipeline.loop import Clock as RunClock
from pipeline.loop import Loop, Stages, TargetRunner, UnfitPromptError
from pipeline.recorder import Recorder
from stages.contract.blocks import Decision, Draft, Proposal, ProposedToken, SequenceState, TrainingExample, Verdict
from stages.drafting.costs import StageSeconds
from stages.sampling.random_source import SeededRandomSource
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
    """Keeps the order of its rows like a stage, and checks every call against it."""

    def __init__(self) -> None:
        self.order: list[SequenceState] = []
        self.admitted: list[int] = []
        self.released: list[int] = []
        self.calls: list[tuple[int, ...]] = []

    def admit(self, row: SequenceState) -> None:
        self.admitted.append(row.offset)
        self.order.append(row)

    def release(self, row: SequenceState) -> None:
        self.released.append(row.offset)
        place = self.order.index(row)
        last = self.order.pop()
        if last is not row:
            self.order[place] = last

    def called_with(self, rows: Sequence[SequenceState]) -> None:
        assert [row.offset for row in rows] == [row.offset for row in self.order], "all admitted rows, in order"
        assert rows, "a stage need not be called for nobody"
        self.calls.append(tuple(row.offset for row in rows))


class StubDecode(StubStage):
    reported = 0

    def __init__(self) -> None:
        super().__init__()
        self.woken: list[int] = []  # blocks before each time

    def respond_to_drift(self) -> None:
        """Do nothing: the stub keeps no state."""

    def resume_speculation(self) -> None:
        self.woken.append(len(self.calls))

    def __call__(self, batch: Sequence[SequenceState]) -> list[Draft]:
        self.called_with(batch)
        return [Draft(row, (5,), torch.ones(1, 1), (0.5,), None, (0.9,)) for row in batch]

    def observe(self, verdicts: list[Verdict], seconds: StageSeconds | None) -> None:
        assert seconds is None or min(seconds) >= 0
        assert tuple(verdict.proposal.draft.row.offset for verdict in verdicts) == self.calls[-1]

    def report(self) -> None:
        self.reported += 1


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
    """Accepts everything: one token per block, until the row has no tokens remaining."""

    def __call__(self, batch: Sequence[Proposal]) -> list[Verdict]:
        self.called_with([proposal.draft.row for proposal in batch])
        return [self._accept(proposal) for proposal in batch]

    def _accept(self, proposal: Proposal) -> Verdict:
        row = proposal.draft.row
        row.tokens.append(50)
        row.remaining_tokens -= 1
        row.block += 1
        row.finish = "" if row.remaining_tokens else "length"
        decision = Decision(0, proposal.tokens[0], Outcome.ACCEPTED, 50, Origin.ACCEPTED, (0.5,), (0.5,), 0.25, 1)
        return Verdict(proposal, (decision,), (50,), 1, 1)


class StubDistill:
    """Every prompt gives one update of the drafter."""

    def __init__(self) -> None:
        self.drafter_version = self.head_version = 0

    def wants_example(self, offset: int) -> bool:
        return True

    def learn(self, example: TrainingExample) -> tuple[Updated, ...]:
        self.drafter_version += 1
        return (self._update(example),)

    def end(self) -> tuple[Updated, ...]:
        return ()

    def _update(self, example: TrainingExample) -> Updated:
        versions = {"drafter_version": self.drafter_version, "head_version": self.head_version}
        return make_updated(offset=example.offset, target=example.target, **versions)


class StubDrift:
    """Alarms after the given prompts, with the action of each."""

    def __init__(self, actions: dict[int, str]) -> None:
        self._actions = actions

    def observe(self, prompt: PromptCompleted) -> Drifted | None:
        action = self._actions.get(prompt.offset)
        return make_drifted(offset=prompt.offset, target=prompt.target, action=action) if action else None


class StubDriftResponse:
    """A recall that restores no version. Records how many updates the drafter had at each call."""

    def __init__(self, distill: StubDistill) -> None:
        self.noted: list[tuple[int, int]] = []  # offset of the example, drafter's version
        self.given: list[tuple[int, int]] = []
        self._distill = distill

    def observe(self, example: TrainingExample) -> tuple[Event, ...]:
        self.noted.append((example.offset, self._distill.drafter_version))
        return ()

    def end(self) -> tuple[Event, ...]:
        return ()

    def respond(self, drifted: Drifted) -> Iterator[Event]:
        self.given.append((drifted.offset, self._distill.drafter_version))
        self._distill.head_version += 1
        yield Recalled(drifted.offset, drifted.target, None, 3, 2, 0.5, 0.4, 0.0)


class StubPublisher:
    """Publishes a baseline, a version after every prompt and at every drift, and an end."""

    def __init__(self, target: str = "big") -> None:
        self._target = target

    def publish_baseline(self) -> Iterator[VersionPublished]:
        yield self._version(0, "baseline")

    def publish_on_drift(self, drifted: Drifted) -> Iterator[VersionPublished]:
        yield self._version(drifted.offset, "drift")

    def publish_if_due(self, prompt: PromptCompleted) -> Iterator[VersionPublished]:
        yield self._version(prompt.offset, "interval")

    def end(self) -> Iterator[VersionPublished]:
        yield self._version(99, "end")

    def _version(self, offset: int, reason: str) -> VersionPublished:
        return make_published(offset=offset, target=self._target, reason=reason)


class Clock:
    """Each reading is a second later than the last."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def prepare(prompt: PromptReceived) -> SequenceState:
    """A row that takes as many blocks as its text has characters."""
    if prompt.text == OVERLONG:
        raise UnfitPromptError("it is too long")
    draws = SeededRandomSource(0, prompt.offset)
    return SequenceState(
        prompt.offset, prompt.prompt_id, prompt.dataset, prompt.text, [1], 1, [1], draws, len(prompt.text)
    )


def stub_runner(clock: RunClock, name: str = "big", drifts: dict[int, str] | None = None) -> TargetRunner:
    distill = StubDistill()
    return TargetRunner(
        name,
        Stages(StubDecode(), StubTranslate(), StubVerify()),
        prepare,
        Recorder(name, lambda token: bytes([token]), lambda tokens: f"{len(tokens)} tokens"),
        LocalLearner(distill, StubDrift(drifts or {}), StubDriftResponse(distill), StubPublisher(name)),
        clock,
    )


def stub_loop(batch: int = 1, drifts: dict[int, str] | None = None, publisher: Publisher | None = None) -> Loop:
    """A loop of one runner over stubs."""
    clock = RunClock(Clock())
    runner = stub_runner(clock, drifts=drifts)
    if publisher:
        runner.learner.publisher = publisher
    return Loop({"big": runner}, lambda offset: "big", batch, clock)


def runner_of(loop: Loop, name: str = "big") -> Any:
    """A runner of the loop, its stubs within reach."""
    return loop.runners[name]


def prompts_of(*texts: str | None, target: str | None = None) -> Iterator[PromptReceived | PromptRejected]:
    """Prompts of these texts; None stands for a row of the source that was no prompt."""
    offset = 0
    for line, text in enumerate(texts, 1):
        if text is None:
            yield PromptRejected("lengths", line, "no text")
        else:
            yield PromptReceived(offset, f"lengths:{line}", "lengths", line, text, target)
            offset += 1
