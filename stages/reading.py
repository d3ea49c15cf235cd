"""Lessons as a drafter reads them: in micro-batches, with its laws where the target taught and nowhere else.

The output layer is most of a small drafter's work, so it is computed at those places only.

Shapes: B lessons, T pieces of the longest with its branches, N taught positions, M pieces of n-grams, D drafter ids,
W hidden width.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stages.blocks import Lesson
from stages.language_model import LanguageModel
from stages.losses import Student, Taught
from stages.packing import Packed, length_of, pack

# Bounds of one micro-batch: pieces times ids, at most 64 MiB of logits in float32; and padding, in pieces.
MAX_LOGITS, MAX_PADDING = 1 << 24, 256


@dataclass(frozen=True)
class Batch:
    """Lessons that are read together.

    Attributes:
        lessons: in the order of their rows.
        packed: what is read.
        taught: what the target said, at the first N of the places.
        rows, places: where the output is wanted: N taught places, then the M before pieces of accepted n-grams.
        ngram_M1: those pieces.
        forbidden_BD: what may not be drafted, by lesson.
    """

    lessons: Sequence[Lesson]
    packed: Packed
    taught: Taught
    rows: Tensor
    places: Tensor
    ngram_M1: Tensor
    forbidden_BD: Tensor


class Reader:
    """Reads lessons of any of its targets.

    Args:
        model: a drafter of the kind that will read; for sizes.
        allowed: per target the pieces that may be drafted; the others are not part of the drafter's law there.
    """

    def __init__(self, model: LanguageModel, allowed: Mapping[str, Collection[int]]) -> None:
        self._device, self._width, self._max_length = model.device, model.vocabulary_size, model.max_length
        self._forbidden_D = {target: model.mask_without(pieces) for target, pieces in allowed.items()}

    def batches(self, lessons: Sequence[Lesson], *, branches: bool = True) -> Iterator[Batch]:
        """Lessons of similar length together, within the bounds; no text beyond the context, none without teaching.

        Without `branches` their texts alone are read.
        """
        group: list[Lesson] = []
        pieces = 0
        usable = [one for one in lessons if one.teachings and len(one.pieces) <= self._max_length]
        for lesson in sorted(usable, key=length_of):
            length = length_of(lesson)
            read = (len(group) + 1) * length
            if group and (read * self._width > MAX_LOGITS or read - pieces - length > MAX_PADDING):
                yield self._batch(group, branches=branches)
                group, pieces = [], 0
            group.append(lesson)
            pieces += length
        if group:
            yield self._batch(group, branches=branches)

    def _batch(self, lessons: Sequence[Lesson], *, branches: bool) -> Batch:
        packed = pack(lessons, self._device, branches=branches)
        spots = [(row, position) for row, lesson in enumerate(lessons) for position in lesson.ngram_positions]
        rows_M, positions_M = torch.tensor(spots, dtype=torch.long, device=self._device).reshape(-1, 2).T
        return Batch(
            lessons,
            packed,
            Taught.of(packed.teachings, packed.emitted_N),
            torch.cat([packed.rows_N, rows_M]),
            torch.cat([packed.places_N, positions_M - 1]),
            packed.pieces_BT[rows_M, positions_M][:, None],
            torch.stack([self._forbidden_D[lesson.target] for lesson in lessons]),
        )

    def laws(self, model: LanguageModel, batch: Batch) -> tuple[Student, Tensor]:
        """The model's laws at every taught position, and the log-likelihood of n-grams' pieces (M,)."""
        packed, count = batch.packed, len(batch.taught.rest_N)
        with _only_at(model.model.get_output_embeddings(), batch.rows, batch.places):
            logits_SD = model.read(packed.pieces_BT, packed.positions_BT, packed.mask_B1TT)
        logits_SD = logits_SD.masked_fill(batch.forbidden_BD[batch.rows], -torch.inf)
        student = Student.of(logits_SD[:count], batch.taught)
        return student, logits_SD[count:].log_softmax(-1).gather(1, batch.ngram_M1)[:, 0]


@contextmanager
def _only_at(output: nn.Module, rows: Tensor, places: Tensor) -> Iterator[None]:
    """Let an output layer read S places of its input (B, T, W) only, so that it gives (S, D)."""
    hook = output.register_forward_pre_hook(lambda layer, inputs: (inputs[0][rows, places],))
    try:
        yield
    finally:
        hook.remove()
