"""Asks from their arrival to their finish: every listener is told exactly one, whatever happens."""

import time
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_stubs import LONGEST, StubEngine, StubWords, stub_ask
from serving_tiny import PATIENCE, Told, until

from pipeline.serve_desk import LONGEST_RETRY, READ_AT_ONCE, Desk
from pipeline.serve_requests import Ask, BusyError, Encoded, Finish
from store.events import BlockDone, PromptCompleted, PromptReceived, TokenDecision


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def desk_of(now: Callable[[], float] = lambda: 0.0, waiting: int = 4, offset: int = 0) -> Desk:
    return Desk(StubWords(), LONGEST, waiting, 7, offset, text=True, now=now)


def ask_of_length(tokens: int) -> Ask:
    return Ask("long", Encoded("", (97,) * tokens, (97,) * tokens), 5, 0.0)


def test_asks_become_prompts_in_their_order():
    desk = desk_of(offset=5)
    for name in ("one", "two"):
        desk.submit(stub_ask(name), Told())
    desk.submit(stub_ask("two", choice=1), Told())
    prompts = list(desk)
    assert [(prompt.offset, prompt.prompt_id) for prompt in prompts] == [(5, "one"), (6, "two"), (7, "two#1")]
    assert [prompt.text for prompt in prompts] == ["ab"] * 3
    assert (desk.next_offset, desk.running, desk.waiting) == (8, 3, 0)


def test_what_is_not_to_be_stored_goes_on_without_its_text():
    desk = desk_of()
    desk.submit(stub_ask(store=False), Told())
    (prompt,) = desk
    row = desk.row_of(prompt)
    assert (prompt.text, row.text, row.private) == ("", "", True)
    assert row.tokens == [97, 98], "it is decoded all the same"


def test_a_full_queue_refuses_and_says_when_it_is_worth_trying_again():
    hands = Hands()
    desk = desk_of(hands, waiting=4)
    for _ in range(4):
        desk.submit(stub_ask(), Told())
    with pytest.raises(BusyError, match="4 requests") as refused:
        desk.submit(stub_ask(), Told())
    assert (refused.value.retry_after, refused.value.leaving) == (1, False)


@pytest.mark.parametrize(("pace", "expected"), [(0.01, 1), (5.0, 20), (1000.0, LONGEST_RETRY)])
def test_the_time_to_wait_follows_the_pace_of_the_last_asks(pace: float, expected: int):
    hands = Hands()
    desk = desk_of(hands, waiting=4)
    for _ in range(3):
        desk.submit(stub_ask(), Told())
        (prompt,) = desk
        hands.seconds += pace
        desk.left(prompt.offset, Finish.CANCELLED)
    for _ in range(4):
        desk.submit(stub_ask(), Told())
    with pytest.raises(BusyError) as refused:
        desk.submit(stub_ask(), Told())
    assert refused.value.retry_after == expected


def test_a_closed_desk_takes_nothing_but_gives_what_waits():
    desk = desk_of()
    desk.submit(stub_ask("early"), Told())
    desk.close()
    with pytest.raises(BusyError, match="shutting down") as refused:
        desk.submit(stub_ask(), Told())
    assert refused.value.leaving
    assert refused.value.retry_after >= 1
    assert [prompt.prompt_id for prompt in desk] == ["early"]


def test_prompts_are_read_a_few_at_a_time():
    """One prompt at least, then no more than `READ_AT_ONCE` tokens before the next block: who streams need not wait."""
    desk = desk_of(waiting=10)
    for _ in range(3):
        desk.submit(ask_of_length(READ_AT_ONCE), Told())
    assert [prompt.offset for prompt in desk] == [0]
    desk.told([])  # a block
    assert [prompt.offset for prompt in desk] == [1]


def test_a_completion_is_cut_to_the_room_that_the_context_leaves():
    desk = desk_of()
    desk.submit(ask_of_length(LONGEST - 2), Told())
    (prompt,) = desk
    assert desk.row_of(prompt).room == 2


def test_seeds_of_any_size_and_choices_give_draws_of_their_own():
    desk, draws = desk_of(waiting=10), []
    asks = [stub_ask(seed=-1), stub_ask(seed=1 << 70), stub_ask(seed=4), stub_ask(seed=4, choice=1), stub_ask()]
    for ask in asks:
        desk.submit(ask, Told())
    for prompt in desk:
        source = desk.row_of(prompt).draws
        draws.append(tuple(source.uniform(None) for _ in range(4)))
    assert len(set(draws)) == len(asks)


@pytest.mark.parametrize("why", [Finish.CANCELLED, Finish.DEADLINE])
def test_an_ask_that_leaves_while_it_waits_is_never_taken(why: Finish):
    hands = Hands()
    desk, told = desk_of(hands), Told()
    cancel = desk.submit(stub_ask(seconds=3.0), told)
    if why is Finish.CANCELLED:
        cancel()
    else:
        hands.seconds += 3.0
    assert list(desk) == []
    assert told.finish is why
    assert told.usage.emitted == 0
    assert desk.next_offset == 0


def test_deadlines_and_cancellations_reach_the_queue_while_nothing_is_admitted():
    hands = Hands()
    desk, late, left, stays = desk_of(hands), Told(), Told(), Told()
    desk.submit(stub_ask(seconds=3.0), late)
    desk.submit(stub_ask(), left)()
    desk.submit(stub_ask(), stays)
    hands.seconds += 3.0
    assert desk.to_leave() == []
    assert (late.finish, left.finish, desk.waiting) == (Finish.DEADLINE, Finish.CANCELLED, 1)
    assert stays.chunks == []


