"""Micro-batches of training examples, and the drafter's distributions at their supervised positions.

A branch is read as part of the text at the position where it begins: its pieces get the positions that they would have
had there, and attend to the text before that position and to each other only. So the prefix of a text is computed once.
The output layer dominates the cost of a small drafter, so it is computed at the supervised positions only.

Shapes: B examples, T pieces of the longest with its branches, N supervised positions, M pieces of n-grams,
S = N + M, D drafter ids, W hidden width.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from stages.contract.blocks import Numbers, OffPolicySpan, TrainingExample
from stages.engine.models.language_model import LanguageModel
from stages.learn.examples.losses import StudentBatch, TeacherBatch
from stages.learn.examples.soft_targets import SoftTargetTable, join_tables, tabulate

# Bounds of one micro-batch: pieces times ids (at most 64 MiB of logits in float32), and padding in pieces.
MAX_LOGITS, MAX_PADDING = 1 << 24, 256


@dataclass(frozen=True)
class PackedBatch:
    """The tensors of one training batch."""

    # pieces_BT, positions_BT: input ids and their positions
    pieces_BT: Tensor
    positions_BT: Tensor
    mask_B1TT: Tensor | None  # True where the first index attends to the second; None for causal texts without branches
    # those of all examples in order; those of an example's branches follow those of its text
    soft_targets: SoftTargetTable
    # rows_N, places_N: row and column of the output for each soft target
    rows_N: Tensor
    places_N: Tensor
    emitted_N: Tensor  # the next piece of the text there; -1 after the last


def count_pieces(example: TrainingExample) -> int:
    """Count the pieces of an example, branches included."""
    return len(example.pieces) + sum(len(branch.pieces) for branch in example.branches)


def pack(examples: Sequence[TrainingExample], device: torch.device, *, branches: bool = True) -> PackedBatch:
    """Pack examples into one batch, padded on the right; with `branches` false, only their texts."""
    taken = [example.branches if branches else () for example in examples]
    # Per example its texts, each with the position of its first piece.
    texts = [
        [(0, example.pieces), *((branch.start, branch.pieces) for branch in own)]
        for example, own in zip(examples, taken, strict=True)
    ]
    longest = max(sum(len(text) for _, text in row) for row in texts)
    pieces = [_pad([piece for _, text in row for piece in text], longest) for row in texts]
    next_pieces = [_pad([piece for _, text in row for piece in (*text[1:], -1)], longest) for row in texts]
    positions = [
        _pad([position for start, text in row for position in range(start, start + len(text))], longest)
        for row in texts
    ]
    tables = [_tabulate_texts(example, own) for example, own in zip(examples, taken, strict=True)]
    counts = [sum(len(table.rest_N) for table, _ in of_row) for of_row in tables]
    rows_N = torch.from_numpy(np.repeat(np.arange(len(examples)), counts)).to(device)
    places_N = torch.from_numpy(np.concatenate([places for of_row in tables for _, places in of_row])).to(device)
    # Attention is causal: no supervised position attends to the padding on the right.
    return PackedBatch(
        torch.tensor(pieces, device=device),
        torch.tensor(positions, device=device),
        _make_mask(examples, taken, longest).to(device) if any(taken) else None,
        join_tables([table for of_row in tables for table, _ in of_row]),
        rows_N,
        places_N,
        torch.tensor(next_pieces, device=device)[rows_N, places_N],
    )


def _pad(values: Sequence[int], length: int) -> list[int]:
    return [*values, *[0] * (length - len(values))]


def _tabulate_texts(
    example: TrainingExample, branches: Sequence[OffPolicySpan]
) -> list[tuple[SoftTargetTable, Numbers]]:
    """Return the soft targets of the text and of each branch, each with the column of the output that predicts it: that
    of the piece before it.
    """
    assert example.soft_targets  # those without are left out
    table = tabulate(example.soft_targets)
    found, begin = [(table, table.positions_N - 1)], len(example.pieces)
    for branch in branches:
        table = tabulate(branch.soft_targets)
        found.append((table, begin + table.positions_N - branch.start - 1))
        begin += len(branch.pieces)
    return found


def _make_mask(examples: Sequence[TrainingExample], taken: Sequence[Sequence[OffPolicySpan]], longest: int) -> Tensor:
    mask_BTT = torch.ones(len(examples), longest, longest, dtype=torch.bool).tril()
    for seen_TT, example, branches in zip(mask_BTT, examples, taken, strict=True):
        begin = len(example.pieces)
        for branch in branches:
            seen_TT[begin : begin + len(branch.pieces), branch.start : begin] = False
            begin += len(branch.pieces)
    return mask_BTT[:, None]


@dataclass(frozen=True)
class Batch:
    """Examples that are computed together."""

    examples: Sequence[TrainingExample]  # in the order of their rows
    packed: PackedBatch  # the input
    teacher: TeacherBatch  # the target's soft targets, at the first N of the places
    # rows, places: row and column of every output to compute: N supervised positions, then the M before pieces of
    # accepted n-grams
    rows: Tensor
    places: Tensor
    ngram_M1: Tensor  # those pieces
    forbidden_BD: Tensor  # True for ids that may not be drafted, per example


def sum_by_row(values_N: Tensor, batch: Batch) -> list[float]:
    """Sum the values at the supervised positions of each example."""
    sums_B = values_N.new_zeros(len(batch.examples)).index_add_(0, batch.packed.rows_N, values_N)
    return [float(total) for total in sums_B.tolist()]


class ExampleBatcher:
    """Batches training examples of its targets and computes the drafter's distributions over them.

    Args:
        allowed: per target the pieces that may be drafted; the others are not part of the drafter's distribution there.
    """

    def __init__(self, model: LanguageModel, allowed: Mapping[str, Collection[int]]) -> None:
        self._device, self._width, self._max_length = model.device, model.vocabulary_size, model.max_length
        self._reads_branches = model.attends_anywhere
        self._forbidden_D = {target: model.mask_without(pieces) for target, pieces in allowed.items()}

    def make_batches(self, examples: Sequence[TrainingExample], *, branches: bool = True) -> Iterator[Batch]:
        """Group examples of similar length within the bounds of a micro-batch.

        Examples longer than the context and examples without soft targets are left out. With `branches` false, the
        texts are read without their branches, as for models that read texts in order only.
        """
        branches = branches and self._reads_branches
        group: list[TrainingExample] = []
        pieces = 0
        usable = [one for one in examples if one.soft_targets and len(one.pieces) <= self._max_length]
        for example in sorted(usable, key=count_pieces):
            length = count_pieces(example)
            read = (len(group) + 1) * length
            if group and (read * self._width > MAX_LOGITS or read - pieces - length > MAX_PADDING):
                yield self._make_batch(group, branches=branches)
                group, pieces = [], 0
            group.append(example)
            pieces += length
        if group:
            yield self._make_batch(group, branches=branches)

    def _make_batch(self, examples: Sequence[TrainingExample], *, branches: bool) -> Batch:
        packed = pack(examples, self._device, branches=branches)
        spots = [(row, position) for row, example in enumerate(examples) for position in example.ngram_positions]
        rows_M, positions_M = torch.tensor(spots, dtype=torch.long, device=self._device).reshape(-1, 2).T
        return Batch(
            examples,
            packed,
            TeacherBatch.from_table(packed.soft_targets, packed.emitted_N),
            torch.cat([packed.rows_N, rows_M]),
            torch.cat([packed.places_N, positions_M - 1]),
            packed.pieces_BT[rows_M, positions_M][:, None],
            torch.stack([self._forbidden_D[example.target] for example in examples]),
        )

    def compute_distributions(self, model: LanguageModel, batch: Batch) -> tuple[StudentBatch, Tensor]:
        """Compute the model's distributions at every supervised position, and the log-likelihood of the n-grams' pieces
        (M,).
        """
        packed, count = batch.packed, len(batch.teacher.rest_N)
        with _restrict_output(model.model.get_output_embeddings(), batch.rows, batch.places):
            logits_SD = model.read(packed.pieces_BT, packed.positions_BT, packed.mask_B1TT)
        logits_SD = logits_SD.masked_fill(batch.forbidden_BD[batch.rows], -torch.inf)
        student = StudentBatch.from_logits(logits_SD[:count], batch.teacher)
        return student, logits_SD[count:].log_softmax(-1).gather(1, batch.ngram_M1)[:, 0]


@contextmanager
def _restrict_output(output: nn.Module, rows: Tensor, places: Tensor) -> Iterator[None]:
    """Restrict an output layer to S positions of its input (B, T, W), so that it returns (S, D)."""
    hook = output.register_forward_pre_hook(lambda layer, inputs: (inputs[0][rows, places],))
    try:
        yield
    finally:
        hook.remove()
