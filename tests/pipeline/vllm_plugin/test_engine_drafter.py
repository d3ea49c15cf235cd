"""The engine-neutral part of the plugin: what is recognised, learned, counted and paid for."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count

import numpy as np
import pytest
from fake_vllm import END

from pipeline.loop import Clock
from pipeline.vllm_plugin.drafter import EngineDrafter
from pipeline.vllm_plugin.engine import EngineFacts, build_drafter
from pipeline.vllm_plugin.sequences import EngineRow, RowRequest
from pipeline.vllm_plugin.settings import PluginSettings
from stages.choose import ChooseDraft
from stages.memory.text_memory import TextMemory
from store.events import BlockDone, DraftSource, Event, PromptCompleted

FREE = ((1, 1.0), (2, 1.0))
REQUEST = RowRequest("a", 1000)


def make_drafter(
    clock: Callable[[], float],
    most: int = 6,
    longest: int = 100,
    take: Callable[[Iterable[Event]], None] = list,
    **settings: object,
) -> EngineDrafter:
    """A drafter without a model, over a target of 40 tokens."""
    chosen = PluginSettings.model_validate({"pass_costs": FREE, "memory_bytes": 1 << 16} | settings)
    facts = EngineFacts("target", "target", 40, longest, most, 16, frozenset({END}))
    return build_drafter(chosen, facts, take, clock=Clock(clock))


def memory_of(drafter: EngineDrafter) -> TextMemory:
    choose = drafter.runner.stages.decode
    assert isinstance(choose, ChooseDraft)
    return choose.memory


class Engine:
    """A drafter with all events that it emitted."""

    def __init__(self, **settings: object) -> None:
        self.events: list[Event] = []
        self.drafter = make_drafter(map(float, count()).__next__, take=self.events.extend, **settings)

    def step(self, *rows: tuple[list[int], int]) -> list[list[int]]:
        """One pass of a request per place: whole texts, and how many of their last tokens it emitted."""
        return self.step_requests([(*row, RowRequest(str(place), 100)) for place, row in enumerate(rows)], ())

    def step_requests(
        self, rows: Sequence[tuple[list[int], int, RowRequest]], waiting: Collection[str]
    ) -> list[list[int]]:
        """One pass with requests that are known."""
        texts = [EngineRow(np.array(text, np.int32), emitted, request) for text, emitted, request in rows]
        return self.drafter.step(texts, waiting=waiting)

    def complete(self, prompt: list[int], *tokens: int, times: int = 1) -> None:
        """Requests that emit these tokens one by one."""
        for _ in range(times):
            for end in range(1, len(tokens) + 1):
                self.step((prompt + list(tokens[:end]), 1))
            self.step()

    def list_completed(self) -> list[PromptCompleted]:
        return [event for event in self.events if isinstance(event, PromptCompleted)]


def test_what_a_request_emitted_is_drafted_after_it_ended():
    engine = Engine(sources=["memory"])
    engine.complete([1, 2], 3, 4, 5, 6, times=9)
    assert engine.step(([9, 2, 3], 1)) == [[4, 5, 6]]
    others = Engine(sources=["own"])
    others.complete([1, 2], 3, 4, 5, 6, times=9)
    assert others.step(([9, 2, 3], 1)) == [[]]


def test_nothing_is_learned_before_a_request_ends_and_the_last_is_learned_at_the_end():
    engine = Engine(sources=["memory"])
    engine.step(([1, 2, 3], 1))
    engine.step(([1, 2, 3, 4], 1))
    table = memory_of(engine.drafter).table
    assert table is not None
    assert len(table) == 0
    engine.drafter.finish_all()
    assert [one.emitted for one in engine.list_completed()] == [2]
    assert table.find([1, 2])[0][1].tokens == [3]
    assert table.find([2, 3])[0][1].tokens == [4]


def test_a_preempted_request_pauses_and_returns():
    engine, named = Engine(sources=["own"]), [RowRequest(name, 90) for name in ("a", "b")]
    repeated = [1, 2, 1, 2, 1]
    drafts = engine.step_requests([(repeated, 1, named[0]), (repeated, 1, named[1])], {"a", "b"})
    assert drafts[0] == drafts[1] != []
    assert len(engine.step_requests([([*repeated, 2], 1, named[0])], {"a", "b"})) == 1
    assert engine.list_completed() == []
    assert engine.step_requests([([*repeated, 2, 1], 1, named[0]), (repeated, 0, named[1])], {"a", "b"})[1] == []
    returned = engine.step_requests([([*repeated, 2], 1, named[1])], {"b"})
    assert [one.prompt_id for one in engine.list_completed()] == ["a"]
    assert returned[0] != []
    engine.step_requests([], set())
    assert [(one.prompt_id, one.emitted, one.finish) for one in engine.list_completed()] == [
        ("a", 3, "cancelled"),
        ("b", 2, "cancelled"),
    ]


def test_a_request_that_is_gone_before_its_end_has_the_reason_that_it_brought():
    engine, request = Engine(), RowRequest("a", 6, departure="stop")
    engine.step_requests([([1, 2], 1, request)], {"a"})
    engine.step_requests([], set())
    assert [one.finish for one in engine.list_completed()] == ["stop"]
    engine.step_requests([([1, 2, 3, 4, 5], 1, request)], {"a"})
    engine.step_requests([([1, 2, 3, 4, 5, 6, 7], 2, request)], {"a"})
    assert [(one.finish, one.emitted) for one in engine.list_completed()][1:] == [("length", 2)]


def test_nothing_is_drafted_nor_learned_of_a_draft_while_that_is_not_allowed():
    engine, text = Engine(sources=["own"]), [1, 2, 1, 2, 1]

    def step(emitted: int, *, drafts: bool) -> list[int]:
        return engine.drafter.step([EngineRow(np.array(text, np.int32), emitted, REQUEST)], drafts=drafts)[0]

    assert step(1, drafts=True) != []
    for _ in range(3):
        text.append(1 + text[-1] % 2)
        assert step(1, drafts=False) == []
    before = memory_of(engine.drafter).calibration.state_dict()
    text.append(9)
    assert step(1, drafts=True) == []
    assert memory_of(engine.drafter).calibration.state_dict() == before
    text += [1, 2]
    assert step(2, drafts=True) != []
    text.append(1)
    step(1, drafts=True)
    assert memory_of(engine.drafter).calibration.state_dict() != before


def test_equal_texts_are_distinguished_by_ids():
    engine, first, second = Engine(), RowRequest("a", 90), RowRequest("b", 90)
    engine.step_requests([([5, 6], 1, first), ([5, 6], 1, second)], {"a", "b"})
    engine.step_requests([([5, 6, 7], 1, second), ([5, 6, 8], 1, first)], {"a", "b"})
    engine.step_requests([([5, 6, 8, 9], 1, first)], {"a"})
    assert [(one.prompt_id, one.emitted) for one in engine.list_completed()] == [("b", 2)]
    engine.drafter.finish_all()
    assert [(one.prompt_id, one.emitted) for one in engine.list_completed()] == [("b", 2), ("a", 3)]


def test_a_block_is_counted_as_the_engine_decided_it():
    engine = Engine(sources=["memory"])
    engine.complete([1, 2], 3, 4, 5, 6, times=9)
    engine.events.clear()
    assert engine.step(([9, 2, 3], 1)) == [[4, 5, 6]]
    engine.step(([9, 2, 3, 4, 8], 2))
    first, block = (event for event in engine.events if isinstance(event, BlockDone))
    assert (first.proposed, first.emitted) == (0, 1), "the token that the prompt's pass emitted"
    assert (block.proposed, block.judged, block.accepted, block.emitted) == (3, 2, 1, 2)
    assert block.drafter is DraftSource.MEMORY
    engine.step()
    (completed,) = engine.list_completed()
    assert (completed.lookup_drafted, completed.lookup_judged, completed.lookup_accepted) == (3, 2, 1)
    assert (completed.prompt_text, completed.completion_text) == ("", "")


def test_a_draft_is_as_long_as_it_pays():
    lengths = {}
    for slope in (0.0, 0.8, 2.0):
        engine = Engine(sources=["memory"], pass_costs=((1, 1.0), (11, 1.0 + 10 * slope)))
        engine.complete([1, 2], 3, 4, 5, 6, times=3)
        lengths[slope] = len(engine.step(([9, 2, 3], 1))[0])
    assert lengths[0.0] == 3
    assert 0 < lengths[0.0] > lengths[0.8]
    assert lengths[2.0] == 0


@pytest.mark.parametrize(("slope", "drafts"), [(0.0, True), (1.5, False)])
def test_costs_are_measured_between_two_steps(slope: float, drafts: bool):
    now = [0.0]
    drafter = make_drafter(lambda: now[0], 4, 1000, sources=["own"], pass_costs=None)
    text, draft = [1, 2, 3], list[int]()
    lengths = []
    for _ in range(60):
        now[0] += 1 + slope * len(draft)  # the pass
        text += [*draft, 1 + text[-1] % 3] if draft else [1 + text[-1] % 3]
        (draft,) = drafter.step([EngineRow(np.array(text, np.int32), len(draft) + 1, REQUEST)])
        lengths.append(len(draft))
        draft = [1 + (text[-1] + place) % 3 for place in range(len(draft))]
    assert (max(lengths[40:]) > 0) == drafts
