"""Micro-batches of training examples, and the drafter's distributions at their supervised positions.

The output layer dominates the cost of a small drafter, so it is computed at the supervised positions only.

Shapes: B examples, T pieces of the longest, N supervised positions, M pieces of n-grams, S = N + M, D drafter ids,
W hidden width.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from stages.contract.blocks import TrainingExample
from stages.engine.forward_pass.forward import record_hidden
from stages.engine.models.language_model import LanguageModel, StateReader
from stages.learn.examples.losses import StudentBatch, TeacherBatch
from stages.learn.examples.soft_targets import join_tables, tabulate

# Bounds of one micro-batch: pieces times ids (at most 64 MiB of logits in float32), and padding in pieces.
MAX_LOGITS, MAX_PADDING = 1 << 24, 256


@dataclass(frozen=True)
class Batch:
    """Examples that are computed together."""

    examples: Sequence[TrainingExample]  # in the order of their rows
    pieces_BT: Tensor  # the input ids, padded on the right
    teacher: TeacherBatch  # the target's soft targets
    # rows_N, places_N: row and column of the output for each soft target: that of the piece before it
    rows_N: Tensor
    places_N: Tensor
    # rows_M, places_M: the same for the pieces of accepted n-grams
    rows_M: Tensor
    places_M: Tensor
    ngram_M1: Tensor  # those pieces
    forbidden_BD: Tensor  # True for ids that may not be drafted, per example

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Rows and columns of all outputs that are supervised: those of soft targets, then those of n-grams (S,)."""
        return torch.cat([self.rows_N, self.rows_M]), torch.cat([self.places_N, self.places_M])


def sum_by_row(values_N: Tensor, batch: Batch) -> list[float]:
    """Sum the values at the supervised positions of each example."""
    sums_B = values_N.new_zeros(len(batch.examples)).index_add_(0, batch.rows_N, values_N)
    return [float(total) for total in sums_B.tolist()]


class ExampleBatcher:
    """Batches training examples of its targets and computes the drafter's distributions over them.

    Args:
        allowed: per target the pieces that may be drafted; the others are not part of the drafter's distribution there.
    """

    def __init__(self, model: LanguageModel, allowed: Mapping[str, Collection[int]]) -> None:
        self._device, self._width, self._max_length = model.device, model.vocabulary_size, model.max_length
        self._forbidden_D = {target: model.mask_without(pieces) for target, pieces in allowed.items()}

    def make_batches(self, examples: Sequence[TrainingExample]) -> Iterator[Batch]:
        """Group examples of similar length within the bounds of a micro-batch.

        Examples longer than the context and examples without soft targets are left out.
        """
        group: list[TrainingExample] = []
        pieces = 0
        usable = [one for one in examples if one.soft_targets and len(one.pieces) <= self._max_length]
        for example in sorted(usable, key=lambda one: len(one.pieces)):
            length = len(example.pieces)
            read = (len(group) + 1) * length
            if group and (read * self._width > MAX_LOGITS or read - pieces - length > MAX_PADDING):
                yield self._make_batch(group)
                group, pieces = [], 0
            group.append(example)
            pieces += length
        if group:
            yield self._make_batch(group)

    def _make_batch(self, examples: Sequence[TrainingExample]) -> Batch:
        longest = max(len(example.pieces) for example in examples)
        pieces_BT = self._pad([example.pieces for example in examples], longest)
        next_BT = self._pad([(*example.pieces[1:], -1) for example in examples], longest)
        tables = [tabulate(example.soft_targets) for example in examples if example.soft_targets]  # all have them
        rows = np.repeat(np.arange(len(tables)), [len(table.rest_N) for table in tables])
        table = join_tables(tables)
        rows_N = torch.from_numpy(rows).to(self._device)
        places_N = torch.from_numpy(table.positions_N - 1).to(self._device)
        spots = [(row, position) for row, example in enumerate(examples) for position in example.ngram_positions]
        rows_M, positions_M = torch.tensor(spots, dtype=torch.long, device=self._device).reshape(-1, 2).T
        return Batch(
            examples,
            pieces_BT,
            TeacherBatch.from_table(table, next_BT[rows_N, places_N]),
            rows_N,
            places_N,
            rows_M,
            positions_M - 1,
            pieces_BT[rows_M, positions_M][:, None],
            torch.stack([self._forbidden_D[example.target] for example in examples]),
        )

    def _pad(self, texts: Sequence[Sequence[int]], length: int) -> Tensor:
        """Pad on the right: attention is causal, so no supervised position attends to the padding."""
        return torch.tensor([[*text, *[0] * (length - len(text))] for text in texts], device=self._device)

    def compute_distributions(self, model: LanguageModel, batch: Batch) -> tuple[StudentBatch, Tensor]:
        """Compute the model's distributions at every supervised position, and the log-likelihood of the n-grams' pieces
        (M,).
        """
        with _restrict_output(model.model.get_output_embeddings(), *batch.places):
            logits_SD = model.read(batch.pieces_BT)
        return self._divide(logits_SD, batch)

    def read_distributions(
        self, model: LanguageModel, batch: Batch, read: StateReader | None
    ) -> tuple[Tensor, StudentBatch, Tensor]:
        """Compute the hidden states at every supervised position (N, W), and what `compute_distributions` does, without
        gradients. None: the model's modules read.
        """
        output, (rows_S, places_S) = model.model.get_output_embeddings(), batch.places
        if read is None:
            with record_hidden(model.model) as recorded:
                found = self.compute_distributions(model, batch)
            return recorded[0][batch.rows_N, batch.places_N].float(), *found
        texts = [example.pieces for example in batch.examples]
        begins_B = torch.tensor([0, *accumulate(map(len, texts))])
        states_SW = torch.cat([read(text) for text in texts])[begins_B[rows_S] + places_S]
        return states_SW[: len(batch.rows_N)], *self._divide(output(states_SW), batch)

    def _divide(self, logits_SD: Tensor, batch: Batch) -> tuple[StudentBatch, Tensor]:
        """Return what `compute_distributions` does, of the logits at the positions and those of n-grams."""
        logits_SD = logits_SD.masked_fill(batch.forbidden_BD[batch.places[0]], -torch.inf)
        count = len(batch.rows_N)
        student = StudentBatch(logits_SD[:count], batch.teacher)
        return student, logits_SD[count:].log_softmax(-1).gather(1, batch.ngram_M1)[:, 0]


@contextmanager
def _restrict_output(output: nn.Module, rows: Tensor, places: Tensor) -> Iterator[None]:
    """Restrict an output layer to S positions of its input (B, T, W), so that it returns (S, D)."""
    hook = output.register_forward_pre_hook(lambda layer, inputs: (inputs[0][rows, places],))
    try:
        yield
    finally:
        hook.remove()
