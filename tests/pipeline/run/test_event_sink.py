"""A prompt's decisions and blocks come with its completion, in their order, or not at all."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from loop_doubles import prompts_of, stub_loop

from pipeline.run.context import EventSink
from store.events import BlockDone, Event, PromptCompleted, TokenDecision


def events_of(lengths: list[int], batch: int) -> list[Event]:
    """Events of a loop that decodes several prompts at a time."""
    return list(stub_loop(batch).run(prompts_of(*("x" * length for length in lengths))))


@given(st.lists(st.integers(1, 5), max_size=8), st.integers(1, 4), st.integers(1, 9))
def test_all_events_arrive_and_those_of_a_prompt_are_adjacent(lengths: list[int], batch: int, every: int):
    passed, shown, events = list[Event](), list[Event](), events_of(lengths, batch)
    sink = EventSink(SimpleNamespace(append=passed.append), shown.append, whole=True)
    for begin in range(0, len(events), every):
        sink.take(events[begin : begin + every])
    assert shown == events
    assert sorted(map(repr, passed)) == sorted(map(repr, events))
    for offset in range(len(lengths)):
        own = [event for event in events if isinstance(event, TokenDecision | BlockDone) and event.offset == offset]
        end = next(place for place, event in enumerate(passed) if event == _completion(events, offset))
        assert passed[end - len(own) : end] == own


def _completion(events: list[Event], offset: int) -> Event:
    return next(event for event in events if isinstance(event, PromptCompleted) and event.offset == offset)
