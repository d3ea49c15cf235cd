"""The path of a prompt, as one loop.

    source -> admit -> [ decode -> translate -> verify ]* -> completed -> drift? -> distill -> version?

Every target has a `TargetRunner`: its three stages, its sequences in flight, and its *learner*. The loop routes each
prompt to the runner of its target and keeps up to `batch` prompts in flight. Targets may share the drafter's weights;
each has its own acceptance head, drift detector and publisher.

The learner receives completed prompts (pipeline/learner_protocol.py). It responds to drift, a fall of acceptance
or of how common the tokens are: by default it resets the acceptance head and, if an earlier version is clearly better,
restores that version's drafter and head (pipeline/learning/drift_response.py). Each completed prompt becomes training
data; about every `learn.interval` prompts the drafter is updated on a background thread, and the head with it
(stages/distill.py). It publishes versions at the start, every `publish.interval` prompts, before the response to a
drift, and at the end (pipeline/learning/publisher.py).

Everything that happens is yielded as an event. What is learned from a block cannot change the block's own decisions, so
acceptance rates in the log are prequential. Between two blocks, where the loop calls `pause`, no stage holds
intermediate state: only there can a run be committed.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from pipeline.learner_protocol import CompletedPrompt, Epoch, Learner
from pipeline.recorder import PromptCounters, Recorder, Seconds, Versions
from stages.choose import ChooseDraft
from stages.contract.blocks import Proposal, SequenceState, Verdict
from stages.contract.snapshot import State
from stages.contract.stage import Stage
from stages.drafting.costs import StageSeconds
from stages.learn.examples.builder import ExampleBuilder
from stages.translate import Translate
from store.errors import UsageError
from store.events import Event, PromptReceived, PromptRejected

AWAITED_SECONDS = 0.05  # for the transforms of rows when nothing else is in flight


class UnfitPromptError(UsageError):
    """Raised by admission for a prompt that the models cannot process; the message is the reason."""


class Clock:
    """Seconds that a run has been running, summed over its resumptions."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds, self._began = seconds, seconds()

    def __call__(self) -> float:
        """Return the elapsed time in seconds."""
        return self._seconds() - self._began

    def resume(self, elapsed: float) -> None:
        """Set the elapsed time to that of a checkpoint, in seconds."""
        self._began = self._seconds() - elapsed


@dataclass(frozen=True)
class Stages:
    """The stages of one target."""

    decode: ChooseDraft
    translate: Translate
    verify: Stage[Proposal, Verdict]

    def all(self) -> tuple[Stage[Any, Any], ...]:
        """Return the stages in the order of a block."""
        return (self.decode, self.translate, self.verify)


@dataclass(frozen=True)
class DraftedBlock:
    """A block whose drafts are not verified yet."""

    proposals: list[Proposal]  # one per sequence in flight, in the runner's order
    versions: Versions  # in service when they were drafted
    times: tuple[float, float, float]  # when drafting began, when translation began, and when it ended

    def with_proposals(self, proposals: list[Proposal]) -> "DraftedBlock":
        """Return the block with other proposals: those of sequences that entered since have no draft."""
        return replace(self, proposals=proposals)


@dataclass
class _InFlight:
    """What the runner keeps for a sequence in flight: its counters and its training example so far."""

    counters: PromptCounters
    example: ExampleBuilder = field(default_factory=ExampleBuilder)


