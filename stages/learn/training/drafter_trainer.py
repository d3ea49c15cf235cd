"""Trains the drafter on examples: a copy is trained, a gate decides, the served model takes over the weights.

An update has three parts, so that the long one can be computed in parallel with decoding: `assign` selects its
examples, `attempt` computes, `settle` puts the outcome into service (or `drop` discards it). One update is in progress
at a time. Between `assign` and `settle` the computing thread owns the state of this module, except for the served
weights and the buffers of examples, which belong to the decoding thread.

One trainer may train weights that several targets share: an example holds its target's distributions, and the gate
passes an update only if no target loses by it.
"""

import copy
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from stages.contract.blocks import TrainingExample
from stages.contract.snapshot import RarelyChanged, State, moments_of, with_moments
from stages.engine.models.language_model import LanguageModel
from stages.learn.examples.batches import Batch, ExampleBatcher, sum_by_row
from stages.learn.examples.losses import Loss, StudentBatch, TeacherBatch
from stages.learn.training.betting import Comparison, Opinion
from stages.learn.training.update import (
    Assignment,
    Attempt,
    Chooser,
    Gate,
    Reservoir,
    Scores,
    Step,
    TrainingConfig,
    mean_score,
    to_lessons,
)

LOG = logging.getLogger("omnidraft.training")

# Scale of the configured learning rate: small for the optimiser's first steps, whose second moments are unreliable, and
# after an update that the gate refused; growing while updates pass.
FIRST_LR_SCALE, SHRINK, GROW = 0.5, 0.5, 1.25