def test_an_ask_in_flight_leaves_after_a_block_of_its_own():
    """One that was admitted and has not decoded yet stays for a block: what is logged of it is never empty."""
    desk = desk_of()
    desk.submit(stub_ask(), Told())()
    desk.submit(stub_ask(), Told())
    cancel = desk.submit(stub_ask(), Told())
    prompts = list(desk)
    cancel()
    assert [prompt.offset for prompt in prompts] == [0, 1]
    assert desk.to_leave() == []


@st.composite
def lives(draw: st.DrawFn) -> tuple[int, list[tuple[int, float | None]], list[list[tuple[str, int]]]]:
    """Rows at a time; asks with their blocks and deadlines; what happens in each block."""
    asks = draw(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([None, None, 2.0])), min_size=1, max_size=7))
    deed = st.tuples(st.sampled_from(["cancel", "cancel", "submit", "pass", "close", "fail"]), st.integers(0, 9))
    return draw(st.integers(1, 3)), asks, draw(st.lists(st.lists(deed, max_size=2), max_size=8))


@given(lives())
def test_every_listener_is_told_exactly_one_finish(life: tuple) -> None:
    """Whatever is cancelled, overdue, submitted, closed or broken in the middle of any block."""
    batch, asks, blocks = life
    hands, numbers = Hands(), count()
    told: list[Told] = []
    cancels: list[Callable[[], None]] = []

    def submit(blocks: int, seconds: float | None) -> None:
        listener = Told(fails=len(told) % 5 == 4)
        try:
            cancels.append(world.engine.submit(stub_ask(f"{next(numbers)}", blocks, seconds=seconds), listener))
        except BusyError:
            return
        told.append(listener)

    def do(deeds: list[tuple[str, int]]) -> None:
        for deed, number in deeds:
            if deed == "cancel":
                cancels[number % len(cancels)]()
            elif deed == "submit":
                submit(1 + number % 3, None)
            elif deed == "pass":
                hands.seconds += number
            elif deed == "close":
                world.desk.close()
            else:
                raise ArithmeticError("a stage that breaks")

    script = [lambda deeds=deeds: do(deeds) for deeds in blocks]
    world = StubEngine(batch, 5, script=script, now=hands)
    for ask in asks:
        submit(*ask)
    world.engine.start()
    for listener in list(told):
        listener.end()
    world.engine.close(PATIENCE)
    for cancel in cancels:
        cancel()  # after the end: harmless
    assert all(len(listener.finishes) == 1 and listener.chunks[-1].finish for listener in told)
    assert not world.engine.figures().ready
    offsets = [event.offset for event in world.seen if isinstance(event, PromptReceived)]
    assert offsets == list(range(len(offsets)))
    if world.engine.failure is None:
        assert world.rows == [0, 0, 0]
        assert world.desk.running == world.desk.waiting == 0
    else:
        assert world.notes
        assert {listener.finish for listener in told[-1:]} <= set(Finish)
    _assert_whole(world)


def _assert_whole(world: StubEngine) -> None:
    """A log that is cut at any commit holds whole prompts."""
    for end in world.committer.commits:
        ended = {event.offset for event in world.log.events[:end] if isinstance(event, PromptCompleted)}
        kinds = (TokenDecision, BlockDone)
        assert {event.offset for event in world.log.events[:end] if isinstance(event, kinds)} == ended


def test_a_listener_that_raises_does_no_harm_to_others():
    world = StubEngine()
    bad, good = Told(fails=True), Told()
    for listener in (bad, good):
        world.engine.submit(stub_ask(blocks=6), listener)
    world.engine.start()
    assert good.finish is Finish.LENGTH
    world.engine.close(PATIENCE)
    assert bad.finish is Finish.CANCELLED, "nobody is there any more"
    assert bad.usage.emitted < 6
    assert world.engine.failure is None


def test_a_stage_that_breaks_ends_everything_with_a_word():
    def breaks() -> None:
        raise ArithmeticError("a stage that breaks")

    world = StubEngine(batch=1, script=[lambda: None, breaks])
    flying, waiting = Told(), Told()
    world.engine.submit(stub_ask(blocks=6), flying)
    world.engine.submit(stub_ask(blocks=6), waiting)
    world.engine.start()
    assert flying.finish is waiting.finish is Finish.FAILED
    until(lambda: not world.engine.figures().ready)
    assert isinstance(world.engine.failure, ArithmeticError)
    assert "a stage that breaks" in world.notes[0]
    with pytest.raises(BusyError):
        world.engine.submit(stub_ask(), Told())
    world.engine.close(0.0)


@pytest.mark.parametrize(("grace", "finish"), [(60.0, Finish.LENGTH), (0.0, Finish.CANCELLED)])
def test_those_in_flight_finish_within_the_grace_and_end_after_it(grace: float, finish: Finish):
    slow = [lambda: time.sleep(0.01)] * 200
    world = StubEngine(batch=1, script=slow)
    flying, waiting = Told(hold=1), Told()
    world.engine.submit(stub_ask(blocks=100), flying)
    world.engine.submit(stub_ask(blocks=100), waiting)
    world.engine.start()
    assert flying.reached.wait(PATIENCE)
    flying.go.set()
    world.engine.close(grace)
    assert (flying.finish, waiting.finish) == (finish, finish)
    assert (flying.usage.emitted == 100) == (finish is Finish.LENGTH)
    assert world.rows == [0, 0, 0]
    assert world.log.closed


def test_commits_count_prompts():
    world = StubEngine()
    told = [Told() for _ in range(3)]
    for listener in told:
        world.engine.submit(stub_ask(), listener)
    world.engine.start()
    for listener in told:
        listener.end()
    world.engine.close(PATIENCE)
    assert world.committer.prompts == 3
