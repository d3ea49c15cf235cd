"""Training the drafter on lessons: a copy learns, a gate decides, the served model takes the weights.

An update comes in three parts, so that the long one can be computed while decoding goes on: `assign` gathers what it
learns from, `attempt` computes, `settle` puts the outcome into service (or `drop` takes it back). One update is under
way at a time. Between `assign` and `settle` the computing thread owns all that is here but the served weights and the
buffers of lessons; those belong to the thread that decodes.

One trainer may teach weights that several targets share: a lesson is in its target's laws, and the gate lets an update
pass only if no target loses by it.
"""

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from stages.blocks import Lesson
from stages.gate import Gate, Scores, mean
from stages.language_model import LanguageModel
from stages.losses import Loss, Student, Taught
from stages.reading import Batch, Reader
from stages.reservoir import Reservoir
from stages.snapshot import Json, SnapshotReader, SnapshotWriter, restored_moments, save_moments
from stages.training import Assignment, Attempt, Step, Training

# The share of the configured rate that is used: small for the optimiser's first steps, which have no second moments
# to speak of, and after an update that the gate refused; growing while updates pass.
FIRST_TRUST, SHRINK, GROW = 0.5, 0.5, 1.25


Weights = list[Tensor]


class DrafterTrainer:
    """Owns the candidate (a copy of what learns of the served drafter), its optimiser, the replay buffer and the gate.

    Args:
        served: the drafter in service; only `settle` and `adopt` write its weights.
        loss_name, loss: what is minimised.
        measure: per position, what the gate compares (N,): the acceptance to expect under the sampling in use.
        allowed: per target the pieces that may be drafted; the others are not part of the drafter's law there.
        training: rates and sizes.
        breathe: called between the parts of an update, by the thread that computes it.
    """

    def __init__(
        self,
        served: LanguageModel,
        loss_name: str,
        loss: Loss,
        measure: Callable[[Student, Taught], Tensor],
        allowed: Mapping[str, Collection[int]],
        training: Training,
        breathe: Callable[[], None] = lambda: None,
    ) -> None:
        self.served, self.loss_name, self.version = served, loss_name, 0
        self._loss, self._measure, self._training, self._breathe = loss, measure, training, breathe
        self._reader = Reader(served, allowed)
        self._candidate, self._floor = served.copy_to_train(), served.copy_to_train()
        self._masters: Weights | None = None
        self._remember()
        self._optimizer = self._new_optimizer()
        self._trust = FIRST_TRUST
        self._served_scores: Scores = {}
        self._floor_scores: Scores = {}
        self._replay = Reservoir(training.replay, Random(training.seed))
        self._gate = Gate(allowed, training.gate_window, training.gate_tolerance, self._scored)

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

    def assign(self, fresh: Sequence[Lesson]) -> Assignment:
        """Fresh lessons and as many old ones, and what is held out now."""
        old = self._replay.draw(len(fresh))
        for lesson in fresh:
            self._replay.add(lesson)
        return Assignment((*fresh, *old), self._gate.held_out)

    def attempt(self, assignment: Assignment) -> Attempt:
        """Train the candidate and put it to the gate.

        Before, its weights are those in service, in float32: it is what the gate knows as the served drafter.
        """
        before = self._gate.scores(self._candidate, self._served_scores, assignment.held_out)
        floor = self._gate.scores(self._floor, self._floor_scores, assignment.held_out)
        moments = copy.deepcopy(self._optimizer.state_dict())
        loss, positions, pieces = self._train(assignment.lessons)
        known = mean(before.values()), None, mean(floor.values())
        step = Step(loss, positions, pieces, *known, False, "the loss was not finite")
        if not math.isfinite(loss):
            self._restore(moments)
            return Attempt(step, {}, moments)
        after = self._gate.scores(self._candidate, {}, assignment.held_out)
        step, losers = replace(step, after=mean(after.values())), self._gate.losers(before, after)
        if losers:
            self._restore(moments)
            step = replace(step, reason=f"the gate saw a lower acceptance for {', '.join(losers)}")
            return Attempt(step, after, moments)
        reason = "the gate let it pass" if before else "nothing held out yet"
        return Attempt(replace(step, served=True, reason=reason), after, moments)

    @torch.no_grad()
    def settle(self, attempt: Attempt) -> Step:
        """Serve the candidate if the gate let it pass, and trust the next update more, or else less."""
        if not attempt.step.served:
            self._trust *= SHRINK
            return attempt.step
        self.served.serve(self._candidate.learning)
        self._remember()
        self._served_scores = attempt.scores
        self.version += 1
        self._trust = min(1.0, self._trust * GROW)
        return attempt.step

    def drop(self, attempt: Attempt, reason: str) -> Step:
        """As if the update had never been tried, whatever came of it."""
        if attempt.step.served:
            self._restore(attempt.moments)
        return replace(attempt.step, served=False, reason=reason)

    def _train(self, lessons: Sequence[Lesson]) -> tuple[float, int, int]:
        """Gradient steps on all lessons. Returns the first step's loss, its positions and the pieces that it read."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._training.rate * self._trust
        batches = list(self._reader.batches(lessons))
        positions = sum(len(batch.taught.rest_N) for batch in batches)
        pieces = sum(batch.packed.pieces_BT.numel() for batch in batches)
        losses = []
        for _ in range(self._training.steps):
            self._optimizer.zero_grad(set_to_none=True)
            losses.append(sum((self._backward(batch, positions) for batch in batches), 0.0))
            norm = torch.nn.utils.clip_grad_norm_(self._candidate.learning, self._training.clip)
            if not (math.isfinite(losses[-1]) and torch.isfinite(norm)):
                return math.nan, positions, pieces
            self._optimizer.step()
        return losses[0], positions, pieces

    def _backward(self, batch: Batch, positions: int) -> float:
        """Add a batch's gradient, weighted by its share of all taught positions. Returns its part of the loss."""
        student, ngram_log_M = self._reader.laws(self._candidate, batch)
        share = len(batch.taught.rest_N) / positions
        loss = self._loss(student, batch.taught, ngram_log_M) * share
        loss.backward()
        self._breathe()
        return float(loss.detach())

    @torch.no_grad()
    def _scored(self, model: LanguageModel, lessons: Sequence[Lesson]) -> Scores:
        """The gate's measure over the first levels of lessons."""
        found: Scores = {}
        for batch in self._reader.batches(lessons, branches=False):
            student, _ = self._reader.laws(model, batch)
            measured = iter((self._measure(student, batch.taught) * batch.taught.first_N).tolist())
            for lesson in batch.lessons:
                total = sum(next(measured) for _ in lesson.teachings)
                found[lesson] = (total, sum(teaching.depth == 0 for teaching in lesson.teachings))
            self._breathe()
        return found

    @torch.no_grad()
    def _remember(self) -> None:
        """Keep what now serves as the candidate has it, where the served weights are a rounded copy."""
        rounded = any(weight.dtype != torch.float32 for weight in self.served.learning)
        self._masters = [weight.clone() for weight in self._candidate.learning] if rounded else None

    @property
    def _present(self) -> Weights:
        """The weights in service, in float32."""
        return self._masters or self.served.learning

    @torch.no_grad()
    def _restore(self, moments: dict[str, Any]) -> None:
        """The candidate and its optimiser as they were."""
        _copy(self._present, self._candidate.learning)
        self._optimizer.load_state_dict(moments)

    @torch.no_grad()
    def expected(self, weights: Weights | None, lessons: Sequence[Lesson]) -> float | None:
        """What the gate measures of other weights, or of the served ones, on these lessons; None if nothing counts."""
        if weights is None:
            return mean(self._scored(self.served, lessons).values())
        _copy(weights, self._candidate.learning)
        found = mean(self._scored(self._candidate, lessons).values())
        _copy(self._present, self._candidate.learning)
        return found

    @torch.no_grad()
    def losers(self, weights: Weights, gaining: str) -> list[str]:
        """Targets beside the gaining one that would lose by other weights, as the gate sees it."""
        _copy(weights, self._candidate.learning)
        after = self._gate.scores(self._candidate, {}, self._gate.held_out)
        _copy(self._present, self._candidate.learning)
        before = self._gate.scores(self._candidate, self._served_scores, self._gate.held_out)
        return [target for target in self._gate.losers(before, after) if target != gaining]

    @torch.no_grad()
    def adopt(self, weights: Weights) -> None:
        """Take other weights into service; the optimiser begins anew."""
        _copy(weights, self._candidate.learning)
        self.served.serve(weights)
        self._remember()
        self._served_scores = {}
        self._optimizer, self._trust = self._new_optimizer(), FIRST_TRUST
        self.version += 1

    def save(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`. Nothing may be under way. The floor is as it was loaded."""
        return {
            "version": self.version,
            "trust": self._trust,
            "present": [keep.tensor(weight) for weight in self._present],
            "moments": save_moments(self._optimizer.state_dict(), keep),
            "served_scores": _saved_scores(self._served_scores, keep),
            "floor_scores": _saved_scores(self._floor_scores, keep),
            "replay": self._replay.save(keep),
            "gate": self._gate.save(keep),
        }

    @torch.no_grad()
    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        present = [kept.tensor(number) for number in saved["present"]]
        _copy(present, self._candidate.learning)
        self.served.serve(present)
        self._remember()
        self._optimizer.load_state_dict(restored_moments(saved["moments"], self._optimizer, kept))
        self.version, self._trust = saved["version"], saved["trust"]
        self._served_scores = _restored_scores(saved["served_scores"], kept)
        self._floor_scores = _restored_scores(saved["floor_scores"], kept)
        self._replay.restore(saved["replay"], kept)
        self._gate.restore(saved["gate"], kept)

    def save_attempt(self, attempt: Attempt, keep: SnapshotWriter) -> Json:
        """An attempt that was computed and is still to be settled."""
        return {
            "step": asdict(attempt.step),
            "scores": _saved_scores(attempt.scores, keep),
            "moments": save_moments(attempt.moments, keep),
            # The gate let it pass: the candidate is ahead of the weights in service.
            "candidate": [keep.tensor(weight) for weight in self._candidate.learning] if attempt.step.served else None,
        }

    def restored_attempt(self, saved: Json, kept: SnapshotReader) -> Attempt:
        """What `save_attempt` saved, for `settle` or `drop`."""
        moments = restored_moments(saved["moments"], self._optimizer, kept)
        if saved["candidate"] is not None:
            with torch.no_grad():
                _copy([kept.tensor(number) for number in saved["candidate"]], self._candidate.learning)
        return Attempt(Step(**saved["step"]), _restored_scores(saved["scores"], kept), moments)


def _saved_scores(scores: Scores, keep: SnapshotWriter) -> Json:
    return [[keep.lesson(lesson), *score] for lesson, score in scores.items()]


def _restored_scores(saved: Json, kept: SnapshotReader) -> Scores:
    return {kept.lesson(number): (total, count) for number, total, count in saved}


def _copy(source: Sequence[Tensor], destination: Sequence[Tensor]) -> None:
    for taken, given in zip(destination, source, strict=True):
        taken.copy_(given)
