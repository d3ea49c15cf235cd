"""Lessons side by side as one input of the drafter: texts, and behind each text its branches.

A branch is read as if it stood in the text where it begins: its pieces have the positions that they would have had
there, and see the text before that place and each other, nothing else. So a text's prefix is computed once.

Shapes: B lessons, T pieces of the longest with its branches, N taught places.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.blocks import Branch, Lesson, Teaching


@dataclass(frozen=True)
class Packed:
    """One input.

    Attributes:
        pieces_BT, positions_BT: what is read and where it stands.
        mask_B1TT: True where the second place is seen from the first; None for plain causal texts.
        teachings: of all lessons in order, each lesson's branches behind its text.
        rows_N, places_N: where the model's output for each teaching is.
        emitted_N: the piece that follows there, which the output should have foretold; -1 behind the last.
    """

    pieces_BT: Tensor
    positions_BT: Tensor
    mask_B1TT: Tensor | None
    teachings: tuple[Teaching, ...]
    rows_N: Tensor
    places_N: Tensor
    emitted_N: Tensor


def length_of(lesson: Lesson) -> int:
    """Pieces of a lesson with its branches."""
    return len(_all_pieces(lesson, lesson.branches))


def pack(lessons: Sequence[Lesson], device: torch.device, *, branches: bool = True) -> Packed:
    """Put lessons into one input, padded at their ends; without `branches` their texts alone."""
    taken = [lesson.branches if branches else () for lesson in lessons]
    texts = [_all_pieces(lesson, own) for lesson, own in zip(lessons, taken, strict=True)]
    longest = max(map(len, texts))
    pieces = [_padded(text, longest) for text in texts]
    positions = [_padded(_all_positions(lesson, own), longest) for lesson, own in zip(lessons, taken, strict=True)]
    told = [list(_placed(lesson, own)) for lesson, own in zip(lessons, taken, strict=True)]
    rows_N = torch.tensor([row for row, of_row in enumerate(told) for _ in of_row], device=device)
    places_N = torch.tensor([place for of_row in told for _, place in of_row], device=device)
    behind = [_padded(_all_behind(lesson, own), longest) for lesson, own in zip(lessons, taken, strict=True)]
    # Causal attention: what pads the ends is seen by nothing that counts.
    return Packed(
        torch.tensor(pieces, device=device),
        torch.tensor(positions, device=device),
        _mask(lessons, taken, longest).to(device) if any(taken) else None,
        tuple(teaching for of_row in told for teaching, _ in of_row),
        rows_N,
        places_N,
        torch.tensor(behind, device=device)[rows_N, places_N],
    )


def _padded(values: Sequence[int], length: int) -> list[int]:
    return [*values, *[0] * (length - len(values))]


def _all_pieces(lesson: Lesson, branches: Sequence[Branch]) -> list[int]:
    return [*lesson.pieces, *(piece for branch in branches for piece in branch.pieces)]


def _all_behind(lesson: Lesson, branches: Sequence[Branch]) -> list[int]:
    """What follows each piece in its own text; -1 behind the last."""
    texts = (lesson.pieces, *(branch.pieces for branch in branches))
    return [piece for text in texts for piece in (*text[1:], -1)]


def _all_positions(lesson: Lesson, branches: Sequence[Branch]) -> list[int]:
    positions = list(range(len(lesson.pieces)))
    for branch in branches:
        positions += range(branch.start, branch.start + len(branch.pieces))
    return positions


def _placed(lesson: Lesson, branches: Sequence[Branch]) -> list[tuple[Teaching, int]]:
    """Every teaching with the place whose output it is about: the piece before it."""
    found = [(teaching, teaching.position - 1) for teaching in lesson.teachings]
    begin = len(lesson.pieces)
    for branch in branches:
        found += [(teaching, begin + teaching.position - branch.start - 1) for teaching in branch.teachings]
        begin += len(branch.pieces)
    return found


def _mask(lessons: Sequence[Lesson], taken: Sequence[Sequence[Branch]], longest: int) -> Tensor:
    mask_BTT = torch.ones(len(lessons), longest, longest, dtype=torch.bool).tril()
    for seen_TT, lesson, branches in zip(mask_BTT, lessons, taken, strict=True):
        begin = len(lesson.pieces)
        for branch in branches:
            seen_TT[begin : begin + len(branch.pieces), branch.start : begin] = False
            begin += len(branch.pieces)
    return mask_BTT[:, None]
