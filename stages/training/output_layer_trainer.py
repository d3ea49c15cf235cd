"""Trains the drafter's output layer by least squares on its hidden states; the rest of the drafter stays as loaded.

One pass over an example gives its part of two sums, and from the sums the layer follows in closed form, so an update
costs a fraction of a gradient step and forgets nothing that it was not asked to forget.

Shapes: N supervised positions, W hidden width, D drafter ids, T top pieces.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from stages.contract.blocks import TrainingExample
from stages.contract.snapshot import Saved, SnapshotReader, SnapshotWriter
from stages.examples.batches import Batch
from stages.examples.losses import StudentBatch, TeacherBatch
from stages.models.language_model import LanguageModel
from stages.training.drafter_trainer import DrafterTrainer, RegressionState, TrainerState
from stages.training.update import Assignment, Scores

RIDGE = 0.1  # added to the diagonal of the first sum, as a share of its mean
STRENGTHS = (0.0, 4.0, 8.0, 16.0, 32.0)  # factors of the correction, which is a difference of probabilities, in logits
FIRST_STRENGTH = 8.0  # before any is measured
STRENGTH_DECAY = 0.9  # per update, of the measured acceptance of each strength
DRIFT_DECAY = 0.25  # of the sums, after a drift


class LeastSquaresSums:
    """The sums of a ridge regression from hidden states to what the drafter's probabilities lack.

    Two positions with orthogonal hidden states. At the first, piece 1 lacks half of its probability, and piece 0 has as
    much too many; at the second, nothing is wrong. The solution follows each state, shrunk a little by the ridge:

    >>> sums = LeastSquaresSums(width=2, vocabulary=3, device=torch.device("cpu"))
    >>> hidden_NW = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> sums.add(hidden_NW, missing_ND=torch.tensor([[-0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]))
    >>> correction_DW = sums.solve()
    >>> (hidden_NW @ correction_DW.T).round(decimals=2)
    tensor([[-0.4500,  0.4500,  0.0000],
            [ 0.0000,  0.0000,  0.0000]])

    Attributes:
        states_WW: sum of the outer products of hidden states.
        products_WD: sum of the outer products of hidden states and missing probabilities.
    """

    def __init__(self, width: int, vocabulary: int, device: torch.device) -> None:
        self.states_WW = torch.zeros(width, width, dtype=torch.float64, device=device)
        self.products_WD = torch.zeros(width, vocabulary, device=device)

    def add(self, hidden_NW: Tensor, missing_ND: Tensor) -> None:
        """Add positions: their hidden states, and the target's probabilities less the drafter's."""
        self.states_WW += hidden_NW.double().T @ hidden_NW.double()
        self.products_WD += hidden_NW.T @ missing_ND

    def scale(self, factor: float) -> None:
        """Give all positions so far a smaller weight."""
        self.states_WW *= factor
        self.products_WD *= factor

    def solve(self) -> Tensor:
        """Return the layer (D, W) that gives the missing probabilities; zeros without positions."""
        width, scale = len(self.states_WW), float(self.states_WW.diagonal().mean())
        if not scale:
            return torch.zeros_like(self.products_WD.T)
        ridge_WW = RIDGE * scale * torch.eye(width, dtype=torch.float64, device=self.states_WW.device)
        factor_WW = torch.linalg.cholesky(self.states_WW + ridge_WW)
        return torch.cholesky_solve(self.products_WD.double(), factor_WW).float().T


@dataclass(frozen=True)
class _Places:
    """Positions of texts.

    Attributes:
        hidden_NW: what the output layer reads.
        forbidden_ND: True for ids that may not be drafted.
        teacher: the soft targets.
    """

    hidden_NW: Tensor
    forbidden_ND: Tensor
    teacher: TeacherBatch

    def logits(self, weight_DW: Tensor) -> Tensor:
        """Return the logits of an output layer (N, D)."""
        return (self.hidden_NW @ weight_DW.T).masked_fill_(self.forbidden_ND, -torch.inf)


class OutputLayerTrainer(DrafterTrainer):
    """A trainer whose updates are solutions of a ridge regression. Arguments as for `DrafterTrainer`.

    The correction of the logits is a multiple of the regression's result. How large a multiple is measured on fresh
    examples, before they enter the sums; none at all is among the choices.

    The drafter's output layer must not be tied to its embeddings (`untie_output`).
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        output = _output_layer(self._baseline.model)
        vocabulary, width = output.weight.shape
        self._loaded_DW = output.weight.detach().float()
        self._sums = LeastSquaresSums(width, vocabulary, self._loaded_DW.device)
        self._correction_DW: Tensor | None = None  # the last solution, unless the sums changed since
        self._measured = [0.0] * len(STRENGTHS)  # decayed sums of the measured acceptance
        self._read: dict[TrainingExample, _Places] = {}  # of held-out examples
        self._most_read = 2 * self._training.gate_window * self._gate.targets

    @override
    def assign(self, fresh: Sequence[TrainingExample]) -> Assignment:
        """Select the fresh examples: the sums hold the older ones."""
        return Assignment(tuple(fresh), self._gate.held_out)

    @override
    def add_to_replay(self, example: TrainingExample) -> None:
        """Older examples that no update trains on are left out."""

    @override
    def respond_to_drift(self) -> None:
        """Give the text before a drift less weight."""
        self._sums.scale(DRIFT_DECAY)
        self._correction_DW = None

    @override
    @torch.no_grad()
    def _train(self, examples: Sequence[TrainingExample]) -> tuple[float, int, int]:
        """Add the examples to the sums, and set the candidate's output layer to the solution.

        Returns the loss before, the supervised positions and the input pieces.
        """
        before_DW = self._sums.solve() if self._correction_DW is None else self._correction_DW
        measured_S, loss, positions, pieces = torch.zeros(len(STRENGTHS), dtype=torch.float64), 0.0, 0, 0
        for batch in self._batcher.make_batches(examples):
            count = len(batch.teacher.rest_N)
            student, ngram_log_M, hidden_NW = self._compute(batch)
            loss += float(self._loss(student, batch.teacher, ngram_log_M)) * count
            forbidden_ND = batch.forbidden_BD[batch.packed.rows_N]
            first_N = batch.teacher.first_N
            firsts = _Places(hidden_NW[first_N], forbidden_ND[first_N], _take(batch.teacher, first_N))
            measured_S += self._measure_strengths(firsts, before_DW)
            self._sums.add(hidden_NW, self._missing_probs(_Places(hidden_NW, forbidden_ND, batch.teacher)))
            positions, pieces = positions + count, pieces + batch.packed.pieces_BT.numel()
            self._yield_cpu()
        self._measured = [
            STRENGTH_DECAY * old + new for old, new in zip(self._measured, measured_S.tolist(), strict=True)
        ]
        self._correction_DW = self._sums.solve()
        _output_layer(self._candidate.model).weight.copy_(self._loaded_DW + self._strength * self._correction_DW)
        return loss / max(1, positions), positions, pieces

    @property
    def _strength(self) -> float:
        """The strength with the highest measured acceptance."""
        best = max(self._measured)
        return STRENGTHS[self._measured.index(best)] if best > min(self._measured) else FIRST_STRENGTH

    def _compute(self, batch: Batch) -> tuple[StudentBatch, Tensor, Tensor]:
        """Return what `ExampleBatcher.compute_distributions` does, and the hidden states (N, W)."""
        with _capture_inputs(_output_layer(self._candidate.model)) as captured:
            student, ngram_log_M = self._batcher.compute_distributions(self._candidate, batch)
        return student, ngram_log_M, captured[0][: len(batch.teacher.rest_N)].float()

    def _measure_strengths(self, firsts: "_Places", correction_DW: Tensor) -> Tensor:
        """Return the total acceptance at the first pieces of tokens under each strength (S,)."""
        loaded_ND, change_ND = firsts.logits(self._loaded_DW), firsts.hidden_NW @ correction_DW.T
        students = (StudentBatch.from_logits(loaded_ND + factor * change_ND, firsts.teacher) for factor in STRENGTHS)
        return torch.stack([self._measure(student, firsts.teacher).double().sum().cpu() for student in students])

    def _missing_probs(self, places: "_Places") -> Tensor:
        """Return the target's probabilities of pieces, less those of the drafter as loaded (N, D)."""
        teacher, probs_ND = places.teacher, places.logits(self._loaded_DW).softmax(-1)
        target_NT = teacher.group_NT.masked_fill(~teacher.valid_NT, 0)
        return probs_ND.neg_().scatter_add_(1, teacher.ids_NT, target_NT)

    @override
    @torch.no_grad()
    def _score(self, model: LanguageModel, examples: Sequence[TrainingExample]) -> Scores:
        """Score examples by the gate's measure. Their hidden states are computed once: all models share the layers
        below the output layer.
        """
        self._read_all(examples)
        weight_DW, found = _output_layer(model.model).weight.float(), Scores()
        for example in examples:
            if (places := self._read.get(example)) is not None:
                student = StudentBatch.from_logits(places.logits(weight_DW), places.teacher)
                total = float(self._measure(student, places.teacher).double().sum())
                found[example] = total, len(places.hidden_NW)
        return found

    def _read_all(self, examples: Sequence[TrainingExample]) -> None:
        """Compute the hidden states of examples that have none yet, and drop the oldest above the limit."""
        for batch in self._batcher.make_batches([one for one in examples if one not in self._read], branches=False):
            _, _, hidden_NW = self._compute(batch)
            for row, example in enumerate(batch.examples):
                own_N = (batch.packed.rows_N == row) & batch.teacher.first_N
                forbidden_ND = batch.forbidden_BD[row].expand(int(own_N.sum()), -1)
                self._read[example] = _Places(hidden_NW[own_N], forbidden_ND, _take(batch.teacher, own_N))
            self._yield_cpu()
        for example in [one for one in self._read if one not in examples][: max(0, len(self._read) - self._most_read)]:
            del self._read[example]

    @override
    def save(self, writer: SnapshotWriter) -> TrainerState:
        sums = RegressionState(
            writer.tensor(self._sums.states_WW), writer.tensor(self._sums.products_WD), list(self._measured)
        )
        return replace(super().save(writer), regression=sums)

    @override
    @torch.no_grad()
    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        super().restore(saved, reader)
        state = reader.decode(TrainerState, saved).regression
        if state is not None:
            self._sums.states_WW.copy_(reader.tensor(state.states))
            self._sums.products_WD.copy_(reader.tensor(state.products))
            self._measured = list(state.measured)


def untie_output(model: Any) -> None:
    """Give the model's output layer weights of its own if it shares those of the embeddings."""
    layer = _output_layer(model)
    if layer.weight is model.get_input_embeddings().weight:
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
        model.config.tie_word_embeddings = False


def _output_layer(model: Any) -> nn.Linear:
    layer: nn.Linear = model.get_output_embeddings()
    return layer


def _take(teacher: TeacherBatch, chosen_N: Tensor) -> TeacherBatch:
    """Return the soft targets of the chosen positions."""
    return TeacherBatch(*(getattr(teacher, field.name)[chosen_N] for field in fields(teacher)))


@contextmanager
def _capture_inputs(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of a layer's calls."""
    captured: list[Tensor] = []
    hook = layer.register_forward_hook(lambda _layer, inputs, _outputs: captured.append(inputs[0]))
    try:
        yield captured
    finally:
        hook.remove()
