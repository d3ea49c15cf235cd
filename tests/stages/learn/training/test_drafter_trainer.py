"""Training the drafter: it learns, and what would harm is never served."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from soft_target_tables import store_tokens
from torch import Tensor

from stages.contract.blocks import TrainingExample
from stages.engine.models.huggingface import new_llama
from stages.engine.models.language_model import LanguageModel
from stages.learn.examples.losses import (
    StudentBatch,
    TeacherBatch,
    expected_acceptance,
    trie_loss,
)
from stages.learn.training.drafter_trainer import DrafterTrainer
from stages.learn.training.update import Step, TrainingConfig

VOCABULARY = 8
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
ALLOWED = range(VOCABULARY - 1)


def new_trainer(loss: Callable = trie_loss, measure: Callable = expected_acceptance, **changes: Any) -> DrafterTrainer:
    settings = {
        "rate": 1e-2, "weight_decay": 0.0, "steps": 2, "clip": 1.0, "replay": 16, "gate_window": 4,
        "gate_tolerance": 0.01, "seed": 0,
    }  # fmt: skip
    served = LanguageModel(new_llama(1, vocab_size=VOCABULARY, **SHAPE), "tiny")
    training = TrainingConfig(**settings | changes)
    return DrafterTrainer(served, "trie", loss, measure, {"one": ALLOWED, "other": ALLOWED}, training)


def update(trainer: DrafterTrainer, fresh: Sequence[TrainingExample]) -> Step:
    """A whole update in one go."""
    return trainer.settle(trainer.attempt(trainer.assign(fresh)))


def example_of(pieces: tuple[int, ...], offset: int = 0, right: int = 1, target: str = "one") -> TrainingExample:
    """The target emits after each piece that piece plus `right`, nine times in ten."""
    stored = []
    for position in range(1, len(pieces)):
        likeliest = (pieces[position - 1] + right) % 7
        tokens = {(likeliest,): 0.7, (likeliest, (likeliest + right) % 7): 0.2, ((likeliest + 1) % 7,): 0.05}
        if position % 3 == 0:  # the token of two pieces is emitted
            tokens = dict(sorted(tokens.items(), key=lambda item: -len(item[0])))
        stored.append((position, tokens))
    return TrainingExample(offset, target, pieces, store_tokens(*stored), (), (1, 2))


COUNTING = example_of(tuple(number % 7 for number in range(20)))
LATER = example_of(tuple((number + 3) % 7 for number in range(15)), 1)
BACKWARD = example_of(tuple(-number % 7 for number in range(20)), 2, right=-1)


def hold_out_enough(trainer: DrafterTrainer, example: TrainingExample) -> None:
    """Three equal examples: the gate needs as many to estimate the noise of a difference."""
    for offset in range(100, 103):
        trainer.hold_out(replace(example, offset=offset))


def weights(model: torch.nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def update_until_dropped(trainer: DrafterTrainer) -> Step:
    """Return the first step with BACKWARD that is dropped, after a check that it left the served weights."""
    for _ in range(20):
        before, version = weights(trainer.served.model), trainer.version
        step = update(trainer, [BACKWARD])
        if not step.served:
            assert same(weights(trainer.served.model), before)
            assert trainer.version == version
            return step
    raise AssertionError("no update was dropped")


def test_learning_raises_the_acceptance_of_examples_that_were_held_out():
    trainer = new_trainer()
    trainer.hold_out(LATER)
    steps = [update(trainer, [COUNTING]) for _ in range(25)]
    assert steps[-1].after > steps[0].before + 0.3
    served = [(step.after, step.baseline) for step in steps if step.served]
    assert trainer.held_out_acceptance == served[-1]
    assert all(step.positions >= COUNTING.supervised_tokens for step in steps)


def test_the_served_model_has_the_weights_that_the_gate_let_pass():
    trainer = new_trainer()
    before = weights(trainer.served.model)
    step = update(trainer, [COUNTING])
    assert (step.served, step.reason, trainer.version) == (True, "nothing held out yet", 1)
    assert (step.before, step.after) == (None, None)
    assert not same(weights(trainer.served.model), before)


def test_an_update_that_harms_the_held_out_examples_is_dropped():
    trainer = new_trainer(rate=5e-2)
    for _ in range(10):
        update(trainer, [COUNTING])
    hold_out_enough(trainer, LATER)
    step = update_until_dropped(trainer)
    assert step.reason == "the gate saw a lower acceptance for one"
    assert step.after < step.before - 0.01


def test_a_dropped_update_leaves_no_trace_in_the_next():
    """Whatever training does to the candidate: after a drop it has the served weights again."""
    trainer = new_trainer()
    hold_out_enough(trainer, LATER)
    served = weights(trainer.served.model)

    def ruin(examples: list[TrainingExample]) -> tuple[float, int, int]:
        with torch.no_grad():
            for weight in trainer._candidate.trained_weights:
                weight.zero_()
        return 1.0, 1, 1

    learn, trainer._train = trainer._train, ruin
    measure, trainer._measure = trainer._measure, _falls_after_the_first_call(trainer._measure)
    assert not update(trainer, [COUNTING]).served
    assert same(weights(trainer._candidate.model), served)
    trainer._train, trainer._measure = learn, measure
    assert update(trainer, [COUNTING]).served
    assert not same(weights(trainer.served.model), served)


def test_an_update_that_is_dropped_after_the_gate_let_it_pass_leaves_no_trace():
    trainer = new_trainer()
    served, attempt = weights(trainer.served.model), trainer.attempt(trainer.assign([COUNTING]))
    assert attempt.step.served
    assert not trainer.drop(attempt, "forgotten").served
    assert same(weights(trainer._candidate.model), served)
    assert same(weights(trainer.served.model), served)


def _falls_after_the_first_call(measure: Callable) -> Callable:
    calls: list[int] = []

    def falling(*distributions: Any) -> Tensor:
        calls.append(1)
        return measure(*distributions) - float(len(calls) > 1)

    return falling


@pytest.mark.parametrize("when", [1, 2])
def test_a_loss_that_is_not_finite_drops_the_update(when: int):
    calls: list[int] = []

    def loss(*distributions: Any) -> Tensor:
        calls.append(1)
        return trie_loss(*distributions) * (math.nan if len(calls) == when else 1)

    trainer = new_trainer(loss)
    trainer.hold_out(LATER)
    before = weights(trainer.served.model)
    step = update(trainer, [COUNTING])
    assert (step.served, step.reason, step.after) == (False, "the loss was not finite", None)
    assert math.isnan(step.loss)
    assert same(weights(trainer.served.model), before)
    assert same(weights(trainer._candidate.model), before)
    assert not trainer._candidate.model.training
    assert update(trainer, [COUNTING]).served, "the next update goes well"


def test_old_examples_are_replayed_together_with_fresh_ones():
    trainer = new_trainer(steps=1)
    seen: list[list[int]] = []
    learn = trainer._train
    trainer._train = lambda examples: (seen.append([example.offset for example in examples]), learn(examples))[1]
    for example in (COUNTING, LATER, BACKWARD):
        update(trainer, [example])
    assert seen[0] == [0]
    assert seen[1] == [1, 0]
    assert seen[2][0] == 2
    assert seen[2][1] in (0, 1)


def compare(trainer: DrafterTrainer, examples: list[TrainingExample]) -> tuple[StudentBatch, TeacherBatch, Tensor]:
    (batch,) = trainer._batcher.make_batches(examples)
    student, log_M = trainer._batcher.compute_distributions(trainer.served, batch)
    return student, batch.teacher, log_M


def test_examples_are_compared_alike_alone_and_together_with_longer_ones():
    trainer = new_trainer()
    alone = [compare(trainer, [example]) for example in (LATER, COUNTING)]
    student, teacher, log_N = compare(trainer, [COUNTING, LATER])
    together = expected_acceptance(student, teacher)
    parts = [expected_acceptance(student, teacher) for student, teacher, _ in alone]
    torch.testing.assert_close(together, torch.cat(parts))
    torch.testing.assert_close(log_N, torch.cat([log_N for _, _, log_N in alone]))


def test_many_examples_are_learned_in_batches_with_the_same_result(monkeypatch):
    examples = [example_of(tuple((number * step) % 7 for number in range(12)), step) for step in range(1, 5)]
    whole, parts = new_trainer(steps=1), new_trainer(steps=1)
    first = update(whole, examples)
    monkeypatch.setattr("stages.learn.examples.batches.MAX_LOGITS", 2 * 12 * VOCABULARY)
    assert [len(batch.examples) for batch in parts._batcher.make_batches(examples)] == [2, 2]
    second = update(parts, examples)
    assert (second.positions, second.loss) == (first.positions, pytest.approx(first.loss, rel=1e-5))
    for one, other in zip(weights(whole.served.model), weights(parts.served.model), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def _nan_gradient(*distributions: Any) -> Tensor:
    """Finite, but its gradient is not: the root of 0 has an infinite slope."""
    return trie_loss(*distributions) + (distributions[0].log_top_NT * 0).sum().sqrt()


@pytest.mark.parametrize("held_out", [False, True])
def test_a_gradient_that_is_not_finite_drops_the_update(held_out: bool):
    trainer = new_trainer(_nan_gradient, steps=1)
    if held_out:
        trainer.hold_out(LATER)
    before = weights(trainer.served.model)
    assert not update(trainer, [COUNTING]).served
    assert same(weights(trainer.served.model), before)


def test_an_update_that_helps_one_target_and_harms_another_is_dropped():
    """The targets want opposite things of the same weights; on average the update would be a gain."""
    trainer = new_trainer(rate=5e-2, gate_window=12)
    for _ in range(10):
        update(trainer, [COUNTING])
    for example in (BACKWARD, BACKWARD, BACKWARD, BACKWARD, example_of(LATER.pieces, 5, target="other")):
        hold_out_enough(trainer, example)
    step = update_until_dropped(trainer)
    assert step.reason == "the gate saw a lower acceptance for other"
    assert step.after > step.before, "the whole is better"


def test_each_target_holds_out_examples_of_its_own():
    trainer = new_trainer(gate_window=1, rate=1e-9)
    mine, others = LATER, example_of(BACKWARD.pieces, 7, -1, target="other")
    for example in (COUNTING, mine, others):
        trainer.hold_out(example)
    positions = [example.supervised_tokens for example in (mine, others)]
    rates = [trainer.measure_acceptance(None, [example]) for example in (mine, others)]
    want = sum(rate * number for rate, number in zip(rates, positions, strict=True)) / sum(positions)
    assert update(trainer, [COUNTING]).before == pytest.approx(want)


def test_the_baseline_is_the_drafter_as_loaded_measured_on_the_present_window():
    trainer = new_trainer(gate_window=1)
    loaded = {example.offset: trainer.measure_acceptance(None, [example]) for example in (LATER, BACKWARD)}
    trainer.hold_out(LATER)
    steps = [update(trainer, [COUNTING]) for _ in range(10)]
    assert [step.baseline for step in steps] == [pytest.approx(loaded[1])] * 10
    assert steps[-1].before > steps[-1].baseline + 0.1
    trainer.hold_out(BACKWARD)
    assert update(trainer, [COUNTING]).baseline == pytest.approx(loaded[2])


def test_other_weights_are_scored_without_a_trace():
    trainer, other = new_trainer(), new_trainer()
    trainer.hold_out(LATER)
    for _ in range(5):
        update(other, [COUNTING])
    before = weights(trainer.served.model)
    found = trainer.measure_acceptance(other.served.trained_weights, [LATER])
    assert found == pytest.approx(other.measure_acceptance(None, [LATER]))
    assert found > trainer.measure_acceptance(None, [LATER]) + 0.05
    assert same(weights(trainer.served.model), before)
    assert same(weights(trainer._candidate.model), before)
    assert update(trainer, [COUNTING]) == update(new_trainer_with(LATER), [COUNTING])


def new_trainer_with(held_out: TrainingExample) -> DrafterTrainer:
    trainer = new_trainer()
    trainer.hold_out(held_out)
    return trainer


def test_adopted_weights_are_served_as_they_are_and_learned_from():
    trainer = new_trainer_with(LATER)
    given = weights(trainer.served.model)
    for _ in range(5):
        update(trainer, [COUNTING])
    version, rate = trainer.version, trainer.measure_acceptance(given, [LATER])
    trainer.adopt(given)
    assert same(weights(trainer.served.model), given)
    assert same(weights(trainer._candidate.model), given)
    assert trainer.version == version + 1
    assert trainer.held_out_acceptance == (None, None), "it is that of the weights in service"
    trainer._replay = new_trainer()._replay  # what was learned from stays known
    step = update(trainer, [COUNTING])
    assert step.before == pytest.approx(rate), "what was known of the weights before is forgotten"
    assert step == update(new_trainer_with(LATER), [COUNTING]), "as if it were the first update"
