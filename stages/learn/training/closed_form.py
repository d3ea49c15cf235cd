"""Trains the drafter's output layer by least squares on hidden states; the rest of the drafter stays as loaded.

The features of a position are the drafter's hidden state and, per target, its reduced hidden state at the last token
that is known when a draft reaches the position (`stages/drafting/target_states.py`). The weights of both are one
matrix here.

One pass over an example gives its part of two sums, and from the sums the layer follows in closed form, so an update
costs a fraction of a gradient step, and what was learned stays until it is removed explicitly.

Shapes: N supervised positions, W hidden width, F features of a state, X features in all, D drafter ids, T top pieces.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from typing_extensions import override

from stages.contract.blocks import Numbers, TrainingExample
from stages.contract.snapshot import State
from stages.drafting.head import piece_features
from stages.drafting.target_states import AGE_DECAY, FEATURES, SIZE, TargetStates, state_features
from stages.engine.forward_pass.forward import record_hidden
from stages.engine.models.language_model import LanguageModel
from stages.engine.quantisation.modules import attach_groups, find_stored
from stages.learn.examples.batches import Batch
from stages.learn.examples.losses import StudentBatch, TeacherBatch
from stages.learn.training.drafter_trainer import DrafterTrainer
from stages.learn.training.least_squares_sums import Change, LeastSquaresSums
from stages.learn.training.update import Assignment, Attempt, Chooser, Scores
from store.errors import CorruptError


def untie_output(model: Any) -> None:
    """Give the model's output layer weights of its own, in full precision, if it shares those of the embeddings or
    they stay in a file.
    """
    layer = output_layer(model)
    if (stored := find_stored(layer)) is not None:
        own = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        own.weight, own.bias = nn.Parameter(layer.weight, requires_grad=False), layer.bias
        if stored.has_codes:
            attach_groups(own, stored)  # until it is trained, it is computed with them
        model.set_output_embeddings(own)
    elif layer.weight is model.get_input_embeddings().weight:
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
    model.config.tie_word_embeddings = False


def output_layer(model: Any) -> nn.Linear:
    """Return the module that computes a model's logits."""
    layer: nn.Linear = model.get_output_embeddings()
    return layer


def targets_of(model: LanguageModel) -> tuple[str, ...]:
    """Return the targets whose states the drafter reads."""
    return model.extra.targets if isinstance(model.extra, TargetStates) else ()


def _layer_weights(model: LanguageModel) -> list[Tensor]:
    states = model.extra.weights if isinstance(model.extra, TargetStates) else ()
    return [output_layer(model.model).weight, *states]


def read_layer(model: LanguageModel) -> Tensor:
    """Return the weights of the output layer and of the targets' states, in float32 (D, X)."""
    return torch.cat([weight.detach().float() for weight in _layer_weights(model)], -1)


def write_layer(model: LanguageModel, weight_DX: Tensor) -> None:
    """Set what `read_layer` returns."""
    weights = _layer_weights(model)
    for own, new in zip(weights, weight_DX.split([weight.shape[1] for weight in weights], -1), strict=True):
        own.copy_(new)


@dataclass(frozen=True)
class Places:
    """Positions of texts."""

    features_NX: Tensor  # hidden states of the drafter and the target
    forbidden_ND: Tensor  # True for ids that may not be drafted
    teacher: TeacherBatch  # the soft targets

    def logits(self, weight_DX: Tensor) -> Tensor:
        """Compute what a layer gives (N, D); its columns of features that it does not read may be left out."""
        read_NX = self.features_NX[:, : weight_DX.shape[1]]
        return (read_NX @ weight_DX.T).masked_fill_(self.forbidden_ND, -torch.inf)

    def take(self, chosen_N: Tensor) -> "Places":
        """Return some of the positions, by mask or index."""
        teacher = TeacherBatch(*(getattr(self.teacher, field.name)[chosen_N] for field in fields(self.teacher)))
        return Places(self.features_NX[chosen_N], self.forbidden_ND[chosen_N], teacher)


class LaterPlaces(NamedTuple):
    """Positions as drafts from a token earlier reach them: which of all positions, and their features."""

    lines: Tensor
    features_NX: Tensor


