"""Batches of examples: every supervised position is read as if its text were alone."""

from dataclasses import replace

import pytest
import torch
from soft_target_tables import store_tokens

from stages.contract.blocks import TrainingExample
from stages.engine.models.huggingface import new_llama
from stages.engine.models.language_model import LanguageModel
from stages.learn.examples.batches import Batch, ExampleBatcher
from stages.learn.examples.losses import StudentBatch

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def example_of(*pieces: int) -> TrainingExample:
    soft_targets = store_tokens(*((position, {(1,): 0.5}) for position in range(2, len(pieces))))
    return TrainingExample(0, "big", pieces, soft_targets, (), (2,))


LONG, SHORT, MIDDLE = example_of(1, 2, 3, 4, 5, 6, 7), example_of(5, 4, 3), example_of(2, 2, 7, 1)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """Distributions that differ from place to place."""
    model = new_llama(3, vocab_size=12, **SHAPE)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    return LanguageModel(model, "tiny")


def batch_of(model: LanguageModel, examples: list[TrainingExample]) -> tuple[ExampleBatcher, Batch]:
    batcher = ExampleBatcher(model, {"big": range(12)})
    (batch,) = batcher.make_batches(examples)
    return batcher, batch


@torch.no_grad()
@pytest.mark.parametrize("examples", [[LONG], [SHORT, LONG], [LONG, SHORT, MIDDLE]], ids=["one", "two", "three"])
def test_a_supervised_position_is_read_as_in_a_text_of_its_own(model: LanguageModel, examples: list[TrainingExample]):
    batcher, batch = batch_of(model, examples)
    found, ngram_log_M = batcher.compute_distributions(model, batch)
    texts = [one.pieces[:position] for one in batch.examples for position in one.soft_targets.positions]
    want = torch.stack([model.model(torch.tensor([text])).logits[0, -1] for text in texts])
    assert float(want.std()) > 0.1, "otherwise the distributions would show little"
    expected = StudentBatch(want, batch.teacher)
    torch.testing.assert_close(found.log_top_NT, expected.log_top_NT, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.argmax_N, expected.argmax_N)
    firsts = [place for place, text in enumerate(texts) if len(text) == 2]
    likelihoods = want[firsts].log_softmax(-1)[range(len(firsts)), [one.pieces[2] for one in batch.examples]]
    torch.testing.assert_close(ngram_log_M, likelihoods, atol=1e-5, rtol=1e-5)


def test_soft_targets_come_example_by_example_each_where_the_piece_before_it_is_read(model: LanguageModel):
    _, batch = batch_of(model, [MIDDLE, SHORT])
    assert batch.examples == [SHORT, MIDDLE], "the shorter ones first"
    assert batch.rows_N.tolist() == [0, 1, 1]
    assert batch.places_N.tolist() == [1, 1, 2]
    assert batch.teacher.emitted_N.tolist() == [3, 7, 1]
    assert batch.pieces_BT.tolist() == [[5, 4, 3, 0], [2, 2, 7, 1]]


def test_nothing_is_emitted_after_the_end_of_a_text(model: LanguageModel):
    """A last token without pieces has a soft target there."""
    ending = replace(SHORT, soft_targets=store_tokens((3, {(1,): 0.5})))
    _, batch = batch_of(model, [ending, LONG])
    assert batch.teacher.emitted_N[0] == -1
