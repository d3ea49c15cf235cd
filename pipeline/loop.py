"""The path of a prompt, as one loop:

    source -> admit -> [ decode -> translate -> verify ]* -> completed -> drift? -> distill -> version?

Everything that happens comes out as an event, and every decision comes out before anything learns from it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from pipeline.drift import DriftWatch
from pipeline.publish import Publisher
from pipeline.records import Recorder, Seconds, Tally, Versions
from stages.blocks import Draft, Lesson, Proposal, Row, Verdict
from stages.lessons import Notebook
from stages.stage import Stage
from store.events import Event, PromptReceived, PromptRejected, Updated


class Translating(Stage[Draft, Proposal], Protocol):
    """Translation that remembers which n-grams the target emitted."""

    @property
    def cache_version(self) -> int:
        """Changes of the n-gram cache so far."""
        ...

    def observe(self, verdicts: list[Verdict]) -> None:
        """Called once per block, after verification."""
        ...


class Learning(Stage[Lesson, tuple[Updated, ...]], Protocol):
    """Distillation whose head can be begun anew."""

    @property
    def drafter_version(self) -> int:
        """Drafter updates served so far."""
        ...

    @property
    def head_version(self) -> int:
        """Steps and resets of the head so far."""
        ...

    def reset_head(self) -> None:
        """Called after a drift."""
        ...


class UnfitPromptError(Exception):
    """Raised by admission for a prompt that the models cannot take; the message is the reason."""


@dataclass(frozen=True)
class Stages:
    """The four stages of one target."""

    decode: Stage[Row, Draft]
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


class Loop:
    """Runs prompts through the stages, up to `batch` at a time; as one finishes the next enters.

    Args:
        stages: decode, translate, verify, distill.
        prepare: makes a row of a prompt, or raises `UnfitPromptError`.
        recorder: makes events.
        drift: watches the acceptance rate.
        publisher: writes versions.
        batch: most prompts in flight.
        clock: seconds; only durations are used.
    """

    def __init__(
        self,
        stages: Stages,
        prepare: Callable[[PromptReceived], Row],
        recorder: Recorder,
        drift: DriftWatch,
        publisher: Publisher,
        batch: int,
        clock: Callable[[], float],
    ) -> None:
        self._stages, self._prepare, self._recorder = stages, prepare, recorder
        self._drift, self._publisher, self._batch = drift, publisher, batch
        self._clock, self._began = clock, clock()
        self._rows: list[Row] = []
        self._flights: dict[Row, _Flight] = {}

    def run(self, prompts: Iterator[PromptReceived | PromptRejected]) -> Iterator[Event]:
        """All events of the stream, in order. Closing the iterator between two events ends the run cleanly."""
        yield from self._publisher.floor()
        while True:
            yield from self._admit(prompts)
            if not self._rows:
                break
            verdicts, versions, seconds = self._block()
            for verdict in verdicts:
                yield from self._recorder.decisions(verdict, versions)
                yield self._recorder.block(verdict, len(verdicts), seconds)
            for row in [row for row in self._rows if row.finish]:
                yield from self._finish(row)
        yield from self.end()

    def end(self) -> Iterator[Event]:
        """What `run` would have yielded at the end of the stream, for a run that was broken off between two events."""
        yield from self._publisher.end()

    def _admit(self, prompts: Iterator[PromptReceived | PromptRejected]) -> Iterator[Event]:
        while len(self._rows) < self._batch and (event := next(prompts, None)) is not None:
            yield event
            if isinstance(event, PromptRejected):
                continue
            try:
                row = self._prepare(event)
            except UnfitPromptError as reason:
                yield PromptRejected(event.dataset, event.line, str(reason))
                continue
            self._flights[row] = _Flight(Tally(self._now()))
            self._rows.append(row)
            for stage in self._stages.all():
                stage.admit(row)

    def _block(self) -> tuple[list[Verdict], Versions, Seconds]:
        """One draft-verify round of all rows in flight."""
        versions, times = self._versions(), [self._clock()]
        drafts = self._stages.decode(self._rows)
        times.append(self._clock())
        proposals = self._stages.translate(drafts)
        times.append(self._clock())
        verdicts = self._stages.verify(proposals)
        times.append(self._clock())
        self._stages.translate.observe(verdicts)
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
        for stage in self._stages.all():
            stage.release(row)
        completed = self._recorder.completed(row, flight.tally, self._now(), self._versions())
        yield completed
        drifted = self._drift.observe(completed)
        if drifted:
            yield drifted
            if drifted.action == "reset":
                self._stages.distill.reset_head()
        for updates in self._stages.distill([flight.notes.lesson(row)]):
            yield from updates
        yield from self._publisher.after(completed, drifted)

    def _versions(self) -> Versions:
        distill = self._stages.distill
        return Versions(distill.drafter_version, distill.head_version, self._stages.translate.cache_version)

    def _now(self) -> float:
        return self._clock() - self._began