def find_states(
    example: TrainingExample, positions_N: Numbers, first_N: Numbers, back: int
) -> tuple[Numbers, Numbers, Numbers]:
    """Find the state that a draft reads at each supervised position of an example's text, if it begins `back` tokens
    before that of the position.

    Returns:
        which of the positions have a state (indices); the number of pieces from the draft's beginning to each of these;
        their states.
    """
    starts = positions_N[first_N]
    nothing = np.zeros(0, np.int64)
    if example.states is None or len(example.states) != len(starts):
        return nothing, nothing, np.zeros((0, SIZE), np.int8)
    begins_N = np.searchsorted(starts, positions_N, side="right") - 1 - back
    (found,) = (begins_N > 0).nonzero()
    begins = begins_N[found]
    return found, positions_N[found] - starts[begins], example.states[begins - 1]


def _name(example: TrainingExample) -> tuple[str, int, int]:
    """Return what names an example in a version's file: prompts have several, of one part of their answer each."""
    return example.target, example.offset, crc32(np.array(example.pieces, np.int64).tobytes())


SUMS_FILE = "sums.safetensors"  # of a version
STRENGTHS = (0.0, 4.0, 8.0, 16.0, 32.0)  # factors of the correction, which is a difference of probabilities, in logits
FIRST_STRENGTH = 8.0  # before any is measured
WORTH = 0.02  # least gain of acceptance for which the drafter is corrected at all
STRENGTH_DECAY = 0.9  # per update, of the measured acceptance of each strength
DRIFT_DECAY = 0.25  # of the sums, after a drift
USUAL = 16_000  # positions of usual texts, next to the some 200 of an update


