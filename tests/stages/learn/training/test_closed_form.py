"""Training the drafter's output layer in closed form: it learns, forgets on request, and touches nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from soft_target_tables import store_tokens
from stored_states import store
from test_drafter_trainer import ALLOWED, BACKWARD, COUNTING, LATER, SHAPE, VOCABULARY, same, update, weights

from stages.contract.blocks import EXTRA_FEATURES, TrainingExample
from stages.contract.snapshot import Snapshot, read_snapshot
from stages.drafting.target_states import SIZE, TargetStates
from stages.engine.models.huggingface import new_llama
from stages.engine.models.language_model import LanguageModel
from stages.learn.examples.losses import expected_acceptance, greedy_agreement, trie_loss
from stages.learn.training.closed_form import SUMS_FILE, OutputLayerTrainer, untie_output
from stages.learn.training.least_squares_sums import SMALLEST, Change, LeastSquaresSums
from stages.learn.training.update import TrainingConfig
from store.errors import CorruptError


def new_trainer(**changes: Any) -> OutputLayerTrainer:
    settings = {
        "rate": 1e-2, "weight_decay": 0.0, "steps": 2, "clip": 1.0, "replay": 16, "gate_window": 4,
        "gate_tolerance": 0.01, "seed": 0,
    }  # fmt: skip
    measure, reads_states = changes.pop("measure", expected_acceptance), changes.pop("reads_states", True)
    usual = changes.pop("usual", tuple)
    model = new_llama(1, vocab_size=VOCABULARY, tie_word_embeddings=True, **SHAPE)
    untie_output(model)
    training = TrainingConfig(**settings | changes)
    served = LanguageModel(model, "tiny")
    if reads_states:
        served.extra = TargetStates(["one", "other"], VOCABULARY, served.device)
    allowed = {"one": ALLOWED, "other": ALLOWED}
    return OutputLayerTrainer(served, "trie", trie_loss, measure, allowed, training, usual=usual)


def whole(change: Change, outputs: int) -> torch.Tensor:
    """The change as a layer."""
    return change.add_to_rows(torch.zeros(outputs, change.weights_CW.shape[1]), 1.0).double()


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
    kept_ND = missing_ND - missing_ND.clamp(-SMALLEST, SMALLEST)
    expected_DW = torch.linalg.solve(states_WW + ridge_WW, (hidden_NW.T @ kept_ND).double()).T
    for sums in (one, other):
        torch.testing.assert_close(whole(sums.solve(), 5), expected_DW, atol=1e-5, rtol=1e-5)
    one.scale(0.25)
    torch.testing.assert_close(whole(one.solve(), 5), expected_DW, atol=1e-5, rtol=1e-5)


def test_pieces_that_lack_hardly_anything_have_no_row():
    sums = LeastSquaresSums(2, 3, torch.device("cpu"))
    sums.add(torch.eye(2), torch.tensor([[0.5, SMALLEST / 2, 0.0], [0.0, -SMALLEST / 2, -0.3]]))
    assert sums.solve().pieces_C.tolist() == [0, 2]
    assert not sums.products_WD[:, 1].any()


@pytest.mark.parametrize("measure", [expected_acceptance, greedy_agreement])
def test_learning_raises_the_acceptance_of_examples_that_were_held_out(measure):
    trainer = new_trainer(measure=measure)
    trainer.hold_out(LATER)
    steps = [update(trainer, [COUNTING]) for _ in range(6)]
    assert steps[-1].after > steps[0].before + 0.3
    assert all(step.positions >= COUNTING.supervised_tokens for step in steps)


def test_what_is_known_already_is_not_corrected():
    """Half of the first examples measure what the others teach; a gain of no token keeps the drafter as loaded."""
    trainer = new_trainer(measure=greedy_agreement)
    learned = [replace(COUNTING, offset=offset) for offset in range(4)]
    assert update(trainer, learned).served, "it gains"
    known = new_trainer(measure=lambda student, teacher: torch.ones(len(teacher.rest_N)))
    step = update(known, learned)
    assert (step.served, step.reason, known.version) == (False, "it changes nothing", 0)


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


def test_a_restored_trainer_continues_to_the_same_weights():
    trainer, again = new_trainer(), new_trainer()
    trainer.hold_out(LATER)
    for _ in range(2):
        update(trainer, [COUNTING])
    state = trainer.state_dict()
    state = store(state)
    again.load_state_dict(state)
    for one in (trainer, again):
        update(one, [BACKWARD])
    assert same(weights(trainer.served.model), weights(again.served.model))
    assert trainer.version == again.version


def with_states(example: TrainingExample, seed: int) -> TrainingExample:
    """The same text in random order of its tokens; the target's state at a token encodes the next but one."""
    numbers = np.random.default_rng(seed)
    pieces = tuple(numbers.integers(0, 7, len(example.pieces)).tolist())
    soft_targets = store_tokens(*((place, {(pieces[place],): 1.0}) for place in range(1, len(pieces))))
    states = np.zeros((len(pieces) - 1, SIZE), np.int8)
    states[range(len(pieces) - 2), pieces[2:]] = 64
    return replace(example, pieces=pieces, soft_targets=soft_targets, states=states)


