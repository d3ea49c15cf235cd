"""Packed examples: every supervised position is read as if its text were alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from soft_target_tables import compute_all, read_table
from torch import Tensor

from stages.contract.blocks import OffPolicySpan, SoftTarget, TopTokens, TrainingExample
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


def make_soft_target(position: int, depth: int = 0) -> SoftTarget:
    return SoftTarget(position, depth, (1,), (0.5,), (0.5,), 0.5)


def branch(start: int, *pieces: int) -> OffPolicySpan:
    """A span with a soft target after each of its pieces, the last one included."""
    return OffPolicySpan(start, pieces, tuple(make_soft_target(start + number) for number in range(1, len(pieces) + 1)))


def example_of(pieces: tuple[int, ...], *branches: OffPolicySpan) -> TrainingExample:
    soft_targets = tuple(make_soft_target(position) for position in range(2, len(pieces)))
    return TrainingExample(0, "big", pieces, soft_targets, (), (), 0, branches)


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
        texts += [example.pieces[: soft_target.position] for soft_target in example.soft_targets]
        for one in example.branches:
            whole = (*example.pieces[: one.start], *one.pieces)
            texts += [whole[: soft_target.position] for soft_target in one.soft_targets]
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
        *MIDDLE.soft_targets,
        *MIDDLE.branches[0].soft_targets,
        *SHORT.soft_targets,
    )
    assert packed.rows_N.tolist() == [0, 0, 0, 0, 1]
    assert packed.places_N.tolist() == [1, 2, 4, 5, 1]
    assert packed.emitted_N.tolist() == [7, 1, 3, -1, 3], "what follows in the text, or in the branch; -1 at its end"
    assert packed.pieces_BT.tolist() == [[2, 2, 7, 1, 10, 3], [5, 4, 3, 0, 0, 0]]
    assert packed.positions_BT.tolist() == [[0, 1, 2, 3, 2, 3], [0, 1, 2, 0, 0, 0]]


def test_gradients_flow_to_the_weights_through_branches(model: LanguageModel):
    copied = model.copy_to_train()
    packed = pack([MIDDLE], CPU)
    copied.read(packed.pieces_BT, packed.positions_BT, packed.mask_B1TT)[0, packed.places_N[-1]].sum().backward()
    assert all(weight.grad is not None and torch.isfinite(weight.grad).all() for weight in copied.trained_weights)
    assert all(weight.grad is None for weight in model.trained_weights)


def make_top_tokens(*places: tuple[int, int]) -> TopTokens:
    """Two tokens stored at each position: the one itself, with so many pieces, and one of a single piece."""
    positions, levels = (np.array(column) for column in zip(*places, strict=True))
    lengths = np.stack([levels, np.ones_like(levels)], 1)
    probs = np.tile(np.array([[0.6, 0.3]], np.float32), (len(places), 1))
    pieces = np.concatenate([[*range(1, count + 1), 9] for count in levels])
    return TopTokens(positions, levels, 0 * levels, probs, lengths, pieces)


def test_stored_tokens_are_packed_as_their_soft_targets():
    span = OffPolicySpan(3, (9, 8, 2), (make_top_tokens((4, 2)),))
    pushed_down = OffPolicySpan(3, (9, 8, 2), compute_all(span.soft_targets))
    kept = make_top_tokens((2, 1), (3, 3))
    first = TrainingExample(0, "big", (1, 2, 3, 4, 5, 6), (kept,), (), (), 0, (span,))
    second = replace(first, soft_targets=compute_all((kept,)), branches=(pushed_down,))
    one, other = pack([first, SHORT], CPU), pack([second, SHORT], CPU)
    assert read_table(one.soft_targets) == read_table(other.soft_targets)
    for name in ("rows_N", "places_N", "emitted_N", "pieces_BT"):
        assert torch.equal(getattr(one, name), getattr(other, name))
