"""Packed examples: every supervised position is read as if its text were alone."""

from collections.abc import Iterable

import pytest
import torch
from soft_target_tables import compute_all, read_table, store_tokens
from torch import Tensor

from stages.contract.blocks import OffPolicySpan, TopTokens, TrainingExample
from stages.engine.models.huggingface import new_llama
from stages.engine.models.language_model import LanguageModel
from stages.learn.examples.batches import PackedBatch, pack

CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def soft_targets_at(positions: Iterable[int]) -> TopTokens:
    return store_tokens(*((position, {(1,): 0.5}) for position in positions))


def branch(start: int, *pieces: int) -> OffPolicySpan:
    """A span with a soft target after each of its pieces, the last one included."""
    return OffPolicySpan(start, pieces, soft_targets_at(range(start + 1, start + len(pieces) + 1)))


def example_of(pieces: tuple[int, ...], *branches: OffPolicySpan) -> TrainingExample:
    return TrainingExample(0, "big", pieces, soft_targets_at(range(2, len(pieces))), (), (), 0, branches)


LONG = example_of((1, 2, 3, 4, 5, 6, 7), branch(3, 9, 8), branch(3, 8), branch(5, 2, 2, 11), branch(7, 4, 4))
SHORT = example_of((5, 4, 3))
MIDDLE = example_of((2, 2, 7, 1), branch(2, 10, 3))


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """Distributions that differ from place to place."""
    model = new_llama(3, vocab_size=12, **SHAPE)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    return LanguageModel(model, "tiny")


@torch.no_grad()
def read(model: LanguageModel, packed: PackedBatch) -> Tensor:
    logits_BTV = model.read(packed.pieces_BT, packed.positions_BT, packed.mask_B1TT)
    return logits_BTV[packed.rows_N, packed.places_N]


@torch.no_grad()
def alone(model: LanguageModel, pieces: tuple[int, ...]) -> Tensor:
    """Logits after the whole of a text."""
    return model.model(torch.tensor([pieces])).logits[0, -1]


def read_alone(model: LanguageModel, examples: list[TrainingExample]) -> Tensor:
    """Logits of every supervised position, each read as a text of its own."""
    texts = []
    for example in examples:
        texts += [example.pieces[:position] for position in example.soft_targets.positions]
        for one in example.branches:
            whole = (*example.pieces[: one.start], *one.pieces)
            texts += [whole[:position] for position in one.soft_targets.positions]
    return torch.stack([alone(model, text) for text in texts])


@pytest.mark.parametrize(
    "examples",
    [[LONG], [SHORT], [SHORT, LONG], [LONG, SHORT, MIDDLE], [SHORT, SHORT]],
    ids=["branches", "a text", "both", "three", "texts"],
)
def test_a_branch_is_read_as_a_part_of_its_text_that_sees_no_other(
    model: LanguageModel, examples: list[TrainingExample]
):
    packed = pack(examples, CPU)
    found, want = read(model, packed), read_alone(model, examples)
    assert len(packed.soft_targets.rest_N) == len(want)
    assert float(want.std()) > 0.1, "otherwise the distributions would show little"
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_soft_targets_come_example_by_example_and_branches_after_their_text():
    packed = pack([MIDDLE, SHORT], CPU)
    assert read_table(packed.soft_targets) == (
        *compute_all(MIDDLE.soft_targets),
        *compute_all(MIDDLE.branches[0].soft_targets),
        *compute_all(SHORT.soft_targets),
    )
    assert packed.rows_N.tolist() == [0, 0, 0, 0, 1]
    assert packed.places_N.tolist() == [1, 2, 4, 5, 1]
    assert packed.emitted_N.tolist() == [7, 1, 3, -1, 3], "what follows in the text, or in the branch; -1 at its end"
    assert packed.pieces_BT.tolist() == [[2, 2, 7, 1, 10, 3], [5, 4, 3, 0, 0, 0]]
    assert packed.positions_BT.tolist() == [[0, 1, 2, 3, 2, 3], [0, 1, 2, 0, 0, 0]]