def test_what_the_targets_state_encodes_is_learned_and_scored():
    """The pieces are random, so that nothing but the states predicts them."""
    found = []
    for reads in (True, False):
        trainer = new_trainer(measure=greedy_agreement, reads_states=reads)
        trainer.hold_out(with_states(LATER, 1))
        steps = [update(trainer, [with_states(COUNTING, seed)]) for seed in range(2, 8)]
        found.append(steps[-1].after)
    assert found[0] > 0.8
    assert found[1] < 0.5


def test_a_forgotten_prompt_leaves_the_weights_of_a_run_that_never_saw_it():
    """Two updates before a drift and one after it; the prompt was in the first."""
    secret = with_states(replace(COUNTING, offset=17), 9)
    others = [with_states(replace(COUNTING, offset=offset), offset) for offset in range(3)]
    trainers = [new_trainer(), new_trainer()]
    for trainer, first in zip(trainers, ([others[0], secret], [others[0]]), strict=True):
        update(trainer, first)
        update(trainer, [others[1]])
        trainer.respond_to_drift()
        update(trainer, [others[2]])
    forgetful, ignorant = trainers
    before = max_difference(forgetful, ignorant)
    assert secret in forgetful.examples
    forgetful.forget(lambda example: example.offset == 17)
    assert secret not in forgetful.examples
    assert forgetful._strength == ignorant._strength
    assert before > 1e-2
    assert max_difference(forgetful, ignorant) < 1e-6
    version = forgetful.version
    forgetful.forget(lambda example: example.offset == 17)
    assert forgetful.version == version, "it is not there any more"


def max_difference(one: OutputLayerTrainer, other: OutputLayerTrainer) -> float:
    pairs = zip(one.served.trained_weights, other.served.trained_weights, strict=True)
    return max(float((left - right).detach().abs().max()) for left, right in pairs)


def test_a_trainer_that_forgot_everything_serves_the_drafter_as_loaded():
    trainer, loaded = new_trainer(), new_trainer()
    for offset in range(3):
        update(trainer, [with_states(replace(COUNTING, offset=offset), offset)])
    assert max_difference(trainer, loaded) > 1e-2
    for offset in range(3):
        trainer.forget(lambda example, offset=offset: example.offset == offset)
    assert max_difference(trainer, loaded) == 0


def test_merged_sums_are_those_of_one_trainer_that_saw_everything():
    examples = [with_states(replace(COUNTING, offset=offset), offset) for offset in range(4)]
    left, right, both = (new_trainer() for _ in range(3))
    for trainer, own in ((left, examples[:2]), (right, examples[2:]), (both, examples)):
        update(trainer, own)
    left.merge(right._sums)
    torch.testing.assert_close(
        whole(left._sums.solve(), VOCABULARY), whole(both._sums.solve(), VOCABULARY), atol=1e-6, rtol=0
    )


