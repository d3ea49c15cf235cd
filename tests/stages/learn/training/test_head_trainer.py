"""Training the acceptance head: it fits its labels, and a reset gives the first weights again."""

import math

import torch
from torch import Tensor

from stages.contract.blocks import AcceptanceLabel
from stages.drafting.head import EXTRA_FEATURES, AcceptanceHead
from stages.learn.training.head_trainer import LESSON_STEPS, HeadTrainer

WIDTH = 6


def new_trainer(**changes: float) -> HeadTrainer:
    settings = {"seed": 0, "rate": 1e-2, "batch": 64, "buffer": 200} | changes
    return HeadTrainer(AcceptanceHead(WIDTH, 0), **settings)


def labels(count: int, seed: int = 0) -> list[AcceptanceLabel]:
    """Labels whose acceptance depends on the first feature."""
    features_BF = torch.randn(count, WIDTH + EXTRA_FEATURES, generator=torch.Generator().manual_seed(seed))
    return [AcceptanceLabel(features_F, 0.9 if features_F[0] > 0 else 0.2) for features_F in features_BF]


def weights(trainer: HeadTrainer) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trainer.served.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def step(trainer: HeadTrainer) -> float | None:
    """A step on the labels at hand, which as many new ones of the same kind make due."""
    trainer.observe(labels(32, seed=2))
    return trainer.update()


def test_every_step_waits_for_new_labels():
    trainer = new_trainer()
    trainer.observe(labels(70))
    steps = []
    for _ in range(8):
        steps.append(trainer.update() is not None)
        trainer.observe(labels(16))
    assert steps == [True, False, True, False, True, False, True, False]


def test_a_head_that_came_trained_makes_its_first_step_early_and_others_rarely():
    head = AcceptanceHead(WIDTH, 0)
    head.came_trained = True
    trainer = HeadTrainer(head, seed=0, rate=1e-2, batch=256, buffer=500)
    for _ in range(2):
        steps = []
        for _ in range(9):
            trainer.observe(labels(32))
            steps.append(trainer.update() is not None)
        assert steps == [True, False, False, False, True, False, False, False, True]
        trainer.reset()


def test_it_waits_for_enough_labels():
    trainer = new_trainer()
    before = weights(trainer)
    trainer.observe(labels(31))
    assert trainer.update() is None
    assert (trainer.version, same(weights(trainer), before)) == (0, True)
    trainer.observe(labels(1))
    assert trainer.update() is not None
    assert (trainer.version, same(weights(trainer), before)) == (1, False)


def test_it_learns_to_separate_likely_pieces_from_unlikely_ones():
    trainer = new_trainer()
    trainer.observe(labels(200))
    losses = [step(trainer) for _ in range(150)]
    assert sum(losses[-10:]) < 0.85 * sum(losses[:10])
    unseen = labels(100, seed=1)
    chances_B = trainer.served(torch.stack([label.features_F for label in unseen])).sigmoid()
    likely = torch.tensor([label.acceptance > 0.5 for label in unseen])
    assert chances_B[likely].mean() > 0.7
    assert chances_B[~likely].mean() < 0.4


def test_a_loss_that_is_not_finite_changes_nothing():
    trainer = new_trainer(batch=40)
    trainer.observe([AcceptanceLabel(torch.full((WIDTH + EXTRA_FEATURES,), math.nan), 0.5)] * 40)
    before = weights(trainer)
    assert trainer.update() is None
    assert (trainer.version, same(weights(trainer), before)) == (0, True)


def test_a_reset_gives_the_first_weights_without_labels_or_momentum():
    trainer, fresh = new_trainer(), new_trainer()
    first = weights(trainer)
    trainer.observe(labels(100))
    for _ in range(5):
        step(trainer)
    trainer.reset()
    assert same(weights(trainer), first)
    assert trainer.version == 6
    trainer.observe(labels(31))
    assert trainer.update() is None, "its labels are gone"
    trainer.reset()
    for each in (trainer, fresh):
        each.observe(labels(40, seed=3))
        assert each.update() is not None
    small = {name: weight for name, weight in weights(trainer).items() if name.startswith("norm")}
    assert all(torch.allclose(small[name], weights(fresh)[name], atol=2.1e-2) for name in small)


def test_the_labels_of_an_update_are_studied_at_once_and_at_a_rate_of_their_own():
    """A trained head's usual rate would hardly change it."""
    losses = []
    for _ in range(2):
        trainer = new_trainer(rate=1e-6)
        losses.append([trainer.study(labels(64, seed)) for seed in range(12)])
    assert losses[0] == losses[1]
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert trainer.version == 12 * LESSON_STEPS
    before = weights(trainer)
    step(trainer)
    assert max(float((new - before[name]).abs().max()) for name, new in weights(trainer).items()) < 1e-4
