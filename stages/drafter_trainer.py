"""Training the drafter on lessons: a copy learns, a gate decides, the served model takes the weights.

One trainer may teach weights that several targets share: a lesson is in its target's laws, and the gate lets an update
pass only if no target loses by it.

Shapes: B lessons, T pieces of the longest with its branches, D drafter ids, N taught positions.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from stages.blocks import Lesson
from stages.gate import Gate, Scores, mean
from stages.language_model import LanguageModel
from stages.losses import Loss, Student, Taught
from stages.packing import Packed, length_of, pack
from stages.reservoir import Reservoir

# The share of the configured rate that is used: small for the optimiser's first steps, which have no second moments
# to speak of, and after an update that the gate refused; growing while updates pass.
FIRST_TRUST, SHRINK, GROW = 0.5, 0.5, 1.25
MAX_LOGITS = 1 << 25  # numbers of one micro-batch's output: 128 MiB in float32


@dataclass(frozen=True)
class Training:
    """How to train.

    Attributes:
        rate, weight_decay: AdamW's.
        steps: gradient steps of an update.
        clip: largest norm of a gradient.
        replay: lessons kept against forgetting; an update takes as many old ones as it has fresh ones.
        gate_window: held-out lessons that the gate looks at.
        gate_tolerance: by how much the candidate's expected acceptance may fall behind and still be served.
        seed: of the choice of old lessons.
    """

    rate: float
    weight_decay: float
    steps: int
    clip: float
    replay: int
    gate_window: int
    gate_tolerance: float
    seed: int


@dataclass(frozen=True)
class Step:
    """What came of an update.

    Attributes:
        loss: of the first gradient step, before learning.
        positions: taught positions of one gradient step.
        pieces: read per gradient step.
        before, after, floor: what the gate measured of the served drafter, of the candidate and of the drafter as
            loaded, over all targets' held-out lessons; None where nothing is held out, or nothing was measured.
        served: whether the candidate's weights are now in service.
        reason: why, or why not.
    """

    loss: float
    positions: int
    pieces: int
    before: float | None
    after: float | None
    floor: float | None
    served: bool
    reason: str


Weights = list[Tensor]


class DrafterTrainer:
    """Owns the candidate (a copy of what learns of the served drafter), its optimiser, the replay buffer and the gate.

    Args:
        served: the drafter in service; only `update` and `adopt` write its weights.
        loss_name, loss: what is minimised.
        measure: per position, what the gate compares (N,): the acceptance to expect under the sampling in use.
        allowed: per target the pieces that may be drafted; the others are not part of the drafter's law there.
        training: rates and sizes.
    """

    def __init__(
        self,
        served: LanguageModel,
        loss_name: str,
        loss: Loss,
        measure: Callable[[Student, Taught], Tensor],
        allowed: Mapping[str, Collection[int]],
        training: Training,
    ) -> None:
        self.served, self.loss_name, self.version = served, loss_name, 0
        self._loss, self._measure, self._training = loss, measure, training
        self._forbidden_D = {target: served.mask_without(pieces) for target, pieces in allowed.items()}
        self._candidate, self._floor = served.copy_to_train(), served.copy_to_train()
        self._optimizer = self._new_optimizer()
        self._trust = FIRST_TRUST
        self._served_scores: Scores = {}
        self._floor_scores: Scores = {}
        self._replay = Reservoir(training.replay, Random(training.seed))
        self._gate = Gate(self._forbidden_D, training.gate_window, training.gate_tolerance, self._scored)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        training = self._training
        return torch.optim.AdamW(
            self._candidate.learning, lr=training.rate, weight_decay=training.weight_decay, fused=True
        )

    def hold_out(self, lesson: Lesson) -> None:
        """Keep a lesson for the gate; it is never trained on."""
        self._gate.hold_out(lesson)

    def keep(self, lesson: Lesson) -> None:
        """Let a lesson that no update was made of enter the sample of old ones."""
        self._replay.add(lesson)

    def update(self, fresh: Sequence[Lesson]) -> Step:
        """Train the candidate on fresh lessons and as many old ones; serve it if the gate lets it pass."""
        old = self._replay.draw(len(fresh))
        for lesson in fresh:
            self._replay.add(lesson)
        before = self._gate.scores(self.served, self._served_scores)
        floor = self._gate.scores(self._floor, self._floor_scores)
        moments = copy.deepcopy(self._optimizer.state_dict())
        loss, positions, pieces = self._train([*fresh, *old])
        known = mean(before.values()), None, mean(floor.values())
        step = Step(loss, positions, pieces, *known, False, "the loss was not finite")
        if not math.isfinite(loss):
            self._restore(moments)
            return step
        after = self._gate.scores(self._candidate, {})
        step, losers = replace(step, after=mean(after.values())), self._gate.losers(before, after)
        if losers:
            self._restore(moments)
            return replace(step, reason=f"the gate saw a lower acceptance for {', '.join(losers)}")
        self._serve(after)
        return replace(step, served=True, reason="the gate let it pass" if before else "nothing held out yet")

    def _train(self, lessons: Sequence[Lesson]) -> tuple[float, int, int]:
        """Gradient steps on all lessons. Returns the first step's loss, its positions and the pieces that it read."""
        self._candidate.model.train()
        for group in self._optimizer.param_groups:
            group["lr"] = self._training.rate * self._trust
        losses, positions, pieces = [], 0, 0
        for _ in range(self._training.steps):
            self._optimizer.zero_grad(set_to_none=True)
            total, positions, pieces = 0.0, 0, 0
            batches = list(self._micro_batches(lessons))
            for batch in batches:
                packed = pack(batch, self.served.device)
                student, taught, ngram_log_N = self._compare(self._candidate, batch, packed)
                loss = self._loss(student, taught, ngram_log_N) / len(batches)
                if not torch.isfinite(loss):
                    return math.nan, positions, pieces
                loss.backward()
                total += float(loss.detach())
                positions += len(taught.rest_N)
                pieces += packed.pieces_BT.numel()
            norm = torch.nn.utils.clip_grad_norm_(self._candidate.learning, self._training.clip)
            if not torch.isfinite(norm):
                return math.nan, positions, pieces
            self._optimizer.step()
            losses.append(total)
        self._candidate.model.eval()
        return losses[0], positions, pieces

    def _micro_batches(self, lessons: Sequence[Lesson]) -> Iterator[list[Lesson]]:
        """Lessons of similar length together, each batch's logits within `MAX_LOGITS`; no text beyond the context."""
        width = self.served.vocabulary_size
        batch: list[Lesson] = []
        usable = [one for one in lessons if one.teachings and len(one.pieces) <= self.served.max_length]
        for lesson in sorted(usable, key=length_of):
            if batch and (len(batch) + 1) * length_of(lesson) * width > MAX_LOGITS:
                yield batch
                batch = []
            batch.append(lesson)
        if batch:
            yield batch

    def _compare(
        self, model: LanguageModel, lessons: Sequence[Lesson], packed: Packed
    ) -> tuple[Student, Taught, Tensor]:
        """The model's laws and the target's at every taught position, and the log-likelihood of n-grams' pieces."""
        logits_BTD = model.read(packed.pieces_BT, packed.positions_BT, packed.mask_B1TT)
        forbidden_B1D = torch.stack([self._forbidden_D[lesson.target] for lesson in lessons])[:, None]
        logits_BTD = logits_BTD.masked_fill(forbidden_B1D, -torch.inf)
        taught = Taught.of(packed.teachings, packed.emitted_N)
        student = Student.of(logits_BTD[packed.rows_N, packed.places_N], taught)
        return student, taught, self._ngram_log(logits_BTD, lessons, packed.pieces_BT)

    @staticmethod
    def _ngram_log(logits_BTD: Tensor, lessons: Sequence[Lesson], pieces_BT: Tensor) -> Tensor:
        spots = [(number, position) for number, lesson in enumerate(lessons) for position in lesson.ngram_positions]
        if not spots:
            return logits_BTD.new_zeros(1)
        rows, positions = torch.tensor(spots, device=logits_BTD.device).T
        log_ND = logits_BTD[rows, positions - 1].log_softmax(-1)
        return log_ND.gather(1, pieces_BT[rows, positions][:, None])[:, 0]

    @torch.no_grad()
    def _scored(self, model: LanguageModel, lessons: Sequence[Lesson]) -> Scores:
        """The gate's measure over the first levels of lessons."""
        found: Scores = {}
        for batch in self._micro_batches(lessons):
            packed = pack(batch, self.served.device, branches=False)
            student, taught, _ = self._compare(model, batch, packed)
            measured = iter((self._measure(student, taught) * taught.first_N).tolist())
            for lesson in batch:
                total = sum(next(measured) for _ in lesson.teachings)
                found[lesson] = (total, sum(teaching.depth == 0 for teaching in lesson.teachings))
        return found

    @torch.no_grad()
    def _serve(self, scores: Scores) -> None:
        """Copy the candidate's weights into the served model; its scores are now the served model's."""
        self._served_scores = scores
        _copy(self._candidate.learning, self.served.learning)
        self.version += 1
        self._trust = min(1.0, self._trust * GROW)

    @torch.no_grad()
    def _restore(self, moments: dict[str, Any]) -> None:
        """As if the update had never been tried, but for a smaller rate."""
        _copy(self.served.learning, self._candidate.learning)
        self._optimizer.load_state_dict(moments)
        self._trust *= SHRINK
        self._candidate.model.eval()

    @torch.no_grad()
    def expected(self, weights: Weights | None, lessons: Sequence[Lesson]) -> float | None:
        """What the gate measures of other weights, or of the served ones, on these lessons; None if nothing counts."""
        if weights is None:
            return mean(self._scored(self.served, lessons).values())
        _copy(weights, self._candidate.learning)
        found = mean(self._scored(self._candidate, lessons).values())
        _copy(self.served.learning, self._candidate.learning)
        return found

    @torch.no_grad()
    def losers(self, weights: Weights, gaining: str) -> list[str]:
        """Targets beside the gaining one that would lose by other weights, as the gate sees it."""
        _copy(weights, self._candidate.learning)
        after = self._gate.scores(self._candidate, {})
        _copy(self.served.learning, self._candidate.learning)
        before = self._gate.scores(self.served, self._served_scores)
        return [target for target in self._gate.losers(before, after) if target != gaining]

    @torch.no_grad()
    def adopt(self, weights: Weights) -> None:
        """Take other weights into service; the optimiser begins anew."""
        _copy(weights, self._candidate.learning)
        _copy(weights, self.served.learning)
        self._served_scores = {}
        self._optimizer, self._trust = self._new_optimizer(), FIRST_TRUST
        self.version += 1


def _copy(source: Sequence[Tensor], destination: Sequence[Tensor]) -> None:
    for taken, given in zip(destination, source, strict=True):
        taken.copy_(given)