def test_the_sums_of_a_version_come_back_bit_for_bit(tmp_path: Path):
    """Holds after other text was learned; the next update gives the weights of an uninterrupted run."""
    trainer, stayed = new_trainer(), new_trainer()
    for one in (trainer, stayed):
        for _ in range(2):
            update(one, [COUNTING])
    trainer.write_sums(tmp_path)
    kept = [tensor.clone() for tensor in (trainer._sums.states_WW, trainer._sums.products_WD)]
    served = [weight.detach().clone() for weight in trainer.served.trained_weights]
    trainer.respond_to_drift()
    update(trainer, [BACKWARD])
    assert not torch.equal(trainer._sums.products_WD, kept[1])
    trainer.adopt(served)
    trainer.read_sums(tmp_path)
    assert torch.equal(trainer._sums.states_WW, kept[0])
    assert torch.equal(trainer._sums.products_WD, kept[1])
    stayed.adopt(served)
    for one in (trainer, stayed):
        update(one, [LATER])
    assert same(weights(trainer.served.model), weights(stayed.served.model))


def test_prompts_can_be_forgotten_after_the_sums_came_back(tmp_path: Path):
    """One that the sums hold is taken out of them; one that was learned since is not in them."""
    trainer, never = new_trainer(), new_trainer()
    first, second = replace(COUNTING, offset=1), replace(LATER, offset=2)
    update(trainer, [first])
    update(trainer, [second])
    trainer.write_sums(tmp_path)
    since = replace(BACKWARD, offset=3)
    update(trainer, [since])
    trainer.read_sums(tmp_path)
    trainer.forget(lambda example: example.offset == 3)
    update(never, [second])
    trainer.forget(lambda example: example.offset == 1)
    torch.testing.assert_close(trainer._sums.states_WW, never._sums.states_WW, atol=1e-6, rtol=0)
    torch.testing.assert_close(trainer._sums.products_WD, never._sums.products_WD, atol=1e-6, rtol=0)


def test_a_version_without_sums_changes_nothing_and_a_damaged_one_is_refused(tmp_path: Path):
    trainer = new_trainer()
    update(trainer, [COUNTING])
    before = trainer._sums.products_WD.clone()
    trainer.read_sums(tmp_path)
    assert torch.equal(trainer._sums.products_WD, before)
    (tmp_path / SUMS_FILE).write_bytes(b"no tensors")
    with pytest.raises(CorruptError, match="must hold the sums of a version"):
        trainer.read_sums(tmp_path)
    assert torch.equal(trainer._sums.products_WD, before)


@torch.no_grad()
def test_usual_texts_keep_what_the_drafter_knew_elsewhere():
    """With usual texts the logits of one of them change less, next to those of what was learned."""
    usual, shares = COUNTING.pieces[::-1], []
    for texts in ((), (usual,)):
        trainer = new_trainer(reads_states=False, usual=lambda texts=texts: texts)
        before = [trainer.served.read(torch.tensor([pieces])) for pieces in (usual, COUNTING.pieces)]
        update(trainer, [COUNTING])
        after = [trainer.served.read(torch.tensor([pieces])) for pieces in (usual, COUNTING.pieces)]
        there, here = (float((new - old).norm()) for new, old in zip(after, before, strict=True))
        assert here > 0
        shares.append(there / here)
    assert shares[1] < 0.7 * shares[0]


def test_an_update_shows_the_head_the_acceptance_at_every_token():
    """Of the drafter before it has learned the example, as the gate measures it, with the features of its likeliest
    piece there."""
    trainer = new_trainer(measure=greedy_agreement, reads_states=False)
    fresh = [COUNTING, replace(BACKWARD, target="other")]
    attempt = trainer.attempt(trainer.assign(fresh))
    assert attempt.lessons.keys() == {"one", "other"}
    for example in fresh:
        features_LF, acceptance_L = attempt.lessons[example.target]
        total, tokens = new_trainer(measure=greedy_agreement, reads_states=False)._score(trainer.served, [example])[
            example
        ]
        assert len(features_LF) == len(acceptance_L) == tokens
        assert float(acceptance_L.sum()) == total
        assert features_LF.shape[1] == SHAPE["hidden_size"] + EXTRA_FEATURES
    saved = read_snapshot(Snapshot(trainer.attempt_state(attempt)).files())
    kept = trainer.load_attempt(saved).lessons
    assert all(torch.equal(kept[name][0], features_LF) for name, (features_LF, _) in attempt.lessons.items())
