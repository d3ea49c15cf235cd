"""The contract of `Learner`, for every implementation: the guarantees for a runner, wherever its drafter is trained."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from event_making import make_completed
from stored_states import store
from test_distill_contract import new_distill
from test_drift_response_contract import example_of
from test_stage_contract import llama

from pipeline.config.sections import DriftSettings
from pipeline.learner_protocol import CompletedPrompt, Learner
from pipeline.learning import local_learner as learner_module
from pipeline.learning import remote_learner as remote_module
from pipeline.learning.drift import DriftMonitor
from pipeline.learning.drift_response import NoResponse
from pipeline.learning.local_learner import FollowingLearner, LocalLearner, NoLearner
from pipeline.learning.publisher import NoPublisher
from pipeline.learning.remote_learner import RemoteLearner
from stages.contract.snapshot import Snapshot
from stages.drafting.head import AcceptanceHead
from stages.engine.models.language_model import LanguageModel
from stages.learn.training.weight_update import Weights, export_weights
from store.events import Event, Updated


@dataclass
class StubConnection:
    """Records posted prompts, and returns the weights that a test placed in `waiting`."""

    posted: list[CompletedPrompt] = field(default_factory=list)
    waiting: list[Weights] = field(default_factory=list)

    def post(self, finished: CompletedPrompt) -> None:
        self.posted.append(finished)

    def take_new_weights(self) -> Weights | None:
        return self.waiting.pop() if self.waiting else None


def local() -> Learner:
    return LocalLearner(new_distill(), DriftMonitor(DriftSettings()), NoResponse(), NoPublisher())


def remote() -> Learner:
    model = llama(4)
    return RemoteLearner(StubConnection(), model, AcceptanceHead(model.hidden_size, 0))


def no_learner() -> Learner:
    return NoLearner(DriftMonitor(DriftSettings()))


LEARNERS: dict[str, Callable[[], Learner]] = {"LocalLearner": local, "RemoteLearner": remote, "NoLearner": no_learner}
every_learner = pytest.mark.parametrize("make", LEARNERS.values(), ids=list(LEARNERS))


def make_finished(offset: int, *, private: bool = False) -> CompletedPrompt:
    return CompletedPrompt(make_completed(offset), None if private else example_of(offset), () if private else (1, 2))


def save_files(learner: Learner) -> dict[str, bytes]:
    return Snapshot({"learner": learner.state_dict()}).files()


def complete_prompts(learner: Learner, prompts: int) -> list[Event]:
    events: list[Event] = [*learner.publish_baseline()]
    for offset in range(prompts):
        events += [*learner.apply_new_weights(), *learner.on_prompt_completed(make_finished(offset))]
    return [*events, *learner.end()]


@every_learner
def test_the_version_is_that_of_the_last_reported_update(make: Callable[[], Learner]):
    learner = make()
    assert (learner.drafter_version, learner.head_version) == (0, 0)
    updates = [event for event in complete_prompts(learner, 6) if isinstance(event, Updated) and event.served]
    versions = [update.drafter_version for update in updates if update.part == "drafter"]
    assert learner.drafter_version == (versions[-1] if versions else 0)


@every_learner
def test_private_prompts_cause_no_update(make: Callable[[], Learner]):
    learner = make()
    events = [
        event for offset in range(6) for event in learner.on_prompt_completed(make_finished(offset, private=True))
    ]
    assert not any(isinstance(event, Updated) for event in (*events, *learner.end()))
    assert (learner.drafter_version, learner.head_version) == (0, 0)


@every_learner
def test_end_and_wait_may_be_called_again(make: Callable[[], Learner]):
    learner = make()
    complete_prompts(learner, 3)
    assert list(learner.end()) == []
    assert learner.wait() is False
    assert learner.busy is False


@every_learner
def test_a_restored_learner_equals_the_saved_one(make: Callable[[], Learner]):
    learner, other = make(), make()
    complete_prompts(learner, 3)
    state = store(learner.state_dict())
    other.load_state_dict(state)
    assert (other.drafter_version, other.head_version) == (learner.drafter_version, learner.head_version)
    assert other.epoch == learner.epoch
    assert save_files(other) == save_files(learner)
    other.replay_history(make_completed(0))
    assert save_files(other) == save_files(learner), "the state of the drift monitor is in the log, not in the snapshot"


@every_learner
def test_nothing_happens_before_events_are_consumed(make: Callable[[], Learner]):
    """Each method returns an iterator of events and does its work while the events are consumed."""
    learner = make()
    started: list[Iterator[Event]] = [learner.publish_baseline(), learner.apply_new_weights(), learner.end()]
    assert len(started) == 3
    assert (learner.drafter_version, learner.head_version) == (0, 0)


@every_learner
def test_an_epoch_lasts_until_another_drafter_serves(make: Callable[[], Learner]):
    learner = make()
    for offset in range(6):
        version, epoch = learner.drafter_version, learner.epoch
        list(learner.on_prompt_completed(make_finished(offset)))
        assert (learner.epoch != epoch) == (learner.drafter_version != version)


def remote_of(
    connection: StubConnection, *, adopts: bool = True
) -> tuple[RemoteLearner, LanguageModel, AcceptanceHead]:
    model = llama(4)
    head = AcceptanceHead(model.hidden_size, 0)
    return RemoteLearner(connection, model, head, adopts=adopts), model, head


def newer(seed: int, version: int) -> Weights:
    model = llama(4)
    with torch.no_grad():
        for weight in model.trained_weights:
            weight.add_(0.5 * seed)
    return export_weights(model, AcceptanceHead(model.hidden_size, seed), version, version + 1)


def serves(model: LanguageModel, weights: Weights) -> bool:
    return all(map(torch.equal, model.trained_weights, weights.drafter))


def test_a_remote_learner_takes_new_weights_between_blocks_only():
    connection = StubConnection()
    learner, model, _ = remote_of(connection)
    weights = newer(1, 3)
    connection.waiting.append(weights)
    list(learner.publish_baseline())
    list(learner.on_prompt_completed(make_finished(0)))
    list(learner.end())
    assert learner.drafter_version == 0
    assert not serves(model, weights)
    list(learner.apply_new_weights())
    assert (learner.drafter_version, learner.head_version) == (3, 4)
    assert serves(model, weights)
    list(learner.apply_new_weights())  # there are no new weights
    assert serves(model, weights)


@pytest.mark.parametrize(("drafter_version", "drifts", "another"), [(1, 0, True), (0, 1, True), (0, 0, False)])
def test_a_remote_epoch_ends_with_weights_from_a_drift_or_a_drafter_update(
    drafter_version: int, drifts: int, another: bool
):
    """In the third case only the head was updated."""
    connection = StubConnection()
    learner, model, head = remote_of(connection)
    before = learner.epoch
    connection.waiting.append(export_weights(model, head, drafter_version, 1, drifts))
    list(learner.apply_new_weights())
    assert (learner.epoch != before) is another


def test_a_shadow_learner_never_serves_new_weights():
    connection = StubConnection()
    learner, model, head = remote_of(connection, adopts=False)
    before = export_weights(model, head, 0, 0)
    connection.waiting.append(newer(1, 3))
    epoch = learner.epoch
    list(learner.apply_new_weights())
    assert learner.epoch == epoch
    assert connection.waiting == [], "weights are taken, so that they do not accumulate"
    assert serves(model, before)
    assert (learner.drafter_version, learner.head_version) == (0, 0)


def test_a_remote_learner_posts_every_prompt_as_it_is():
    connection = StubConnection()
    learner, _, _ = remote_of(connection)
    prompts = [make_finished(offset, private=offset == 1) for offset in range(3)]
    for prompt in prompts:
        list(learner.on_prompt_completed(prompt))
    assert connection.posted == prompts


def implementations(module: Any) -> set[str]:
    """Learners of a module, without `FollowingLearner`, the common base of two of them."""
    classes = [cls for _, cls in inspect.getmembers(module, inspect.isclass) if cls.__module__ == module.__name__]
    return {cls.__name__ for cls in classes if issubclass(cls, Learner) and cls is not FollowingLearner}


def test_no_implementation_is_missing_from_this_suite():
    assert implementations(learner_module) | implementations(remote_module) == set(LEARNERS)
