"""The path of a prompt, as one loop:

    source -> admit -> [ decode -> translate -> verify ]* -> completed -> drift? -> distill -> version?

Everything that happens comes out as an event, and every decision comes out before anything learns from it.
A *lane* is one target's way: its stages, the rows in flight there, its drift watch and its versions. The loop deals
prompts to lanes; with one target there is one lane.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from pipeline.answer import Answer
from pipeline.drift import DriftWatch
from pipeline.publish import Publisher
from pipeline.records import Recorder, Seconds, Tally, Versions
from stages.blocks import Draft, Lesson, Proposal, Row, Verdict
from stages.lessons import Notebook
from stages.ngram_cache import Cache
from stages.stage import Stage
from store.events import Event, PromptReceived, PromptRejected, Updated


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

    def wait(self) -> bool:
        """Wait until nothing is computed beside decoding, for who must have the machine alone, and say whether anything
        was. Nothing is adopted."""
        ...

    def end(self) -> tuple[Updated, ...]:
        """Behind the last lesson: wait for an update that is under way and adopt it. May be called again."""
        ...


class UnfitPromptError(Exception):
    """Raised by admission for a prompt that the models cannot take; the message is the reason."""


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


@dataclass
class _Flight:
    """What the loop keeps beside a row in flight."""

    tally: Tally
    notes: Notebook = field(default_factory=Notebook)


class Lane:
    """One target's way through the stages. The loop calls its methods and nothing else.

    Args:
        target: the target's name, which its lessons carry.
        stages: decode, translate, verify, distill.
        prepare: makes a row of a prompt, or raises `UnfitPromptError`.
        recorder: makes events.
        drift: watches the acceptance rate.
        answer: what is done about a drift.
        publisher: writes versions.
        clock: seconds since the run began.
    """

    def __init__(
        self,
        target: str,
        stages: Stages,
        prepare: Callable[[PromptReceived], Row],
        recorder: Recorder,
        drift: DriftWatch,
        answer: Answer,
        publisher: Publisher,
        clock: Callable[[], float],
    ) -> None:
        self.publisher = publisher
        self.stages = stages
        self._target, self._prepare, self._recorder = target, prepare, recorder
        self._drift, self._answer, self._clock = drift, answer, clock
        self._rows: list[Row] = []
        self._flights: dict[Row, _Flight] = {}

    def __len__(self) -> int:
        """Prompts in flight."""
        return len(self._rows)

    def admit(self, prompt: PromptReceived) -> Iterator[Event]:
        """Take a prompt in; one that does not fit the models is an event and no more."""
        try:
            row = self._prepare(prompt)
        except UnfitPromptError as reason:
            yield PromptRejected(prompt.dataset, prompt.line, str(reason))
            return
        self._flights[row] = _Flight(Tally(self._clock()))
        self._rows.append(row)
        for stage in self.stages.all():
            stage.admit(row)

    def step(self) -> Iterator[Event]:
        """One block of all rows in flight, and the end of those that it completes."""
        verdicts, versions, seconds = self._block()
        for verdict in verdicts:
            yield from self._recorder.decisions(verdict, versions)
            yield self._recorder.block(verdict, len(verdicts), seconds)
        for row in [row for row in self._rows if row.finish]:
            yield from self._finish(row)

    def _block(self) -> tuple[list[Verdict], Versions, Seconds]:
        """One draft-verify round."""
        versions, times = self._versions(), [self._clock()]
        drafts = self.stages.decode(self._rows)
        times.append(self._clock())
        proposals = self.stages.translate(drafts)
        times.append(self._clock())
        verdicts = self.stages.verify(proposals)
        times.append(self._clock())
        self.stages.decode.observe(verdicts)
        self.stages.translate.observe(verdicts)
        for verdict in verdicts:
            flight = self._flights[verdict.proposal.draft.row]
            flight.tally.add(verdict)
            flight.notes.note(verdict)
        shares = [(end - begin) / len(verdicts) for begin, end in pairwise(times)]
        return verdicts, versions, Seconds(*shares)

    def _finish(self, row: Row) -> Iterator[Event]:
        """A completed prompt: record, watch for drift, learn, publish."""
        flight = self._flights.pop(row)
        last = self._rows.pop()
        if last is not row:  # the last row takes the free place, as in every stage
            self._rows[self._rows.index(row)] = last
        for stage in self.stages.all():
            stage.release(row)
        completed = self._recorder.completed(row, flight.tally, self._clock(), self._versions())
        yield completed
        lesson = flight.notes.lesson(row, self._target)
        self._answer.note(lesson)
        drifted = self._drift.observe(completed)
        if drifted:
            yield drifted
            if drifted.acted_upon:
                yield from self.publisher.at(drifted)
                yield from self._answer.to(drifted)
        for updates in self.stages.distill([lesson]):
            yield from updates
        yield from self.publisher.after(completed)

    def _versions(self) -> Versions:
        distill = self.stages.distill
        return Versions(distill.drafter_version, distill.head_version, self.stages.translate.cache_version)


class Loop:
    """Runs prompts through their lanes, up to `batch` at a time in all; as one finishes the next enters.

    Args:
        lanes: by target.
        deal: the target of a prompt that does not name one, by its offset.
        batch: most prompts in flight.
    """

    def __init__(self, lanes: Mapping[str, Lane], deal: Callable[[int], str], batch: int) -> None:
        self.lanes = lanes
        self._deal, self._batch = deal, batch

    def run(self, prompts: Iterator[PromptReceived | PromptRejected]) -> Iterator[Event]:
        """All events of the stream, in order. Closing the iterator between two events ends the run cleanly."""
        for lane in self.lanes.values():
            yield from lane.publisher.floor()
        while True:
            yield from self._admit(prompts)
            busy = [lane for lane in self.lanes.values() if len(lane)]
            if not busy:
                break
            for lane in busy:
                yield from lane.step()
        yield from self.end()

    def end(self) -> Iterator[Event]:
        """What `run` would have yielded at the end of the stream, for a run that was broken off between two events."""
        for lane in self.lanes.values():
            yield from lane.stages.distill.end()
            yield from lane.publisher.end()

    def _admit(self, prompts: Iterator[PromptReceived | PromptRejected]) -> Iterator[Event]:
        while sum(map(len, self.lanes.values())) < self._batch and (event := next(prompts, None)) is not None:
            yield event
            if isinstance(event, PromptReceived):
                yield from self._lane(event).admit(event)

    def _lane(self, prompt: PromptReceived) -> Lane:
        return self.lanes[prompt.target or self._deal(prompt.offset)]
