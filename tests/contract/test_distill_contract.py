"""The contract of `Distiller`, for every implementation: the guarantees for code that completes prompts."""

import gc
import inspect
import random
import weakref
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from soft_target_tables import store_tokens
from test_stage_contract import PIECES, llama

from stages import distill as distill_module
from stages.contract.blocks import AcceptanceLabel, TrainingExample
from stages.distill import Distill, Distiller
from stages.drafting.head import EXTRA_FEATURES, AcceptanceHead
from stages.learn.examples.losses import expected_acceptance, trie_loss
from stages.learn.training.drafter_trainer import DrafterTrainer
from stages.learn.training.head_trainer import HeadTrainer
from stages.learn.training.interval import UpdateInterval
from stages.learn.training.scheduler import InlineWorker, ThreadWorker, UpdateScheduler
from stages.learn.training.update import TrainingConfig
from store.events import Updated


def example_of(offset: int) -> TrainingExample:
    soft_targets = store_tokens(*((position, {(0,): 0.7, (2,): 0.2}) for position in (1, 2, 3)))
    labels = tuple(AcceptanceLabel(torch.full((16 + EXTRA_FEATURES,), n / 40), float(n % 2)) for n in range(40))
    return TrainingExample(offset, "big", (0, 1, 2, offset % 4), soft_targets, labels, (2, 3))


def new_distill(lag: int = 0, worker: Callable[[], Executor] = InlineWorker) -> Distill:
    served = llama(PIECES)
    training = TrainingConfig(1e-3, 0.0, steps=1, clip=1.0, replay=8, gate_window=4, gate_tolerance=1.0, seed=0)
    trainer = DrafterTrainer(served, "trie", trie_loss, expected_acceptance, {"big": range(PIECES)}, training)
    head = HeadTrainer(AcceptanceHead(16, 0), seed=0, rate=1e-3, batch=32, buffer=64)
    learner = UpdateScheduler(trainer, UpdateInterval(2), gate_every=3, max_examples=2, lag=lag, worker=worker())
    return Distill(learner, head)


LEARNERS: dict[str, Callable[[], Distiller]] = {
    "Distill": new_distill,
    "Distill, on a thread": partial(new_distill, 1, ThreadWorker),
    "Distiller": Distiller,
}
every_learner = pytest.mark.parametrize("make", LEARNERS.values(), ids=list(LEARNERS))


def without_times(updates: tuple[Updated, ...]) -> list[Updated]:
    return [replace(update, seconds=0.0, waited=0.0) for update in updates]


@every_learner
def test_equal_examples_produce_equal_updates(make: Callable[[], Distiller]):
    one, other = make(), make()
    for offset in range(7):
        example = example_of(offset)
        assert without_times(one.learn(example)) == without_times(other.learn(example))
        assert (one.drafter_version, one.head_version) == (other.drafter_version, other.head_version)


@every_learner
def test_learning_leaves_global_random_states_unchanged(make: Callable[[], Distiller]):
    learner = make()
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    for offset in range(5):
        learner.learn(example_of(offset))
    learner.end()
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


@pytest.mark.usefixtures("small_heap")
@every_learner
def test_an_example_with_its_labels_is_released_after_learning(make: Callable[[], Distiller]):
    learner, example = make(), example_of(3)
    learner.learn(example)
    reference = weakref.ref(example)
    del example
    gc.collect()
    assert reference() is None


@every_learner
def test_the_head_can_be_reset_at_any_time(make: Callable[[], Distiller]):
    learner = make()
    learner.reset_head()
    for offset in range(3):
        learner.learn(example_of(offset))
    learner.reset_head()
    assert isinstance(learner.learn(example_of(4)), tuple)


@every_learner
def test_end_may_be_called_at_any_time_and_repeatedly(make: Callable[[], Distiller]):
    learner = make()
    assert learner.end() == ()
    updates = sum((learner.learn(example_of(offset)) for offset in range(5)), ()) + learner.end()
    assert learner.end() == ()
    assert not learner.busy
    assert not learner.wait()
    assert [update.offset for update in updates if update.part == "drafter"] in ([], [1, 3])


def test_no_implementation_is_missing_from_this_suite():
    classes = [cls for _, cls in inspect.getmembers(distill_module, inspect.isclass)]
    assert {cls.__name__ for cls in classes if Distiller in cls.__mro__} == {name.split(",")[0] for name in LEARNERS}


def test_from_a_prompt_without_soft_targets_only_the_head_learns():
    learner = new_distill()
    updates = [one for offset in range(4) for one in learner.learn(replace(example_of(offset), soft_targets=None))]
    assert [update.part for update in updates] == ["head"] * 4
    assert (learner.drafter_version, learner.head_version) == (0, 4)


def test_the_head_makes_no_step_after_a_prompt_without_labels():
    learner = new_distill()
    for offset in range(4):
        learner.learn(example_of(offset))
    version = learner.head_version
    assert version > 0
    updates = [update for offset in range(4, 8) for update in learner.learn(replace(example_of(offset), labels=()))]
    assert {update.part for update in updates} == {"drafter"}
    assert learner.head_version == version
    learner.learn(example_of(8))
    assert learner.head_version == version + 1
