"""What makes a drafter draft again that did not pay: a drift, a served update, and a restored version."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from event_making import make_drifted
from learner_hosting import prompts as sums
from loop_doubles import StubDistill, prompts_of, runner_of, stub_loop
from replaying import config_of
from stored_states import store
from tiny_pair import TinyPair

from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import load_models
from pipeline.loop import Loop
from stages.choose import LABELS_AFTER_DRIFT, ChooseDraft
from stages.contract.blocks import TrainingExample
from store.events import Action, BlockDone, Drifted, Event, PromptCompleted, PromptReceived, Updated

AT = 3  # the prompt that brings a drift to light


class StillDistill(StubDistill):
    """Learns nothing."""

    def learn(self, example: TrainingExample) -> tuple[Updated, ...]:
        return ()


def wakes(loop: Loop, name: str = "big") -> list[int]:
    """Number of blocks before each time that drafting was woken."""
    return runner_of(loop, name).stages.decode.woken


@pytest.mark.parametrize(
    ("action", "woken"), [("reset", [6]), ("recall", [6]), ("none", []), ("ignored", []), ("cooldown", [])]
)
def test_a_drift_that_is_acted_upon_wakes_the_next_block(action: str, woken: list[int]):
    loop = stub_loop(drifts={1: action})
    runner_of(loop).learner.distill = StillDistill()
    list(loop.run(prompts_of("abc", "abc", "abc", "abc")))
    assert wakes(loop) == woken


def test_every_served_update_wakes_the_next_block():
    loop = stub_loop()
    list(loop.run(prompts_of("abc", "ab", "abc")))
    assert wakes(loop) == [3, 5]


class OneFall:
    """Alarms once."""

    def observe(self, prompt: PromptCompleted) -> Drifted | None:
        return make_drifted(offset=AT, target=prompt.target, action="reset") if prompt.offset == AT else None


def resting_loop(pair: TinyPair, folder: Path) -> Loop:
    """A loop over a real pair whose drafter is known not to pay, without any update to come."""
    config = config_of(
        pair, draft__pause=True, draft__sources=("model",), learn__interval=1000, sampling__max_new_tokens=8
    )
    (models,) = load_models(config, "", folder)
    loop = build_loop(config, (models,), folder)
    runner = runner_of(loop, models.name)
    runner.learner._drift = OneFall()
    choose: ChooseDraft = runner.stages.decode
    choose._chooser.choose = lambda *promised, **options: Action.NOTHING
    return loop


def find_drafted(events: Sequence[Event]) -> list[int]:
    return [event.drafted for event in events if isinstance(event, BlockDone)]


def prompts() -> Iterator[PromptReceived]:
    return sums(AT + 3)


def split(events: Sequence[Event]) -> tuple[list[Event], list[Event]]:
    """Before and after the drift."""
    (place,) = [number for number, event in enumerate(events) if isinstance(event, Drifted)]
    return list(events[:place]), list(events[place + 1 :])


def test_after_a_drift_the_next_block_drafts(tiny_pair: TinyPair, tmp_path: Path):
    loop = resting_loop(tiny_pair, tmp_path)
    before, after = split(list(loop.run(prompts())))
    assert len(find_drafted(before)) >= AT
    assert {one.block for one in before if isinstance(one, BlockDone) and one.drafted} == {1}, "nothing but trials"
    assert all(find_drafted(after)[:LABELS_AFTER_DRIFT]), "it tries again"
    assert runner_of(loop, *loop.runners).learner.distill.head._labels, "and the head, which was reset, learns from it"


def test_a_run_that_is_interrupted_at_the_drift_wakes_when_it_resumes(tiny_pair: TinyPair, tmp_path: Path):
    """The snapshot is taken after the drift and before the block that it wakes."""
    whole = split(list(resting_loop(tiny_pair, tmp_path / "whole").run(prompts())))[1]
    loop = resting_loop(tiny_pair, tmp_path / "first")
    stream, seen, states = prompts(), [], []

    def pause() -> bool:
        if not any(isinstance(event, Drifted) for event in seen):
            return False
        states.append(store(loop.state_dict()))
        return True

    for event in loop.run(stream, pause):
        seen.append(event)
    resumed = resting_loop(tiny_pair, tmp_path / "second")
    resumed.load_state_dict(states[0])
    events = list(resumed.run(stream))
    assert find_drafted(events) == find_drafted(whole)
    assert find_drafted(events)[0] > 0