class OutputLayerTrainer(DrafterTrainer):
    """A trainer whose updates are solutions of a ridge regression. Arguments as for `DrafterTrainer`, and `usual`.

    The correction of the logits is a multiple of the regression's result. How large a multiple is measured on fresh
    examples, before they enter the sums; none at all is among the choices.

    Nothing lacks at `USUAL` positions of usual texts, as far as the regression knows: so it corrects what is particular
    to the stream, and elsewhere the drafter remains as it was (benchmarks/notes/closed-form.md).

    The drafter's output layer must not be tied to its embeddings (`untie_output`).

    Args:
        usual: returns usual texts in pieces of the drafter, each shorter than its context; by default none.
    """

    def __init__(self, *arguments: Any, usual: Callable[[], Sequence[Sequence[int]]] = tuple) -> None:
        super().__init__(*arguments)
        self._usual = usual
        self._loaded_DX = read_layer(self._baseline)
        self._reader = self.served.make_reader()
        outputs, width = self._loaded_DX.shape
        self._sums = LeastSquaresSums(width, outputs, self._loaded_DX.device)
        self._hidden = output_layer(self._baseline.model).weight.shape[1]
        # without the weights of the targets' states where these are zeros
        reads = bool(self._loaded_DX[:, self._hidden :].any())
        self._read_layer_DX = self._loaded_DX if reads else self._loaded_DX[:, : self._hidden]
        self._correction: Change | None = None  # the last solution, unless the sums changed since
        # decayed sums of the measured acceptance, and of the tokens at which it was
        self._measured, self._tokens = [0.0] * len(STRENGTHS), 0.0
        self._read: dict[TrainingExample, Places] = {}  # of held-out examples
        self._learned: dict[TrainingExample, float] = {}  # newest last; their weights in the sums, which may be 0
        self._lessons: dict[str, tuple[Tensor, Tensor]] = {}  # of the update in progress
        self._most_read = 2 * self._training.gate_window * self._gate.targets

    @override
    def assign(self, fresh: Sequence[TrainingExample]) -> Assignment:
        """Select the fresh examples: the sums hold the older ones."""
        return Assignment(tuple(fresh), self._gate.held_out)

    @override
    def attempt(self, assignment: Assignment) -> Attempt:
        self._lessons = {}
        return replace(super().attempt(assignment), lessons=self._lessons)

    @override
    def add_to_replay(self, example: TrainingExample) -> None:
        """Older examples that no update trains on are left out."""

    @override
    def respond_to_drift(self) -> None:
        """Give the text before a drift less weight, and measure anew how large a correction is best."""
        super().respond_to_drift()
        self._measured, self._tokens = [0.0] * len(STRENGTHS), 0.0
        self._sums.scale(DRIFT_DECAY)
        self._learned = {example: DRIFT_DECAY * weight for example, weight in self._learned.items()}
        self._correction = None

    @property
    @override
    def examples(self) -> tuple[TrainingExample, ...]:
        return (*super().examples, *self._learned)

    @override
    @torch.no_grad()
    def forget(self, chosen: Chooser) -> None:
        """Remove examples from the sums and put the solution without them into service, without the gate.

        The solution is that of a trainer that never saw them; the strength is the one measured so far, on later prompts
        with solutions that had learned them. Possible for the newest `TrainingConfig.replay` prompts.
        """
        super().forget(chosen)
        self._read = {example: places for example, places in self._read.items() if not chosen(example)}
        found = [example for example in self._learned if chosen(example)]
        for example in found:
            weight = self._learned.pop(example)
            for batch in self._batcher.make_batches([example] if weight else []):
                places, later, loaded_ND, _ = self._read_batch(batch)
                self._add_to_sums(places, later, loaded_ND, -weight)
        if found:
            self._serve_solution()

    @torch.no_grad()
    def merge(self, sums: LeastSquaresSums) -> None:
        """Add what another trainer of the same drafter learned, and put the solution into service.

        Raises:
            ValueError: the sums have other features or another vocabulary.
        """
        if sums.products_WD.shape != self._sums.products_WD.shape:
            own, other = (tuple(one.products_WD.shape) for one in (self._sums, sums))
            raise ValueError(f"sums must have the same features and pieces, got {own} and {other}")
        self._sums.merge(sums)
        self._serve_solution()

    def write_sums(self, folder: Path) -> None:
        """Write the sums to a version's folder. No update may be in progress."""
        learned = [(*_name(one), weight) for one, weight in self._learned.items()]
        content = json.dumps({"measured": self._measured, "tokens": self._tokens, "learned": learned})
        save_file(self._sums.state_dict(), folder / SUMS_FILE, {"sums": content})

    @torch.no_grad()
    def read_sums(self, folder: Path) -> None:
        """Continue from the sums of a version whose weights are in service, bit for bit. No update may be in progress.

        What was learned since is not in them; a version without sums, of another method, changes nothing.

        Raises:
            CorruptError: the file is not one of sums.
        """
        path = folder / SUMS_FILE
        if not path.exists():
            return
        try:
            with safe_open(path, framework="pt", device=str(self._loaded_DX.device)) as file:
                content = json.loads((file.metadata() or {})["sums"])
                sums = LeastSquaresSums.from_state({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            weights = {tuple(name): weight for *name, weight in content["learned"]}
            measured, tokens = list(content["measured"]), content["tokens"]
        except (SafetensorError, KeyError, ValueError) as error:
            raise CorruptError(f"{path} must hold the sums of a version, but: {error}") from error
        self._sums, self._measured, self._tokens, self._correction = sums, measured, tokens, None
        self._learned = {one: weights.get(_name(one), 0.0) for one in self._learned}

    def _serve_solution(self) -> None:
        self._solve()
        self.adopt([weight.detach().clone() for weight in self._candidate.trained_weights])

    @cached_property
    def _usual_XX(self) -> Tensor:  # noqa: N802  (the shape)
        """The sum of the outer products of features at positions of usual texts, which have no states of a target."""
        features = self._loaded_DX.shape[1]
        usual_XX = torch.zeros(features, features, dtype=torch.float64, device=self._loaded_DX.device)
        count = 0
        for pieces in self._usual():
            hidden_NW = self._read_text(pieces).double()
            width, count = hidden_NW.shape[1], count + len(hidden_NW)
            usual_XX[:width, :width] += hidden_NW.T @ hidden_NW
            self._yield_cpu()
        return usual_XX * (USUAL / count) if count else usual_XX

    def _read_text(self, pieces: Sequence[int]) -> Tensor:
        """Compute the hidden states of a text (T, W)."""
        if self._reader:
            return self._reader(pieces)
        with record_hidden(self._baseline.model) as recorded:
            self._baseline.read(torch.tensor([list(pieces)], device=self._loaded_DX.device))
        return recorded[0][0]

    def _solve(self) -> None:
        """Set the candidate's output layer to the solution."""
        self._correction = self._sums.solve(self._usual_XX)
        write_layer(self._candidate, self._correction.add_to_rows(self._loaded_DX, self._strength))

    @override
    @torch.no_grad()
    def _train(self, examples: Sequence[TrainingExample]) -> tuple[float, int, int]:
        """Add the examples to the sums, and set the candidate's output layer to the solution.

        Returns the loss of the solution before, the supervised positions and the input pieces.
        """
        loss, positions, pieces = 0.0, 0, 0
        half = 0 if self._tokens else len(examples) // 2  # the first solution is measured too
        for part in filter(None, (examples[:half], examples[half:])):
            correction = self._correction or self._sums.solve(self._usual_XX)
            measured_S, tokens = torch.zeros(len(STRENGTHS), dtype=torch.float64), 0
            for batch in self._batcher.make_batches(part):
                loss += self._learn_batch(batch, correction, measured_S)
                tokens += int(batch.teacher.first_N.sum())
                positions, pieces = positions + len(batch.rows_N), pieces + batch.pieces_BT.numel()
                self._yield_cpu()
            self._correction = None
            if len(correction.pieces_C):
                decayed = (STRENGTH_DECAY * old for old in self._measured)
                self._measured = [old + new for old, new in zip(decayed, measured_S.tolist(), strict=True)]
                self._tokens = STRENGTH_DECAY * self._tokens + tokens
        self._learned |= dict.fromkeys(examples, 1.0)
        for example in list(self._learned)[: max(0, len(self._learned) - self._training.replay)]:
            del self._learned[example]
        self._solve()
        return loss / max(1, positions), positions, pieces

    def _learn_batch(self, batch: Batch, correction: Change, measured_S: Tensor) -> float:
        """Measure the solution so far on a batch, and add the batch to the sums. Returns its loss, not divided by its
        positions.
        """
        places, later, loaded_ND, ngram_log_M = self._read_batch(batch)
        teacher, change_NC = places.teacher, places.features_NX @ correction.weights_CW.T
        student = StudentBatch(correction.add_to(loaded_ND, change_NC, self._strength), teacher)
        loss = float(self._loss(student, teacher, ngram_log_M)) * len(loaded_ND)
        firsts, first_N = places.take(teacher.first_N).teacher, teacher.first_N
        first_ND, first_NC = loaded_ND[first_N], change_NC[first_N]
        for number, factor in enumerate(STRENGTHS):
            student = StudentBatch(correction.add_to(first_ND, first_NC, factor), firsts)
            measured_N = self._measure(student, firsts)
            measured_S[number] += measured_N.double().sum().cpu()
            if factor == self._strength:
                hidden_NW = places.features_NX[first_N, : self._hidden]
                self._add_lessons(batch, batch.rows_N[first_N], hidden_NW, student, measured_N)
        self._add_to_sums(places, later, loaded_ND, 1.0)
        return loss

    def _add_lessons(
        self, batch: Batch, rows_N: Tensor, hidden_NW: Tensor, student: StudentBatch, acceptance_N: Tensor
    ) -> None:
        """Keep what the acceptance head learns from a batch: a draft might have begun with any of its tokens."""
        features_NF = piece_features(hidden_NW, student.logits_ND, student.argmax_N, 0)
        for target in dict.fromkeys(example.target for example in batch.examples):
            own = [row for row, example in enumerate(batch.examples) if example.target == target]
            lines_N = torch.isin(rows_N, torch.tensor(own, device=rows_N.device))
            before = self._lessons.get(target, (features_NF[:0], acceptance_N[:0]))
            new = features_NF[lines_N], acceptance_N[lines_N]
            self._lessons[target] = torch.cat([before[0], new[0]]), torch.cat([before[1], new[1]])

    @property
    def _strength(self) -> float:
        """The best so far; none where that gains hardly anything over the drafter as loaded."""
        if not self._tokens:
            return FIRST_STRENGTH
        best = max(self._measured)
        return STRENGTHS[self._measured.index(best)] if best - self._measured[0] >= WORTH * self._tokens else 0.0

    def _read_batch(self, batch: Batch) -> tuple[Places, LaterPlaces, Tensor, Tensor]:
        """Return the supervised positions as drafts begin there or with their token, some of them again as drafts reach
        them from a token earlier, the logits there of the drafter as loaded (N, D), and its log-likelihood of the
        n-grams' pieces (M,).
        """
        hidden_NW, student, ngram_log_M = self._batcher.read_distributions(self._baseline, batch, self._reader)
        states_NF, _ = self._state_features(batch, 0)
        earlier_NF, has_N = self._state_features(batch, 1)
        forbidden_ND = batch.forbidden_BD[batch.rows_N]
        places = Places(torch.cat([hidden_NW, states_NF], -1), forbidden_ND, batch.teacher)
        later = LaterPlaces(has_N, torch.cat([hidden_NW[has_N], earlier_NF[has_N]], -1))
        reads_states = self._read_layer_DX.shape[1] > hidden_NW.shape[1]
        loaded_ND = places.logits(self._read_layer_DX) if reads_states else student.logits_ND
        return places, later, loaded_ND, ngram_log_M

    def _state_features(self, batch: Batch, back: int) -> tuple[Tensor, Tensor]:
        """Return the features of the targets' states at the supervised positions (N, targets x F), and where there are
        any (N,). `back`: how many tokens before that of a position its draft begins.
        """
        rows_N, places_N = batch.rows_N, batch.places_N
        states, targets = self._candidate.extra, targets_of(self._candidate)
        features_NTF = torch.zeros(len(rows_N), len(targets), FEATURES if targets else 0, device=rows_N.device)
        has_N = torch.zeros(len(rows_N), dtype=torch.bool, device=rows_N.device)
        for row, example in enumerate(batch.examples if states else ()):
            (lines,) = (rows_N == row).nonzero(as_tuple=True)
            positions, firsts = ((places_N[lines] + 1).cpu().numpy(), batch.teacher.first_N[lines].cpu().numpy())
            found, ages, read = find_states(example, positions, firsts, back)
            lines = lines[torch.from_numpy(found).to(lines.device)]
            own_NF = AGE_DECAY ** torch.from_numpy(ages)[:, None] * state_features(torch.from_numpy(read))
            features_NTF[lines, targets.index(example.target)] = own_NF.to(features_NTF)
            has_N[lines] = True
        return features_NTF.flatten(1), has_N

    def _add_to_sums(self, places: Places, later: LaterPlaces, loaded_ND: Tensor, weight: float) -> None:
        teacher, probs_ND = places.teacher, loaded_ND.softmax(-1)
        target_NT = teacher.group_NT.masked_fill(~teacher.valid_NT, 0)
        missing_ND = probs_ND.neg_().scatter_add_(1, teacher.ids_NT, target_NT)  # of the drafter as loaded
        self._sums.add(places.features_NX, missing_ND, weight)
        self._sums.add(later.features_NX, missing_ND[later.lines], weight)

    @override
    @torch.no_grad()
    def _score(self, model: LanguageModel, examples: Sequence[TrainingExample]) -> Scores:
        """Score examples by the gate's measure. Their hidden states are computed once: all models share the layers
        below the output layer.
        """
        if not examples:
            return {}
        self._read_new(examples)
        change, found = Change.of_rows(read_layer(model) - self._loaded_DX), Scores()
        for example in examples:
            if (places := self._read.get(example)) is not None:
                change_NC = places.features_NX @ change.weights_CW.T
                logits_ND = change.add_to(places.logits(self._read_layer_DX), change_NC, 1.0)
                student = StudentBatch(logits_ND, places.teacher)
                total = float(self._measure(student, places.teacher).double().sum())
                found[example] = total, len(places.features_NX)
        return found

    def _read_new(self, examples: Sequence[TrainingExample]) -> None:
        for example in [one for one in examples if one not in self._read]:
            # Alone: a resumed run reads them again, and other neighbours would change the last digits.
            for batch in self._batcher.make_batches([example]):
                places, *_ = self._read_batch(batch)
                own = places.take(batch.teacher.first_N)
                forbidden_ND = batch.forbidden_BD[0].expand(len(own.features_NX), -1)  # one line for all
                self._read[example] = replace(own, forbidden_ND=forbidden_ND)
            self._yield_cpu()
        for example in [one for one in self._read if one not in examples][: max(0, len(self._read) - self._most_read)]:
            del self._read[example]

    @override
    def state_dict(self) -> State:
        return super().state_dict() | {
            "sums": self._sums.state_dict(),
            "measured": self._measured,
            "tokens": self._tokens,
            "learned": list(self._learned.items()),
        }

    @override
    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._sums = LeastSquaresSums.from_state(state["sums"], self._loaded_DX.device)
        self._measured, self._tokens = list(state["measured"]), state["tokens"]
        self._learned = dict(map(tuple, state["learned"]))
