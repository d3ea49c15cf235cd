"""Weights in service against the best so far: what is proven worse is withdrawn, what is proven better is kept."""

from dataclasses import replace
from random import Random

import torch
from stored_states import store
from test_drafter_trainer import BACKWARD, COUNTING, LATER, example_of, new_trainer, update

from stages.learn.training.betting import Comparison, Opinion
from stages.learn.training.drafter_trainer import DrafterTrainer

CONTRARY = example_of(COUNTING.pieces, 2, right=-1)  # the same text, of a target that counts backward


def decide(mean: float, spread: float, seed: int, most: int) -> Opinion:
    """Compare until there is a decision, on at most so many prompts."""
    random, comparison = Random(seed), Comparison()
    for _ in range(most):
        opinion = comparison.observe([max(-1.0, min(1.0, random.gauss(mean, spread)))])
        if opinion is not Opinion.OPEN:
            return opinion
    return Opinion.OPEN


def test_weights_that_are_equal_on_average_are_rarely_judged():
    """Two tests, each wrong less often than once in twenty."""
    decided = [decide(0.0, 0.2, seed, 200) for seed in range(200)]
    assert sum(opinion is not Opinion.OPEN for opinion in decided) < 200 / 10


def test_better_and_worse_weights_are_found_on_fifty_prompts():
    assert {decide(0.2, 0.2, seed, 50) for seed in range(30)} == {Opinion.BETTER}
    assert {decide(-0.2, 0.2, seed, 50) for seed in range(30)} == {Opinion.WORSE}


def first_weights(trainer: DrafterTrainer) -> torch.Tensor:
    return trainer.served.trained_weights[0].detach().clone()


def hold_out(trainer: DrafterTrainer, number: int) -> None:
    """Hold out as many new prompts that count upward."""
    for offset in range(number):
        trainer.hold_out(replace(COUNTING, offset=1000 + offset))


def test_a_drafter_that_is_worse_than_loaded_is_withdrawn():
    """It learns to count backward while nothing is held out; then the text counts upward."""
    trainer = new_trainer(gate_window=64, gate_tolerance=1.0)
    loaded = first_weights(trainer)
    for _ in range(12):
        update(trainer, [BACKWARD])
    assert not torch.equal(first_weights(trainer), loaded)
    hold_out(trainer, 64)
    step = update(trainer, [BACKWARD])
    assert (step.served, step.reason) == (True, "withdrawn: the drafter in service was worse than the best so far")
    assert torch.equal(first_weights(trainer), loaded)
    assert update(trainer, [COUNTING]).loss > 0, "training continues with the next update"


def test_a_drafter_that_is_proven_better_is_the_one_to_beat_also_after_a_restart():
    trainer = new_trainer(gate_window=64, gate_tolerance=1.0)
    for _ in range(20):
        update(trainer, [COUNTING, LATER])
    better = first_weights(trainer)
    hold_out(trainer, 64)
    update(trainer, [COUNTING])
    state = store(trainer.state_dict())
    restored = new_trainer(gate_window=64, gate_tolerance=1.0)
    restored.load_state_dict(state)
    for one in (trainer, restored):
        for _ in range(20):
            update(one, [CONTRARY])
        for offset in range(64):
            one.hold_out(replace(COUNTING, offset=2000 + offset))
        assert update(one, [CONTRARY]).reason.startswith("withdrawn")
        assert torch.equal(first_weights(one), better)