class TargetRunner:
    """Runs the prompts of one target through its stages, block by block.

    Args:
        target: the target's name, which training examples carry.
        stages: decode, translate, verify.
        prepare: makes a sequence of a prompt, or raises `UnfitPromptError`.
        recorder: turns verdicts and completions into events.
        learner: receives completed prompts; provides the weights in service.
        clock: seconds since the run began.
        on_verdicts: called after every block with its verdicts, as a server does to stream text. By default nothing.
    """

    def __init__(
        self,
        target: str,
        stages: Stages,
        prepare: Callable[[PromptReceived], SequenceState],
        recorder: Recorder,
        learner: Learner,
        clock: Clock,
        on_verdicts: Callable[[list[Verdict]], None] | None = None,
    ) -> None:
        self.stages, self.learner = stages, learner
        self._target, self._prepare, self._recorder, self._clock = target, prepare, recorder, clock
        self._on_verdicts = on_verdicts
        self._rows: list[SequenceState] = []
        self._in_flight: dict[SequenceState, _InFlight] = {}
        self._epoch = learner.epoch  # at the last call of `resume_speculation`
        self._recording = 0.0  # seconds from the last block's verdicts to its last record

    def __len__(self) -> int:
        """Return the number of prompts in flight."""
        return len(self._rows)

    def admit(self, prompt: PromptReceived) -> Iterator[Event]:
        """Add a prompt to those in flight. A prompt that does not fit the models yields `PromptRejected` instead."""
        try:
            row = self._prepare(prompt)
        except UnfitPromptError as reason:
            yield PromptRejected(prompt.dataset, prompt.line, str(reason))
            return
        self.admit_sequence(row)

    def admit_sequence(self, row: SequenceState) -> None:
        """Add a sequence to those in flight."""
        row.record_example = row.record_example and self.learner.wants_example(row.offset)
        self._in_flight[row] = _InFlight(PromptCounters(self._clock()))
        self._rows.append(row)
        for stage in self.stages.all():
            stage.admit(row)

    def step(self) -> Iterator[Event]:
        """Run one block of every sequence in flight and finish those that it completes. Rows whose transforms are not
        ready sit out; if all do, wait for one of them, but not for long.
        """
        awaited = [future for row in self._rows if (future := row.prepare_transforms())]
        if len(awaited) == len(self._rows):
            wait(awaited, AWAITED_SECONDS, return_when=FIRST_COMPLETED)
            return
        # a pass that reads prompts, or decodes rows that may not draft, has not the cost of its drafts
        measured = all(row.waiting or row.may_draft for row in self._rows)
        block = yield from self.draft_block()
        yield from self.finish_block(block, measured=measured)

    def draft_block(self) -> Generator[Event, None, DraftedBlock]:
        """Draft for every sequence in flight.

        Weights change between blocks only: weights from a remote learner here, those of a local one in `_finish`. If
        the epoch changed (a drafter update was applied, a version was recalled, or a drift was acted upon), a pause
        of drafting ends; a step of the head is not enough.
        """
        yield from self.learner.apply_new_weights()
        before, self._epoch = self._epoch, self.learner.epoch
        if self._epoch != before:
            self.stages.decode.resume_speculation()
        if self._epoch.drifts != before.drifts:
            self.stages.decode.respond_to_drift()
        versions, began = self._versions(), self._clock()
        drafts = self.stages.decode(self._rows)
        drafted = self._clock()
        proposals = self.stages.translate(drafts)
        return DraftedBlock(proposals, versions, (began, drafted, self._clock()))

    def empty_block(self) -> DraftedBlock:
        """Return a block without drafts, which begins now."""
        now = self._clock()
        return DraftedBlock([], self._versions(), (now, now, now))

    def finish_block(self, block: DraftedBlock, *, measured: bool) -> Iterator[Event]:
        """Verify the drafts of a block, learn from the verdicts and finish the sequences that are completed.

        `verify` appends the emitted tokens to each sequence and sets its `finish`; it may come long after the drafts,
        and omit sequences that were finished since. The block is the last one that was drafted; if `measured`, its time
        shows what its drafts cost.
        """
        verdicts = [verdict for verdict in self.stages.verify(block.proposals) if verdict.emitted]  # not while reading
        times = (*block.times, self._clock())
        drafting, translating, verifying = (end - begin for begin, end in pairwise(times))
        seconds = StageSeconds(drafting, verifying, translating + self._recording)  # a block is like the one before it
        self.stages.decode.observe(verdicts, seconds if measured else None)
        # The n-gram cache is shared and published: text of private rows must not enter it.
        self.stages.translate.observe([verdict for verdict in verdicts if not verdict.proposal.draft.row.private])
        for verdict in verdicts:
            in_flight = self._in_flight[verdict.proposal.draft.row]
            in_flight.counters.add(verdict)
            if not verdict.proposal.draft.row.private:
                in_flight.example.add_verdict(verdict)
        if self._on_verdicts:
            self._on_verdicts(verdicts)
        shares = [stage / max(1, len(verdicts)) for stage in (drafting, translating, verifying)]
        for verdict in verdicts:
            if not verdict.proposal.draft.row.private:
                yield from self._recorder.record_decisions(verdict, block.versions)
            yield self._recorder.record_block(verdict, len(verdicts), Seconds(*shares))
        self._recording = self._clock() - times[-1]
        for row in [row for row in self._rows if row.finish]:
            yield from self._finish(row)
        if self.learner.learns_parts:
            yield from self._learn_parts()

    def _learn_parts(self) -> Iterator[Event]:
        """Learn from answers that go on: of a long one the drafter would learn nothing before its end."""
        for row in self._rows:
            in_flight = self._in_flight[row]
            if in_flight.example.is_part:
                part, in_flight.example = in_flight.example.build(row, self._target), ExampleBuilder.after(row)
                yield from self.learner.learn_part(part)

    def finish_early(self, offset: int, finish: str) -> Iterator[Event]:
        """Finish a prompt in flight between two blocks, with `finish` as the logged reason."""
        for row in [row for row in self._rows if row.offset == offset]:
            row.finish = finish
            yield from self._finish(row)

    def _finish(self, row: SequenceState) -> Iterator[Event]:
        """Record a completed prompt and pass it to the learner."""
        in_flight = self._in_flight.pop(row)
        last = self._rows.pop()
        if last is not row:  # swap-remove, as in all stages and both key-value caches: their orders must agree
            self._rows[self._rows.index(row)] = last
        for stage in self.stages.all():
            stage.release(row)
        completed = self._recorder.record_completion(row, in_flight.counters, self._clock(), self._versions())
        yield completed
        example = in_flight.example.build(row, self._target) if row.emitted and not row.private else None
        emitted = () if row.private else tuple(row.tokens[row.prompt_length :])
        yield from self.learner.on_prompt_completed(CompletedPrompt(completed, example, emitted))

    def _versions(self) -> Versions:
        return Versions(self.learner.drafter_version, self.learner.head_version, self.stages.translate.cache_version)

    def state_dict(self, *, rows: bool) -> State:
        """Return the runner's state for a checkpoint, with its sequences in flight or as if there were none. Private
        ones are never in it.
        """
        saved = [row for row in self._rows if rows and not row.private]
        in_flight = [(row, self._in_flight[row]) for row in saved]
        return {
            "in_flight": [(row, one.counters, one.example.state_dict(row)) for row, one in in_flight],
            "stages": [stage.state_dict(saved) for stage in self.stages.all()],
            "learner": self.learner.state_dict(),
            "epoch": self._epoch,
            "recording": self._recording,
        }

    def load_state_dict(self, state: State) -> None:
        for row, counters, example in state["in_flight"]:
            self._in_flight[row] = _InFlight(PromptCounters(**counters), ExampleBuilder.from_state(example))
        self._rows = list(self._in_flight)
        for stage, stage_state in zip(self.stages.all(), state["stages"], strict=True):
            stage.load_state_dict(stage_state)
        self.learner.load_state_dict(state["learner"])
        self._epoch = Epoch(*state["epoch"])
        self._recording = state["recording"]


