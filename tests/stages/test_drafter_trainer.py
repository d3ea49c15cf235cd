"""Training the drafter: it learns, and what would harm is never served."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.blocks import Lesson, Teaching
from stages.drafter_trainer import DrafterTrainer, Training
from stages.huggingface import new_llama
from stages.language_model import LanguageModel
from stages.losses import acceptance_loss, direct_loss, expected_acceptance, greedy_agreement, hybrid_loss, trie_loss

VOCABULARY = 8
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
LOSSES = {
    "trie": trie_loss,
    "direct": direct_loss,
    "hybrid": hybrid_loss(0.2),
    "acceptance": acceptance_loss(0.5),
}
ALLOWED = range(VOCABULARY - 1)


def new_trainer(loss: Callable = trie_loss, measure: Callable = expected_acceptance, **changes: Any) -> DrafterTrainer:
    settings = {
        "rate": 1e-2, "weight_decay": 0.0, "steps": 2, "clip": 1.0, "replay": 16, "gate_window": 4,
        "gate_tolerance": 0.01, "seed": 0,
    }  # fmt: skip
    served = LanguageModel(new_llama(1, vocab_size=VOCABULARY, **SHAPE), "tiny")
    return DrafterTrainer(served, "trie", loss, measure, ALLOWED, Training(**settings | changes))


def lesson_of(pieces: tuple[int, ...], offset: int = 0, right: int = 1) -> Lesson:
    """The target says after each piece the piece behind it plus `right`, nine times in ten."""
    teachings = []
    for position in range(1, len(pieces)):
        said = (pieces[position - 1] + right) % 7
        teachings.append(Teaching(position, 0, (said, (said + 1) % 7), (0.9, 0.05), (0.7, 0.05), 0.05))
        if position % 3 == 0:
            teachings.append(Teaching(position, 1, (said,), (0.8,), (0.0,), 0.2))
    return Lesson(offset, pieces, tuple(teachings), (), (1, 2))


COUNTING = lesson_of(tuple(number % 7 for number in range(20)))
LATER = lesson_of(tuple((number + 3) % 7 for number in range(15)), 1)
BACKWARD = lesson_of(tuple(-number % 7 for number in range(20)), 2, right=-1)


def weights(model: torch.nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_falls_on_a_lesson_that_comes_again_and_again(name: str):
    trainer = new_trainer(LOSSES[name])
    losses = [trainer.update([COUNTING]).loss for _ in range(25)]
    assert losses[-1] < losses[0] - 0.2
    assert trainer.version == 25


def test_learning_raises_the_acceptance_of_lessons_that_were_held_out():
    trainer = new_trainer()
    trainer.hold_out(LATER)
    steps = [trainer.update([COUNTING]) for _ in range(25)]
    assert steps[-1].after > steps[0].before + 0.3
    assert all(step.positions >= len(COUNTING.teachings) for step in steps)


def test_the_served_model_has_the_weights_that_the_gate_let_pass():
    trainer = new_trainer()
    before = weights(trainer.served.model)
    step = trainer.update([COUNTING])
    assert (step.served, step.reason, trainer.version) == (True, "nothing held out yet", 1)
    assert (step.before, step.after) == (None, None)
    assert not same(weights(trainer.served.model), before)


def test_without_a_step_nothing_is_touched():
    trainer = new_trainer()
    before = weights(trainer.served.model)
    trainer.hold_out(COUNTING)
    assert same(weights(trainer.served.model), before)
    assert trainer.version == 0


def test_an_update_that_harms_the_held_out_lessons_is_dropped():
    trainer = new_trainer(rate=5e-2)
    for _ in range(10):
        trainer.update([COUNTING])
    trainer.hold_out(LATER)
    before, version = weights(trainer.served.model), trainer.version
    steps = [trainer.update([BACKWARD])]
    while steps[-1].served and len(steps) < 20:
        before, version = weights(trainer.served.model), trainer.version
        steps.append(trainer.update([BACKWARD]))
    assert (steps[-1].served, steps[-1].reason) == (False, "the gate saw a lower acceptance")
    assert steps[-1].after < steps[-1].before - 0.01
    assert same(weights(trainer.served.model), before)
    assert trainer.version == version


def test_a_dropped_update_leaves_no_trace_in_the_next():
    """Whatever training does to the candidate: after a drop it has the served weights again."""
    trainer = new_trainer()
    trainer.hold_out(LATER)
    served = weights(trainer.served.model)

    def ruin(lessons: list[Lesson]) -> tuple[float, int]:
        with torch.no_grad():
            for weight in trainer._candidate.parameters():
                weight.zero_()
        return 1.0, 1

    learn, trainer._train = trainer._train, ruin
    measure, trainer._measure = trainer._measure, _falls_after_the_first_call(trainer._measure)
    assert not trainer.update([COUNTING]).served
    assert same(weights(trainer._candidate), served)
    trainer._train, trainer._measure = learn, measure
    assert trainer.update([COUNTING]).served
    assert not same(weights(trainer.served.model), served)


def _falls_after_the_first_call(measure: Callable) -> Callable:
    calls: list[int] = []

    def falling(*laws: Any) -> Tensor:
        calls.append(1)
        return measure(*laws) - float(len(calls) > 1)

    return falling


def test_a_fall_within_the_tolerance_is_served():
    for tolerance, served in ((0.9, False), (1.1, True)):
        trainer = new_trainer(rate=1e-9, gate_tolerance=tolerance)
        trainer.hold_out(LATER)
        trainer._measure = _falls_after_the_first_call(trainer._measure)  # by 1
        assert trainer.update([COUNTING]).served is served


@pytest.mark.parametrize("when", [1, 2])
def test_a_loss_that_is_not_finite_drops_the_update(when: int):
    calls: list[int] = []

    def loss(*laws: Any) -> Tensor:
        calls.append(1)
        return trie_loss(*laws) * (math.nan if len(calls) == when else 1)

    trainer = new_trainer(loss)
    trainer.hold_out(LATER)
    before = weights(trainer.served.model)
    step = trainer.update([COUNTING])
    assert (step.served, step.reason, step.after) == (False, "the loss was not finite", None)
    assert math.isnan(step.loss)
    assert same(weights(trainer.served.model), before)
    assert same(weights(trainer._candidate), before)
    assert not trainer._candidate.training
    assert trainer.update([COUNTING]).served, "the next update goes well"


def test_old_lessons_are_learned_again_beside_fresh_ones():
    trainer = new_trainer(steps=1)
    seen: list[list[int]] = []
    learn = trainer._train
    trainer._train = lambda lessons: (seen.append([lesson.offset for lesson in lessons]), learn(lessons))[1]
    for lesson in (COUNTING, LATER, BACKWARD):
        trainer.update([lesson])
    assert seen[0] == [0]
    assert seen[1] == [1, 0]
    assert seen[2][0] == 2
    assert seen[2][1] in (0, 1)


def test_the_gate_looks_at_recent_lessons_alone():
    trainer = new_trainer(gate_window=1)
    trainer.hold_out(COUNTING)
    trainer.hold_out(BACKWARD)
    only = new_trainer(gate_window=1)
    only.hold_out(BACKWARD)
    assert trainer.update([LATER]).before == only.update([LATER]).before


def test_lessons_are_compared_alike_alone_and_beside_longer_ones():
    trainer = new_trainer()
    alone = [trainer._compare(trainer.served.model, [lesson]) for lesson in (COUNTING, LATER)]
    student, taught, log_N = trainer._compare(trainer.served.model, [COUNTING, LATER])
    together = expected_acceptance(student, taught)
    parts = [expected_acceptance(student, taught) for student, taught, _ in alone]
    torch.testing.assert_close(together, torch.cat(parts))
    torch.testing.assert_close(log_N, torch.cat([log_N for _, _, log_N in alone]))


@torch.no_grad()
def test_laws_are_those_before_the_taught_piece_without_forbidden_pieces():
    trainer = new_trainer()
    lesson = Lesson(0, (1, 2, 3), (Teaching(2, 0, (4, 5), (0.5, 0.5), (0.5, 0.5), 0.0),), (), (1,))
    student, _, log_N = trainer._compare(trainer.served.model, [lesson])
    logits_TD = trainer.served.model(torch.tensor([[1, 2, 3]])).logits[0]
    law_TD = logits_TD[:, :-1].softmax(-1)
    torch.testing.assert_close(student.log_kept_NT.exp()[0], law_TD[1, [4, 5]])
    torch.testing.assert_close(log_N.exp(), law_TD[0, [2]])


def test_many_lessons_are_learned_in_batches_with_the_same_result(monkeypatch):
    lessons = [lesson_of(tuple((number * step) % 7 for number in range(12)), step) for step in range(1, 5)]
    whole, parts = new_trainer(steps=1), new_trainer(steps=1)
    first = whole.update(lessons)
    monkeypatch.setattr("stages.drafter_trainer.MAX_LOGITS", 2 * 12 * VOCABULARY)
    assert [len(batch) for batch in parts._micro_batches(lessons)] == [2, 2]
    second = parts.update(lessons)
    assert (second.positions, second.loss) == (first.positions, pytest.approx(first.loss, rel=1e-5))
    for one, other in zip(weights(whole.served.model), weights(parts.served.model), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_lessons_without_teaching_change_nothing():
    trainer = new_trainer()
    before = weights(trainer.served.model)
    step = trainer.update([Lesson(0, (1, 2), (), (), ())])
    assert (step.loss, step.positions) == (0, 0)
    assert same(weights(trainer.served.model), before)


def test_the_gate_can_measure_greedy_agreement():
    trainer = new_trainer(measure=greedy_agreement)
    trainer.hold_out(LATER)
    step = trainer.update([COUNTING])
    count = sum(teaching.depth == 0 for teaching in LATER.teachings)
    assert step.before * count == pytest.approx(round(step.before * count))


def test_equal_seeds_give_equal_updates():
    first, second = new_trainer(), new_trainer()
    for lesson in (COUNTING, LATER, BACKWARD, COUNTING):
        assert first.update([lesson]) == second.update([lesson])
    assert same(weights(first.served.model), weights(second.served.model))


def _nan_gradient(*laws: Any) -> Tensor:
    """Finite, but its gradient is not: the root of 0 has an infinite slope."""
    return trie_loss(*laws) + (laws[0].log_kept_NT * 0).sum().sqrt()


@pytest.mark.parametrize("held_out", [False, True])
def test_a_gradient_that_is_not_finite_drops_the_update(held_out: bool):
    trainer = new_trainer(_nan_gradient, steps=1)
    if held_out:
        trainer.hold_out(LATER)
    before = weights(trainer.served.model)
    assert not trainer.update([COUNTING]).served
    assert same(weights(trainer.served.model), before)