class DrafterTrainer:
    """Owns the candidate (a copy of the trained weights), its optimiser, the replay buffer and the gate.

    Args:
        served: the drafter in service; only `settle` and `adopt` write its weights.
        measure: what the gate compares, per position (N,): the expected acceptance under the sampling in use.
        allowed: per target the pieces that may be drafted; the others are not part of the drafter's distribution there.
    """

    def __init__(
        self,
        served: LanguageModel,
        loss_name: str,
        loss: Loss,
        measure: Callable[[StudentBatch, TeacherBatch], Tensor],
        allowed: Mapping[str, Collection[int]],
        training: TrainingConfig,
        yield_cpu: Callable[[], None] = lambda: None,
    ) -> None:
        self.served, self.loss_name, self.version = served, loss_name, 0
        # acceptance on held-out examples of the drafter in service and as loaded, as its last update measured it
        self.held_out_acceptance: tuple[float | None, float | None] = None, None
        self._loss, self._measure, self._training, self._yield_cpu = loss, measure, training, yield_cpu
        self._batcher = ExampleBatcher(served, allowed)
        self._candidate, self._baseline = served.copy_to_train(), served.copy_to_train()
        self._masters: list[Tensor] | None = None
        self._keep_masters()
        self._optimizer = self._new_optimizer()
        self._lr_scale = FIRST_LR_SCALE
        self._served_scores: Scores = {}
        self._baseline_scores: Scores = {}
        self._comparison = Comparison()
        self._best: list[Tensor] | None = None  # the best weights so far; None: the baseline
        self._replay = Reservoir(training.replay, Random(training.seed))
        self._gate = Gate(allowed, training.gate_window, training.gate_tolerance, self._score)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        training = self._training
        return torch.optim.AdamW(
            self._candidate.trained_weights, lr=training.rate, weight_decay=training.weight_decay, fused=True
        )

    def hold_out(self, example: TrainingExample) -> None:
        """Add an example to the gate's; it is never trained on."""
        self._gate.hold_out(example)

    def add_to_replay(self, example: TrainingExample) -> None:
        """Add an example that no update trains on to the replay buffer."""
        self._replay.add(example)

    @property
    def examples(self) -> tuple[TrainingExample, ...]:
        return (*self._replay.examples, *self._gate.held_out)

    def forget(self, chosen: Chooser) -> None:
        """Drop some of the examples. Weights that gradient steps have changed stay as they are."""
        self._replay.forget(chosen)
        self._gate.forget(chosen)
        for scores in (self._served_scores, self._baseline_scores):
            for example in [one for one in scores if chosen(one)]:
                del scores[example]

    def respond_to_drift(self) -> None:
        """Prepare for text of another kind: what was better before may be worse now."""
        self._comparison.restart()

    def assign(self, fresh: Sequence[TrainingExample]) -> Assignment:
        """Select fresh examples, as many old ones, and the current held-out examples for an update."""
        old = self._replay.sample(len(fresh))
        for example in fresh:
            self._replay.add(example)
        return Assignment((*fresh, *old), self._gate.held_out)

    def attempt(self, assignment: Assignment) -> Attempt:
        """Train the candidate and score it by the gate.

        Before training, the candidate holds the weights in service in float32, so its scores are those of the served
        drafter.
        """
        fresh = [example for example in assignment.held_out if example not in self._baseline_scores]
        before = self._gate.update_scores(self._candidate, self._served_scores, assignment.held_out)
        baseline = self._gate.update_scores(self._baseline, self._baseline_scores, assignment.held_out)
        moments = copy.deepcopy(self._optimizer.state_dict())
        if self._compare_with_best(fresh):
            return Attempt(self._withdraw(before, baseline), {}, moments)
        loss, positions, pieces = self._train(assignment.examples)
        known = mean_score(before.values()), None, mean_score(baseline.values())
        step = Step(loss, positions, pieces, *known, False, "the loss was not finite")
        if not math.isfinite(loss):
            self._restore_candidate(moments)
            return Attempt(step, {}, moments)
        if all(map(torch.equal, self._candidate.trained_weights, self._served_weights)):
            return Attempt(replace(step, after=step.before, reason="it changes nothing"), {}, moments)
        after = self._gate.update_scores(self._candidate, {}, assignment.held_out)
        step, losers = replace(step, after=mean_score(after.values())), self._gate.find_losers(before, after, baseline)
        if losers:
            self._restore_candidate(moments)
            step = replace(step, reason=f"the gate saw a lower acceptance for {', '.join(losers)}")
            return Attempt(step, after, moments)
        reason = "the gate let it pass" if before else "nothing held out yet"
        return Attempt(replace(step, served=True, reason=reason), after, moments)

    @torch.no_grad()
    def _compare_with_best(self, fresh: Sequence[TrainingExample]) -> bool:
        """Add new held-out examples to the evidence. Returns whether the weights in service are to be withdrawn."""
        best = self._baseline_scores
        if self._best is not None and fresh:
            _copy_weights(self._best, self._candidate.trained_weights)
            best = self._score(self._candidate, fresh)
            _copy_weights(self._served_weights, self._candidate.trained_weights)
        served = self._served_scores
        known = [example for example in fresh if example in served and example in best and served[example][1]]
        opinion = self._comparison.observe((served[one][0] - best[one][0]) / served[one][1] for one in known)
        if opinion is Opinion.BETTER:
            self._best = [weight.clone() for weight in self._candidate.trained_weights]
        return opinion is Opinion.WORSE

    @torch.no_grad()
    def _withdraw(self, before: Scores, baseline: Scores) -> Step:
        """Make the best weights so far the candidate, in place of training it."""
        _copy_weights(self._best or self._baseline.trained_weights, self._candidate.trained_weights)
        self._optimizer, self._lr_scale = self._new_optimizer(), FIRST_LR_SCALE
        reason = f"withdrawn: the drafter in service was {Opinion.WORSE.value}"
        return Step(0.0, 0, 0, mean_score(before.values()), None, mean_score(baseline.values()), True, reason)

    @torch.no_grad()
    def settle(self, attempt: Attempt) -> Step:
        """Serve the candidate if the gate passed it, and adapt the learning-rate scale to the outcome."""
        step = attempt.step
        measured = {"before": step.before, "after": step.after, "loss": step.loss}
        LOG.debug(
            "update %s: %s; expected acceptance %s before, %s after, loss %.4f",
            *("accepted" if step.served else "refused", step.reason, *measured.values()),
            extra=measured | {"served": step.served, "reason": step.reason},
        )
        if not step.served:
            self._lr_scale *= SHRINK
            return attempt.step
        self.served.load_weights(self._candidate.trained_weights)
        self._keep_masters()
        self._served_scores = attempt.scores
        self.held_out_acceptance = step.after, step.baseline
        self.version += 1
        self._lr_scale = min(1.0, self._lr_scale * GROW)
        return attempt.step

    def drop(self, attempt: Attempt, reason: str) -> Step:
        """Discard a computed update, whatever its outcome."""
        if attempt.step.served:
            self._restore_candidate(attempt.moments)
        return replace(attempt.step, served=False, reason=reason)

    def _train(self, examples: Sequence[TrainingExample]) -> tuple[float, int, int]:
        """Make the gradient steps of an update on all examples.

        Returns the loss, the supervised positions and the input pieces of the first step.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = self._training.rate * self._lr_scale
        batches = list(self._batcher.make_batches(examples))
        positions = sum(len(batch.teacher.rest_N) for batch in batches)
        pieces = sum(batch.pieces_BT.numel() for batch in batches)
        losses = []
        for _ in range(self._training.steps):
            self._optimizer.zero_grad(set_to_none=True)
            losses.append(sum((self._backward(batch, positions) for batch in batches), 0.0))
            norm = torch.nn.utils.clip_grad_norm_(self._candidate.trained_weights, self._training.clip)
            if not (math.isfinite(losses[-1]) and torch.isfinite(norm)):
                return math.nan, positions, pieces
            self._optimizer.step()
        return losses[0], positions, pieces

    def _backward(self, batch: Batch, positions: int) -> float:
        """Accumulate a batch's gradient, weighted by its share of `positions`. Returns its part of the loss."""
        student, ngram_log_M = self._batcher.compute_distributions(self._candidate, batch)
        share = len(batch.teacher.rest_N) / positions
        loss = self._loss(student, batch.teacher, ngram_log_M) * share
        loss.backward()
        self._yield_cpu()
        return float(loss.detach())

    @torch.no_grad()
    def _score(self, model: LanguageModel, examples: Sequence[TrainingExample]) -> Scores:
        found: Scores = {}
        for batch in self._batcher.make_batches(examples):
            student, _ = self._batcher.compute_distributions(model, batch)
            measured_N = (self._measure(student, batch.teacher) * batch.teacher.first_N).double()
            totals, tokens = (sum_by_row(values_N, batch) for values_N in (measured_N, batch.teacher.first_N.double()))
            found |= zip(batch.examples, zip(totals, map(int, tokens), strict=True), strict=True)
            self._yield_cpu()
        return found

    @torch.no_grad()
    def _keep_masters(self) -> None:
        """Keep a float32 copy of the weights in service if the served model has rounded ones."""
        rounded = any(weight.dtype != torch.float32 for weight in self.served.trained_weights)
        self._masters = [weight.clone() for weight in self._candidate.trained_weights] if rounded else None

    @property
    def _served_weights(self) -> list[Tensor]:
        return self._masters or self.served.trained_weights

    @torch.no_grad()
    def _restore_candidate(self, moments: dict[str, Any]) -> None:
        _copy_weights(self._served_weights, self._candidate.trained_weights)
        self._optimizer.load_state_dict(moments)

    @torch.no_grad()
    def measure_acceptance(self, weights: list[Tensor] | None, examples: Sequence[TrainingExample]) -> float | None:
        """Measure the acceptance of other weights (None: the served ones) on examples; None without positions."""
        if weights is None:
            return mean_score(self._score(self.served, examples).values())
        _copy_weights(weights, self._candidate.trained_weights)
        found = mean_score(self._score(self._candidate, examples).values())
        _copy_weights(self._served_weights, self._candidate.trained_weights)
        return found

    @torch.no_grad()
    def find_losers(self, weights: list[Tensor], gaining: str) -> list[str]:
        """Return the targets, other than the gaining one, whose acceptance would fall with other weights."""
        _copy_weights(weights, self._candidate.trained_weights)
        after = self._gate.update_scores(self._candidate, {}, self._gate.held_out)
        _copy_weights(self._served_weights, self._candidate.trained_weights)
        before = self._gate.update_scores(self._candidate, self._served_scores, self._gate.held_out)
        return [target for target in self._gate.find_losers(before, after) if target != gaining]

    @torch.no_grad()
    def adopt(self, weights: list[Tensor]) -> None:
        """Put other weights into service and reset the optimiser."""
        _copy_weights(weights, self._candidate.trained_weights)
        self.served.load_weights(weights)
        self._keep_masters()
        self._served_scores, self.held_out_acceptance = {}, (None, None)
        self._comparison.restart()
        self._optimizer, self._lr_scale = self._new_optimizer(), FIRST_LR_SCALE
        self.version += 1

    def state_dict(self) -> State:
        """Return the state for a checkpoint; no update may be in progress. The baseline is not in it: it is the drafter
        as loaded. `best` are the best weights so far, None for the baseline.
        """
        return {
            "version": self.version,
            "lr_scale": self._lr_scale,
            "served": RarelyChanged(self._served_weights),
            "moments": RarelyChanged(moments_of(self._optimizer)),
            "best": RarelyChanged(self._best),
            "served_scores": list(self._served_scores.items()),
            "baseline_scores": list(self._baseline_scores.items()),
            "replay": self._replay.state_dict(),
            "gate": self._gate.state_dict(),
            "comparison": self._comparison.state_dict(),
            "held_out": self.held_out_acceptance,
        }

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        _copy_weights(state["served"], self._candidate.trained_weights)
        self.served.load_weights(state["served"], trained=state["version"] > 0)
        self._keep_masters()
        self._optimizer.load_state_dict(with_moments(self._optimizer, state["moments"]))
        self.version, self._lr_scale, self._best = state["version"], state["lr_scale"], state["best"]
        self._served_scores = _to_scores(state["served_scores"])
        self._baseline_scores = _to_scores(state["baseline_scores"])
        self._replay.load_state_dict(state["replay"])
        self._gate.load_state_dict(state["gate"])
        self._comparison.load_state_dict(state["comparison"])
        self.held_out_acceptance = state["held_out"]

    def attempt_state(self, attempt: Attempt) -> State:
        """Return the state of an attempt that was computed but not settled, with the candidate's weights if the gate
        passed it: they are then newer than those in service.
        """
        return {
            "step": attempt.step,
            "scores": list(attempt.scores.items()),
            "moments": moments_of(attempt.moments),
            "candidate": self._candidate.trained_weights if attempt.step.served else None,
            "lessons": attempt.lessons,
        }

    @torch.no_grad()
    def load_attempt(self, state: State) -> Attempt:
        """Return the attempt of such a state, for `settle` or `drop`."""
        if state["candidate"] is not None:
            _copy_weights(state["candidate"], self._candidate.trained_weights)
        moments = with_moments(self._optimizer, state["moments"])
        return Attempt(Step(**state["step"]), _to_scores(state["scores"]), moments, to_lessons(state["lessons"]))


def _to_scores(saved: State) -> Scores:
    return {example: (total, positions) for example, (total, positions) in saved}


def _copy_weights(source: Sequence[Tensor], destination: Sequence[Tensor]) -> None:
    for own, new in zip(destination, source, strict=True):
        own.copy_(new)