class Loop:
    """Routes prompts to their runners and steps these, with up to `batch` prompts in flight in all.

    Args:
        runners: by target.
        route: returns the target of a prompt that does not name one, given the prompt's offset.
        batch: maximum number of prompts in flight.
        clock: seconds since the run began, shared with the runners.
    """

    def __init__(
        self, runners: Mapping[str, TargetRunner], route: Callable[[int], str], batch: int, clock: Clock
    ) -> None:
        self.runners, self.clock = runners, clock
        self._route, self._batch, self._begun = route, batch, False

    def run(
        self, prompts: Iterator[PromptReceived | PromptRejected], pause: Callable[[], bool] = lambda: False
    ) -> Iterator[Event]:
        """Yield all events of the stream, in order. After `restore`, the prompts are only those that were not taken
        from the stream yet. `pause` is called between two blocks, after all events so far were consumed; it may `save`.
        If it returns True, the loop returns without `end`: prompts stay in flight and no last version is published.
        """
        yield from self.begin()
        paused = yield from self.until_idle(prompts, pause)
        if not paused:
            yield from self.end()

    def begin(self) -> Iterator[Event]:
        """Publish the drafter as it was loaded, the baseline. Yields nothing in a restored loop."""
        if not self._begun:
            self._begun = True
            for runner in self.runners.values():
                yield from runner.learner.publish_baseline()

    def until_idle(
        self, prompts: Iterator[PromptReceived | PromptRejected], pause: Callable[[], bool]
    ) -> Generator[Event, None, bool]:
        """Run prompts until the stream ends and nothing is in flight, or until paused; return whether it was paused."""
        while True:
            while sum(map(len, self.runners.values())) < self._batch and (event := next(prompts, None)) is not None:
                yield event  # rejected source rows pass through
                if isinstance(event, PromptReceived):
                    yield from self.runners[event.target or self._route(event.offset)].admit(event)
            if pause():
                return True
            active = [runner for runner in self.runners.values() if len(runner)]
            if not active:
                return False
            for runner in active:
                yield from runner.step()

    def end(self) -> Iterator[Event]:
        """After the last prompt: warn of drafts cut short by NaN or infinite logits, apply the last updates, publish
        the last versions.
        """
        for runner in self.runners.values():
            runner.stages.decode.report()
            yield from runner.learner.end()

    @property
    def updating(self) -> bool:
        """Whether an update is being computed in parallel with decoding; a snapshot would have to wait for it."""
        return any(runner.learner.busy for runner in self.runners.values())

    def state_dict(self, *, rows: bool = True) -> State:
        """Return the state for a checkpoint. Call it from `pause`, or when the loop has returned."""
        runners = {name: runner.state_dict(rows=rows) for name, runner in self.runners.items()}
        return {"seconds": self.clock(), "runners": runners}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state. Call it before `run`."""
        self._begun = True
        self.clock.resume(state["seconds"])
        for name, runner in self.runners.items():
            runner.load_state_dict(state["runners"][name])
