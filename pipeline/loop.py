"""The path of a prompt, as one loop:

    source -> admit -> [ decode -> translate -> verify ]* -> completed -> drift? -> distill -> version?     (pause?)

Everything that happens comes out as an event, and every decision comes out before anything learns from it.
A *lane* is one target's way: its stages, the rows in flight there, and its *coach*, to whom all that follows a
completed prompt belongs (pipeline/coach.py). The loop deals prompts to lanes; with one target there is one lane.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from pipeline.clock import Clock
from pipeline.coach import Coach, Finished
from pipeline.lane_stages import Stages
from pipeline.records import Recorder, Seconds, Tally, Versions
from stages.blocks import Row, Verdict
from stages.lessons import Notebook
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from store.events import Event, PromptReceived, PromptRejected


class UnfitPromptError(Exception):
    """Raised by admission for a prompt that the models cannot take; the message is the reason."""


@dataclass
class _Flight:
    """What the loop keeps beside a row in flight."""

    tally: Tally
    notes: Notebook = field(default_factory=Notebook)

    def save(self, row: Row, keep: SnapshotWriter) -> Json:
        return {"row": keep.row(row), "tally": asdict(self.tally), "notes": self.notes.save(row, keep)}

    @classmethod
    def restored(cls, saved: Json, kept: SnapshotReader) -> tuple[Row, "_Flight"]:
        return kept.row(saved["row"]), cls(Tally(**saved["tally"]), Notebook.restored(saved["notes"], kept))


class Lane:
    """One target's way through the stages. The loop calls its methods and nothing else.

    Args:
        target: the target's name, which its lessons carry.
        stages: decode, translate, verify.
        prepare: makes a row of a prompt, or raises `UnfitPromptError`.
        recorder: makes events.
        coach: is told of completed prompts; watches for drift, learns, publishes.
        clock: seconds since the run began.
    """

    def __init__(
        self,
        target: str,
        stages: Stages,
        prepare: Callable[[PromptReceived], Row],
        recorder: Recorder,
        coach: Coach,
        clock: Clock,
    ) -> None:
        self.stages, self.coach = stages, coach
        self._target, self._prepare, self._recorder, self._clock = target, prepare, recorder, clock
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
        yield from self.coach.news()
        verdicts, versions, seconds = self._block()
        for verdict in verdicts:
            if not verdict.proposal.draft.row.private:
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
        self.stages.translate.observe([verdict for verdict in verdicts if not verdict.proposal.draft.row.private])
        for verdict in verdicts:
            flight = self._flights[verdict.proposal.draft.row]
            flight.tally.add(verdict)
            if verdict.proposal.draft.row.teaches:
                flight.notes.note(verdict)
        shares = [(end - begin) / len(verdicts) for begin, end in pairwise(times)]
        return verdicts, versions, Seconds(*shares)

    def leave(self, offset: int, finish: str) -> Iterator[Event]:
        """Between two blocks: end a prompt in flight early, with this as its end."""
        for row in [row for row in self._rows if row.offset == offset]:
            row.finish = finish
            yield from self._finish(row)

    def _finish(self, row: Row) -> Iterator[Event]:
        """A completed prompt: record it, and hand it to the coach."""
        flight = self._flights.pop(row)
        last = self._rows.pop()
        if last is not row:  # the last row takes the free place, as in every stage
            self._rows[self._rows.index(row)] = last
        for stage in self.stages.all():
            stage.release(row)
        completed = self._recorder.completed(row, flight.tally, self._clock(), self._versions())
        yield completed
        lesson = flight.notes.lesson(row, self._target) if row.teaches else None
        emitted = () if row.private else tuple(row.tokens[row.prompt_length :])
        yield from self.coach.completed(Finished(completed, lesson, emitted))

    def _versions(self) -> Versions:
        return Versions(self.coach.drafter_version, self.coach.head_version, self.stages.translate.cache_version)

    def save(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`."""
        return {
            "flights": [self._flights[row].save(row, keep) for row in self._rows if keep.keeps(row)],
            "stages": [stage.save(keep) for stage in self.stages.all()],
            "coach": self.coach.save(keep),
        }

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        self._flights = dict(_Flight.restored(flight, kept) for flight in saved["flights"])
        self._rows = list(self._flights)
        for stage, value in zip(self.stages.all(), saved["stages"], strict=True):
            stage.restore(value, kept)
        self.coach.restore(saved["coach"], kept)


def _go_on() -> bool:
    return False


class Loop:
    """Runs prompts through their lanes, up to `batch` at a time in all; as one finishes the next enters.

    Args:
        lanes: by target.
        deal: the target of a prompt that does not name one, by its offset.
        batch: most prompts in flight.
        clock: of the lanes.
    """

    def __init__(self, lanes: Mapping[str, Lane], deal: Callable[[int], str], batch: int, clock: Clock) -> None:
        self.lanes, self.clock = lanes, clock
        self._deal, self._batch, self._begun = deal, batch, False

    def run(
        self, prompts: Iterator[PromptReceived | PromptRejected], pause: Callable[[], bool] = _go_on
    ) -> Iterator[Event]:
        """All events of the stream, in order.

        Args:
            prompts: the stream, or what is left of it for a loop that was restored.
            pause: called between two blocks, when all events so far were taken and no stage is in the middle of
                anything: the place to `save`. If it is true the loop ends there, as if it were only interrupted.
        """
        yield from self.begin()
        paused = yield from self.until_idle(prompts, pause)
        if not paused:
            yield from self.end()

    def begin(self) -> Iterator[Event]:
        """Before the first prompt; nothing for a loop that was restored."""
        if not self._begun:
            self._begun = True
            for lane in self.lanes.values():
                yield from lane.coach.floor()

    def until_idle(
        self, prompts: Iterator[PromptReceived | PromptRejected], pause: Callable[[], bool]
    ) -> Generator[Event, None, bool]:
        """Prompts through their lanes until there is no more to read and nothing in flight, or until paused.

        Returns:
            whether it was paused.
        """
        while True:
            yield from self._admit(prompts)
            if pause():
                return True
            busy = [lane for lane in self.lanes.values() if len(lane)]
            if not busy:
                return False
            for lane in busy:
                yield from lane.step()

    def end(self) -> Iterator[Event]:
        """Behind the last prompt: what `run` yields at the end of the stream."""
        for lane in self.lanes.values():
            yield from lane.coach.end()

    @property
    def learning(self) -> bool:
        """Whether something is being computed beside decoding, which a snapshot would have to wait for."""
        return any(lane.coach.busy for lane in self.lanes.values())

    def save(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`."""
        return {"seconds": self.clock(), "lanes": {name: lane.save(keep) for name, lane in self.lanes.items()}}

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        self._begun = True
        self.clock.go_on(saved["seconds"])
        for name, lane in self.lanes.items():
            lane.restore(saved["lanes"][name], kept)

    def _admit(self, prompts: Iterator[PromptReceived | PromptRejected]) -> Iterator[Event]:
        while sum(map(len, self.lanes.values())) < self._batch and (event := next(prompts, None)) is not None:
            yield event
            if isinstance(event, PromptReceived):
                yield from self._lane(event).admit(event)

    def _lane(self, prompt: PromptReceived) -> Lane:
        return self.lanes[prompt.target or self._deal(prompt.offset)]
