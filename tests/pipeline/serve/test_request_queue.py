"""Requests from arrival to finish: every listener receives exactly one finish, whatever happens."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_doubles import Clock as Seconds
from loop_doubles import StubDecode, StubDistill, StubDrift, StubDriftResponse, StubPublisher, StubTranslate, StubVerify
from serving_tiny import HANG_SECONDS, RecordingListener, wait_until

from pipeline.learning.local_learner import LocalLearner
from pipeline.loop import Clock, Loop, Stages, TargetRunner
from pipeline.recorder import Recorder
from pipeline.run.context import EventSink
from pipeline.serve.engine import LiveEngine
from pipeline.serve.messages import BusyError, EncodedPrompt, Finish, GenerationRequest
from pipeline.serve.request_queue import PREFILL_TOKENS, RequestQueue
from stages.contract.blocks import Proposal, Verdict
from stages.sampling.params import SamplingParams
from store.events import BlockDone, Event, PromptCompleted, PromptReceived, TokenDecision

MAX_LENGTH = 1000


class StubVocabulary:
    """A vocabulary whose tokens are bytes."""

    name = "big"
    specials: Mapping[str, int] = {"<end>": 999}

    def bytes_of(self, token: int) -> bytes | None:
        return bytes([token]) if token < 256 else None


class StubLog:
    """A log that keeps events in a list."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def append(self, event: Event) -> None:
        assert not self.closed
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


class StubCommitter:
    """A committer that commits between any two blocks and records how many events each commit covered."""

    def __init__(self, log: StubLog) -> None:
        self._log = log
        self.commits: list[int] = []

    def is_due(self) -> bool:
        return True

    def commit(self, *, wait: bool = False) -> None:
        self.commits.append(len(self._log.events))


class ScriptedVerify(StubVerify):
    """A verify stage that calls the next function of a script in the middle of each block, on the engine's thread."""

    def __init__(self, script: Sequence[Callable[[], None]]) -> None:
        super().__init__()
        self._script = list(script)

    def __call__(self, batch: Sequence[Proposal]) -> list[Verdict]:
        if self._script:
            self._script.pop(0)()
        return super().__call__(batch)


@dataclass
class StubEngine:
    """An engine with its queue, its stages and its log."""

    batch: int = 2
    waiting: int = 100
    offset: int = 0
    script: Sequence[Callable[[], None]] = ()
    clock: Callable[[], float] = lambda: 0.0
    seen: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        vocabulary = StubVocabulary()
        self.log = StubLog()
        self.committer = StubCommitter(self.log)
        self.queue = RequestQueue(vocabulary, MAX_LENGTH, self.waiting, 7, self.offset, log_text=True, clock=self.clock)
        self.decode, self.translate, self.verify = StubDecode(), StubTranslate(), ScriptedVerify(self.script)
        distill, clock = StubDistill(), Clock(Seconds())
        self.runner = TargetRunner(
            "big",
            Stages(self.decode, self.translate, self.verify),
            self.queue.prepare_sequence,
            Recorder("big", vocabulary.bytes_of, lambda tokens: bytes(tokens).decode()),
            LocalLearner(distill, StubDrift({}), StubDriftResponse(distill), StubPublisher()),
            clock,
            self.queue.on_verdicts,
        )
        loop = Loop({"big": self.runner}, lambda offset: "big", self.batch, clock)
        models = SimpleNamespace(target_vocabulary=vocabulary, target=SimpleNamespace(max_length=MAX_LENGTH))
        self.engine = LiveEngine(
            models,
            None,
            self.queue,
            loop,
            self.runner,
            EventSink(self.log, show=self.seen.append, whole=True),
            self.committer,
            None,
            1,
        )

    @property
    def rows(self) -> list[int]:
        """Numbers of rows that the stages still hold."""
        return [len(stage.order) for stage in (self.decode, self.translate, self.verify)]


def stub_request(
    name: str = "request", blocks: int = 3, sampling: Mapping[str, Any] = {}, **changes: Any
) -> GenerationRequest:
    """Make a request that takes so many blocks."""
    return GenerationRequest(
        name, EncodedPrompt("ab", (97, 98), (97, 98)), SamplingParams(max_tokens=blocks, **sampling), **changes
    )


class ManualClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def make_queue(clock: Callable[[], float] = lambda: 0.0, waiting: int = 4, offset: int = 0) -> RequestQueue:
    return RequestQueue(StubVocabulary(), MAX_LENGTH, waiting, 7, offset, log_text=True, clock=clock)


def request_of_length(tokens: int) -> GenerationRequest:
    return GenerationRequest("long", EncodedPrompt("", (97,) * tokens, (97,) * tokens), SamplingParams(max_tokens=5))


def test_requests_become_prompts_in_their_order():
    queue = make_queue(offset=5)
    for name in ("one", "two"):
        queue.submit(stub_request(name), RecordingListener())
    queue.submit(stub_request("two", choice=1), RecordingListener())
    prompts = list(queue)
    assert [(prompt.offset, prompt.prompt_id) for prompt in prompts] == [(5, "one"), (6, "two"), (7, "two#1")]
    assert [prompt.text for prompt in prompts] == ["ab"] * 3
    assert (queue.next_offset, queue.running, queue.waiting) == (8, 3, 0)


