"""Lessons side by side: every taught place is read as if its text stood alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stages.blocks import Branch, Lesson, Teaching
from stages.huggingface import new_llama
from stages.language_model import LanguageModel
from stages.packing import Packed, length_of, pack

CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def taught(position: int, depth: int = 0) -> Teaching:
    return Teaching(position, depth, (1,), (0.5,), (0.5,), 0.5)


def branch(start: int, *pieces: int) -> Branch:
    """Taught behind each of its pieces, the last one included."""
    return Branch(start, pieces, tuple(taught(start + number) for number in range(1, len(pieces) + 1)))


def lesson_of(pieces: tuple[int, ...], *branches: Branch) -> Lesson:
    teachings = tuple(taught(position) for position in range(2, len(pieces)))
    return Lesson(0, "big", pieces, teachings, (), (), 0, branches)


LONG = lesson_of((1, 2, 3, 4, 5, 6, 7), branch(3, 9, 8), branch(3, 8), branch(5, 2, 2, 11), branch(7, 4, 4))
SHORT = lesson_of((5, 4, 3))
MIDDLE = lesson_of((2, 2, 7, 1), branch(2, 10, 3))


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """Laws that differ from place to place."""
    model = new_llama(3, vocab_size=12, **SHAPE)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    return LanguageModel(model, "tiny")


@torch.no_grad()
def read(model: LanguageModel, packed: Packed) -> Tensor:
    logits_BTV = model.read(packed.pieces_BT, packed.positions_BT, packed.mask_B1TT)
    return logits_BTV[packed.rows_N, packed.places_N]


@torch.no_grad()
def alone(model: LanguageModel, pieces: tuple[int, ...]) -> Tensor:
    """Logits behind the whole of a text."""
    return model.model(torch.tensor([pieces])).logits[0, -1]


def expected(model: LanguageModel, lessons: list[Lesson]) -> Tensor:
    """Of every taught place, each read as a text of its own."""
    texts = []
    for lesson in lessons:
        texts += [lesson.pieces[: teaching.position] for teaching in lesson.teachings]
        for one in lesson.branches:
            whole = (*lesson.pieces[: one.start], *one.pieces)
            texts += [whole[: teaching.position] for teaching in one.teachings]
    return torch.stack([alone(model, text) for text in texts])


@pytest.mark.parametrize(
    "lessons",
    [[LONG], [SHORT], [SHORT, LONG], [LONG, SHORT, MIDDLE], [SHORT, SHORT]],
    ids=["branches", "a text", "both", "three", "texts"],
)
def test_a_branch_is_read_as_if_it_stood_in_its_text_and_saw_no_other(model: LanguageModel, lessons: list[Lesson]):
    packed = pack(lessons, CPU)
    found, want = read(model, packed), expected(model, lessons)
    assert len(packed.teachings) == len(want)
    assert float(want.std()) > 0.1, "else the laws would say little"
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_teachings_come_lesson_by_lesson_and_branches_behind_their_text():
    packed = pack([MIDDLE, SHORT], CPU)
    assert packed.teachings == (*MIDDLE.teachings, *MIDDLE.branches[0].teachings, *SHORT.teachings)
    assert packed.rows_N.tolist() == [0, 0, 0, 0, 1]
    assert packed.places_N.tolist() == [1, 2, 4, 5, 1]
    assert packed.emitted_N.tolist() == [7, 1, 3, -1, 3], "what follows in the text, or in the branch; -1 at its end"
    assert packed.pieces_BT.tolist() == [[2, 2, 7, 1, 10, 3], [5, 4, 3, 0, 0, 0]]
    assert packed.positions_BT.tolist() == [[0, 1, 2, 3, 2, 3], [0, 1, 2, 0, 0, 0]]


def test_behind_the_last_piece_of_a_text_nothing_follows_whatever_stands_there_in_the_input():
    """A text may end with a token that has no pieces. Behind it there are branches, padding, or nothing."""
    ended = replace(SHORT, teachings=(*SHORT.teachings, taught(3)))
    branched = replace(ended, branches=(branch(1, 9, 8), branch(2, 7)))
    packed = pack([ended, branched], CPU)
    assert packed.emitted_N.tolist() == [3, -1, 3, -1, 8, -1, -1]


def test_texts_alone_need_no_mask_and_have_no_branches(model: LanguageModel):
    packed = pack([LONG, SHORT], CPU, branches=False)
    assert packed.mask_B1TT is None
    assert packed.pieces_BT.shape == (2, 7)
    assert packed.teachings == (*LONG.teachings, *SHORT.teachings)
    bare = [lesson_of(lesson.pieces) for lesson in (LONG, SHORT)]
    torch.testing.assert_close(read(model, packed), expected(model, bare), atol=1e-5, rtol=1e-5)


def test_the_length_is_what_packing_makes_of_a_lesson():
    assert [length_of(lesson) for lesson in (LONG, SHORT, MIDDLE)] == [15, 3, 6]
    assert pack([LONG], CPU).pieces_BT.shape == (1, 15)


def test_gradients_flow_to_the_weights_through_branches(model: LanguageModel):
    copied = model.copy_to_train()
    packed = pack([MIDDLE], CPU)
    copied.read(packed.pieces_BT, packed.positions_BT, packed.mask_B1TT)[0, packed.places_N[-1]].sum().backward()
    assert all(weight.grad is not None and torch.isfinite(weight.grad).all() for weight in copied.learning)
    assert all(weight.grad is None for weight in model.learning)
