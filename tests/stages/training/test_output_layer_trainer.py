"""Training the drafter's output layer in closed form: it learns, forgets on request, and touches nothing else."""

from typing import Any

import pytest
import torch
from test_drafter_trainer import ALLOWED, BACKWARD, COUNTING, LATER, SHAPE, VOCABULARY, same, update, weights

from stages.contract.snapshot import SnapshotReader, SnapshotWriter
from stages.examples.losses import expected_acceptance, greedy_agreement, trie_loss
from stages.models.huggingface import new_llama
from stages.models.language_model import LanguageModel
from stages.training.output_layer_trainer import LeastSquaresSums, OutputLayerTrainer, untie_output
from stages.training.update import TrainingConfig


def new_trainer(**changes: Any) -> OutputLayerTrainer:
    settings = {
        "rate": 1e-2, "weight_decay": 0.0, "steps": 2, "clip": 1.0, "replay": 16, "gate_window": 4,
        "gate_tolerance": 0.01, "seed": 0,
    }  # fmt: skip
    measure = changes.pop("measure", expected_acceptance)
    model = new_llama(1, vocab_size=VOCABULARY, tie_word_embeddings=True, **SHAPE)
    untie_output(model)
    training = TrainingConfig(**settings | changes)
    served = LanguageModel(model, "tiny")
    return OutputLayerTrainer(served, "trie", trie_loss, measure, {"one": ALLOWED, "other": ALLOWED}, training)


def test_an_untied_output_layer_has_the_same_weights_of_its_own():
    model = new_llama(1, vocab_size=VOCABULARY, tie_word_embeddings=True, **SHAPE)
    before = model(torch.tensor([[1, 2, 3]])).logits
    assert len(list(model.parameters())) == len(list(new_trainer().served.model.parameters())) - 1
    untie_output(model)
    assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, before)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    own = model.lm_head.weight
    untie_output(model)
    assert model.lm_head.weight is own, "there is nothing left to untie"


def test_the_sums_give_the_ridge_regression_whatever_the_order():
    torch.manual_seed(0)
    hidden_NW, missing_ND = torch.randn(40, 6), torch.randn(40, 5)
    one, other = (LeastSquaresSums(6, 5, torch.device("cpu")) for _ in range(2))
    one.add(hidden_NW, missing_ND)
    for part in (slice(25, 40), slice(0, 25)):
        other.add(hidden_NW[part], missing_ND[part])
    states_WW = (hidden_NW.T @ hidden_NW).double()
    ridge_WW = 0.1 * states_WW.diagonal().mean() * torch.eye(6).double()
    expected_DW = torch.linalg.solve(states_WW + ridge_WW, (hidden_NW.T @ missing_ND).double()).T
    for sums in (one, other):
        torch.testing.assert_close(sums.solve().double(), expected_DW, atol=1e-5, rtol=1e-5)
    one.scale(0.25)
    torch.testing.assert_close(one.solve().double(), expected_DW, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("measure", [expected_acceptance, greedy_agreement])
def test_learning_raises_the_acceptance_of_examples_that_were_held_out(measure):
    trainer = new_trainer(measure=measure)
    trainer.hold_out(LATER)
    steps = [update(trainer, [COUNTING]) for _ in range(6)]
    assert steps[-1].after > steps[0].before + 0.3
    assert all(step.positions >= len(COUNTING.soft_targets) for step in steps)


def test_only_the_output_layer_changes():
    trainer = new_trainer()
    before = {name: weight.detach().clone() for name, weight in trainer.served.model.named_parameters()}
    assert update(trainer, [COUNTING]).served
    after = dict(trainer.served.model.named_parameters())
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"lm_head.weight"}


def test_scores_are_those_of_the_whole_model():
    """Held-out examples are read once; the score under later weights is what reading them again gives."""
    trainer = new_trainer()
    trainer.hold_out(LATER)
    for _ in range(3):
        step = update(trainer, [COUNTING])
    fresh = super(OutputLayerTrainer, trainer)._score(trainer.served, [LATER])
    ((total, positions),) = fresh.values()
    assert step.after == pytest.approx(total / positions, abs=1e-6)


def test_after_a_drift_new_text_counts_more():
    """The same two updates, with and without a drift between them: afterwards the new text is known better."""
    found = []
    for drifts in (False, True):
        trainer = new_trainer()
        for _ in range(4):
            update(trainer, [COUNTING])
        if drifts:
            trainer.respond_to_drift()
        update(trainer, [BACKWARD])
        found.append(trainer.measure_acceptance(None, [BACKWARD]))
    assert found[1] > found[0]


def test_a_restored_trainer_goes_on_to_the_same_weights():
    trainer, again = new_trainer(), new_trainer()
    trainer.hold_out(LATER)
    for _ in range(2):
        update(trainer, [COUNTING])
    writer = SnapshotWriter()
    state = trainer.save(writer)
    reader = SnapshotReader(writer.files(state))
    again.restore(reader.state, reader)
    for one in (trainer, again):
        update(one, [BACKWARD])
    assert same(weights(trainer.served.model), weights(again.served.model))
    assert trainer.version == again.version