def test_a_full_queue_refuses_and_estimates_when_to_retry():
    clock = ManualClock()
    queue = make_queue(clock, waiting=4)
    for _ in range(4):
        queue.submit(stub_request(), RecordingListener())
    with pytest.raises(BusyError, match="4 requests") as refused:
        queue.submit(stub_request(), RecordingListener())
    assert (refused.value.retry_after, refused.value.shutting_down) == (1, False)


def test_a_closed_queue_refuses_requests_but_admits_waiting_ones():
    queue = make_queue()
    queue.submit(stub_request("early"), RecordingListener())
    queue.close()
    with pytest.raises(BusyError, match="shutting down") as refused:
        queue.submit(stub_request(), RecordingListener())
    assert refused.value.shutting_down
    assert refused.value.retry_after >= 1
    assert [prompt.prompt_id for prompt in queue] == ["early"]


def test_prompts_are_read_a_few_at_a_time():
    """One prompt at least, then at most `PREFILL_TOKENS` tokens before the next block, so that streams do not wait."""
    queue = make_queue(waiting=10)
    for _ in range(3):
        queue.submit(request_of_length(PREFILL_TOKENS), RecordingListener())
    assert [prompt.offset for prompt in queue] == [0]
    queue.on_verdicts([])  # a block
    assert [prompt.offset for prompt in queue] == [1]


def test_a_completion_is_truncated_to_the_remaining_context():
    queue = make_queue()
    queue.submit(request_of_length(MAX_LENGTH - 2), RecordingListener())
    (prompt,) = queue
    assert queue.prepare_sequence(prompt).remaining_tokens == 2


def test_seeds_of_any_size_and_choices_give_draws_of_their_own():
    queue = make_queue(waiting=10)
    seeds = [{"seed": -1}, {"seed": 1 << 70}, {"seed": 4}, {}, {"seed": 4}]
    for seed in seeds:
        queue.submit(stub_request(sampling=seed), RecordingListener())
    queue.submit(stub_request(sampling={"seed": 4}, choice=1), RecordingListener())
    draws = [queue.prepare_sequence(prompt).rng.uniform(None) for prompt in queue]
    assert draws[2] == draws[4]
    assert len(set(draws)) == len(seeds)


def test_deadlines_and_cancellations_reach_the_queue_while_nothing_is_admitted():
    clock = ManualClock()
    queue, late, left, stays = make_queue(clock), RecordingListener(), RecordingListener(), RecordingListener()
    queue.submit(stub_request(timeout_seconds=3.0), late)
    queue.submit(stub_request(), left)()
    queue.submit(stub_request(), stays)
    clock.seconds += 3.0
    assert queue.take_expired() == []
    assert (late.finish, left.finish, queue.waiting) == (Finish.DEADLINE, Finish.CANCELLED, 1)
    assert (late.usage.emitted, stays.chunks, queue.next_offset) == (0, [], 0)


def test_a_running_request_ends_after_a_block_of_its_own():
    """One that was admitted and has not decoded yet stays for a block: what is logged of it is never empty."""
    queue = make_queue()
    queue.submit(stub_request(), RecordingListener())()
    queue.submit(stub_request(), RecordingListener())
    cancel = queue.submit(stub_request(), RecordingListener())
    prompts = list(queue)
    cancel()
    assert [prompt.offset for prompt in prompts] == [0, 1]
    assert queue.take_expired() == []


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[int, list[tuple[int, float | None]], list[list[tuple[str, int]]]]:
    """Rows at a time; requests with their blocks and deadlines; what happens in each block."""
    requests = draw(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([None, None, 2.0])), min_size=1, max_size=7))
    deed = st.tuples(st.sampled_from(["cancel", "cancel", "submit", "pass", "close", "fail"]), st.integers(0, 9))
    return draw(st.integers(1, 3)), requests, draw(st.lists(st.lists(deed, max_size=2), max_size=8))


@given(scenarios())
def test_every_listener_receives_exactly_one_finish(scenario: tuple) -> None:
    """Whatever is cancelled, overdue, submitted, closed or broken in the middle of any block."""
    batch, requests, blocks = scenario
    clock, numbers = ManualClock(), count()
    listeners: list[RecordingListener] = []
    cancels: list[Callable[[], None]] = []

    def submit(blocks: int, seconds: float | None) -> None:
        listener = RecordingListener(fails=len(listeners) % 5 == 4)
        try:
            cancels.append(
                world.engine.submit(stub_request(f"{next(numbers)}", blocks, timeout_seconds=seconds), listener)
            )
        except BusyError:
            return
        listeners.append(listener)

    def do(deeds: list[tuple[str, int]]) -> None:
        for deed, number in deeds:
            if deed == "cancel":
                cancels[number % len(cancels)]()
            elif deed == "submit":
                submit(1 + number % 3, None)
            elif deed == "pass":
                clock.seconds += number
            elif deed == "close":
                world.queue.close()
            else:
                raise ArithmeticError("a stage that breaks")

    script = [lambda deeds=deeds: do(deeds) for deeds in blocks]
    world = StubEngine(batch, 5, script=script, clock=clock)
    for request in requests:
        submit(*request)
    world.engine.start()
    for listener in list(listeners):  # noqa: PERF101 (others are added meanwhile)
        listener.end()
    world.engine.close(HANG_SECONDS)
    for cancel in cancels:
        cancel()  # after the end: harmless
    assert all(len(listener.finishes) == 1 and listener.chunks[-1].finish for listener in listeners)
    assert not world.engine.read_status().ready
    offsets = [event.offset for event in world.seen if isinstance(event, PromptReceived)]
    assert offsets == list(range(len(offsets)))
    if world.engine.failure is None:
        assert world.rows == [0, 0, 0]
        assert world.queue.running == world.queue.waiting == 0
    else:
        assert {listener.finish for listener in listeners[-1:]} <= set(Finish)
    _assert_whole(world)


def _assert_whole(world: StubEngine) -> None:
    """A log that is cut at any commit holds whole prompts."""
    for end in world.committer.commits:
        ended = {event.offset for event in world.log.events[:end] if isinstance(event, PromptCompleted)}
        kinds = (TokenDecision, BlockDone)
        assert {event.offset for event in world.log.events[:end] if isinstance(event, kinds)} == ended


def test_a_listener_that_raises_does_no_harm_to_others():
    world = StubEngine()
    bad, good = RecordingListener(fails=True), RecordingListener()
    for listener in (bad, good):
        world.engine.submit(stub_request(blocks=6), listener)
    world.engine.start()
    assert good.finish is Finish.LENGTH
    world.engine.close(HANG_SECONDS)
    assert bad.finish is Finish.CANCELLED, "nobody is there any more"
    assert bad.usage.emitted < 6
    assert world.engine.failure is None


def test_a_broken_stage_ends_everything_and_is_logged(caplog: pytest.LogCaptureFixture):
    world = StubEngine(batch=1, script=[lambda: None, Mock(side_effect=ArithmeticError("a stage that breaks"))])
    running, waiting = RecordingListener(), RecordingListener()
    world.engine.submit(stub_request(blocks=6), running)
    world.engine.submit(stub_request(blocks=6), waiting)
    world.engine.start()
    assert running.finish is waiting.finish is Finish.FAILED
    wait_until(lambda: not world.engine.read_status().ready)
    assert isinstance(world.engine.failure, ArithmeticError)
    assert "a stage that breaks" in caplog.messages[0]
    with pytest.raises(BusyError):
        world.engine.submit(stub_request(), RecordingListener())
    world.engine.close(0.0)


@pytest.mark.parametrize(("grace", "finish"), [(60.0, Finish.LENGTH), (0.0, Finish.CANCELLED)])
def test_those_in_flight_finish_within_the_grace_and_end_after_it(grace: float, finish: Finish):
    slow = [lambda: time.sleep(0.01)] * 200
    world = StubEngine(batch=1, script=slow)
    running, waiting = RecordingListener(hold=1), RecordingListener()
    world.engine.submit(stub_request(blocks=100), running)
    world.engine.submit(stub_request(blocks=100), waiting)
    world.engine.start()
    assert running.reached.wait(HANG_SECONDS)
    running.go.set()
    world.engine.close(grace)
    assert (running.finish, waiting.finish) == (finish, finish)
    assert (running.usage.emitted == 100) == (finish is Finish.LENGTH)
    assert world.rows == [0, 0, 0]
    assert world.log.closed


def test_a_deadline_ends_a_request_in_flight_after_the_block_in_which_it_passed():
    clock = ManualClock()

    def wait_too_long() -> None:
        clock.seconds += 3.0

    world = StubEngine(batch=2, script=[lambda: None, wait_too_long], clock=clock)
    late, other = RecordingListener(), RecordingListener()
    world.engine.submit(stub_request("late", blocks=6, timeout_seconds=3.0), late)
    world.engine.submit(stub_request("other", blocks=6), other)
    world.engine.start()
    assert (late.finish, other.finish) == (Finish.DEADLINE, Finish.LENGTH)
    assert (late.usage.blocks, other.usage.blocks) == (2, 6)
    world.engine.close(60.0)
    assert world.rows == [0, 0, 0]


def test_a_private_request_is_decoded_without_its_text():
    queue = make_queue()
    queue.submit(stub_request(store=False), RecordingListener())
    (prompt,) = queue
    row = queue.prepare_sequence(prompt)
    assert (prompt.text, row.text, row.private) == ("", "", True)
    assert row.tokens == [97, 98], "it is decoded all the same"


def test_rows_have_the_scope_of_their_client():
    queue = make_queue()
    for tenant in ("", "one", "two", "one"):
        queue.submit(stub_request(tenant=tenant), RecordingListener())
    nobody, one, two, again = (queue.prepare_sequence(prompt).scope for prompt in queue)
    assert nobody == 0
    assert len({nobody, one, two}) == 3
    assert again == one
