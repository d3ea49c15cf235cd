"""Training the drafter on lessons: a copy learns, a gate decides, the served model takes the weights.

Shapes: B lessons, T pieces of the longest, D drafter ids, N taught positions.
"""

import copy
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from stages.blocks import Lesson
from stages.language_model import LanguageModel
from stages.losses import Loss, Student, Taught

# The share of the configured rate that is used: small for the optimiser's first steps, which have no second moments
# to speak of, and after an update that the gate refused; growing while updates pass.
FIRST_TRUST, SHRINK, GROW = 0.2, 0.5, 1.25
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
    """What came of an update."""

    loss: float
    positions: int
    before: float | None
    after: float | None
    served: bool
    reason: str


Score = tuple[float, int]  # sum of the gate's measure over a lesson's positions, and their number


def _mean(scores: Sequence[Score]) -> float | None:
    count = sum(number for _, number in scores)
    return sum(total for total, _ in scores) / count if count else None


def _padded(pieces: Sequence[int], length: int) -> list[int]:
    return [*pieces, *[0] * (length - len(pieces))]


class DrafterTrainer:
    """Owns the candidate (a copy of the served drafter), its optimiser, the replay buffer and the gate.

    Args:
        served: the drafter in service; only `update` writes its weights.
        loss_name, loss: what is minimised.
        measure: per position, what the gate compares (N,): the acceptance to expect under the sampling in use.
        allowed: pieces that may be drafted; the others are not part of the drafter's law.
        training: rates and sizes.
    """

    def __init__(
        self,
        served: LanguageModel,
        loss_name: str,
        loss: Loss,
        measure: Callable[[Student, Taught], Tensor],
        allowed: Collection[int],
        training: Training,
    ) -> None:
        self.served, self.loss_name, self.version = served, loss_name, 0
        self._loss, self._measure, self._training = loss, measure, training
        self._forbidden_D = served.mask_without(allowed)
        self._candidate = copy.deepcopy(served.model).float()
        self._optimizer = torch.optim.AdamW(
            self._candidate.parameters(), lr=training.rate, weight_decay=training.weight_decay, fused=True
        )
        self._trust = FIRST_TRUST
        self._served_scores: dict[Lesson, Score] = {}
        self._random = Random(training.seed)
        self._replay: deque[Lesson] = deque(maxlen=training.replay)
        self._held_out: deque[Lesson] = deque(maxlen=training.gate_window)

    def hold_out(self, lesson: Lesson) -> None:
        """Keep a lesson for the gate; it is never trained on."""
        self._held_out.append(lesson)

    def update(self, fresh: Sequence[Lesson]) -> Step:
        """Train the candidate on fresh lessons and as many old ones; serve it if the gate lets it pass."""
        old = self._random.sample(self._replay, min(len(fresh), len(self._replay)))
        self._replay.extend(fresh)
        before = _mean(self._scores(self.served.model, self._served_scores))
        moments = copy.deepcopy(self._optimizer.state_dict())
        loss, positions = self._train([*fresh, *old])
        if not math.isfinite(loss):
            self._restore(moments)
            return Step(loss, positions, before, None, False, "the loss was not finite")
        scores: dict[Lesson, Score] = {}
        after = _mean(self._scores(self._candidate, scores))
        if before is not None and after is not None and not after >= before - self._training.gate_tolerance:
            self._restore(moments)
            return Step(loss, positions, before, after, False, "the gate saw a lower acceptance")
        self._serve(scores)
        reason = "nothing held out yet" if before is None else "the gate let it pass"
        return Step(loss, positions, before, after, True, reason)

    def _train(self, lessons: Sequence[Lesson]) -> tuple[float, int]:
        """Gradient steps on all lessons. Returns the first step's loss (before learning) and its positions."""
        self._candidate.train()
        for group in self._optimizer.param_groups:
            group["lr"] = self._training.rate * self._trust
        losses, positions = [], 0
        for _ in range(self._training.steps):
            self._optimizer.zero_grad(set_to_none=True)
            total, positions = 0.0, 0
            batches = list(self._micro_batches(lessons))
            for batch in batches:
                student, taught, ngram_log_N = self._compare(self._candidate, batch)
                loss = self._loss(student, taught, ngram_log_N) / len(batches)
                if not torch.isfinite(loss):
                    return math.nan, positions
                loss.backward()
                total += float(loss.detach())
                positions += len(taught.rest_N)
            norm = torch.nn.utils.clip_grad_norm_(self._candidate.parameters(), self._training.clip)
            if not torch.isfinite(norm):
                return math.nan, positions
            self._optimizer.step()
            losses.append(total)
        self._candidate.eval()
        return losses[0], positions

    def _micro_batches(self, lessons: Sequence[Lesson]) -> Iterator[list[Lesson]]:
        """Lessons of similar length together, each batch's logits within `MAX_LOGITS`; no text beyond the context."""
        width = len(self._forbidden_D)
        batch: list[Lesson] = []
        usable = [one for one in lessons if one.teachings and len(one.pieces) <= self.served.max_length]
        for lesson in sorted(usable, key=lambda lesson: len(lesson.pieces)):
            if batch and (len(batch) + 1) * len(lesson.pieces) * width > MAX_LOGITS:
                yield batch
                batch = []
            batch.append(lesson)
        if batch:
            yield batch

    def _compare(self, model: torch.nn.Module, lessons: Sequence[Lesson]) -> tuple[Student, Taught, Tensor]:
        """The model's laws and the target's at every taught position, and the log-likelihood of n-grams' pieces."""
        longest = max(len(lesson.pieces) for lesson in lessons)
        device = self.served.device
        pieces_BT = torch.tensor([_padded(lesson.pieces, longest) for lesson in lessons], device=device)
        # Causal attention: what pads the ends is seen by nothing that counts.
        logits_BTD = model(input_ids=pieces_BT, use_cache=False).logits.float()
        logits_BTD = logits_BTD.masked_fill(self._forbidden_D, -torch.inf)
        taught = Taught.of([teaching for lesson in lessons for teaching in lesson.teachings], device)
        rows = torch.tensor([number for number, lesson in enumerate(lessons) for _ in lesson.teachings], device=device)
        places = torch.tensor([t.position - 1 for lesson in lessons for t in lesson.teachings], device=device)
        student = Student.of(logits_BTD[rows, places], taught)
        return student, taught, self._ngram_log(logits_BTD, lessons, pieces_BT)

    @staticmethod
    def _ngram_log(logits_BTD: Tensor, lessons: Sequence[Lesson], pieces_BT: Tensor) -> Tensor:
        spots = [(number, position) for number, lesson in enumerate(lessons) for position in lesson.ngram_positions]
        if not spots:
            return logits_BTD.new_zeros(1)
        rows, positions = torch.tensor(spots, device=logits_BTD.device).T
        log_ND = logits_BTD[rows, positions - 1].log_softmax(-1)
        return log_ND.gather(1, pieces_BT[rows, positions][:, None])[:, 0]

    @torch.no_grad()
    def _scores(self, model: torch.nn.Module, known: dict[Lesson, Score]) -> list[Score]:
        """The gate's measure over the held-out lessons' first levels; fills `known`, which is of this model."""
        for gone in known.keys() - set(self._held_out):
            del known[gone]
        missing = [lesson for lesson in self._held_out if lesson not in known]
        for batch in self._micro_batches(missing):
            student, taught, _ = self._compare(model, batch)
            measured = iter((self._measure(student, taught) * taught.first_N).tolist())
            for lesson in batch:
                total = sum(next(measured) for _ in lesson.teachings)
                known[lesson] = (total, sum(teaching.depth == 0 for teaching in lesson.teachings))
        return [known[lesson] for lesson in self._held_out if lesson in known]

    @torch.no_grad()
    def _serve(self, scores: dict[Lesson, Score]) -> None:
        """Copy the candidate's weights into the served model; its scores are now the served model's."""
        self._served_scores = scores
        for served, trained in zip(self.served.model.parameters(), self._candidate.parameters(), strict=True):
            served.copy_(trained)
        self.version += 1
        self._trust = min(1.0, self._trust * GROW)

    @torch.no_grad()
    def _restore(self, moments: dict[str, Any]) -> None:
        """As if the update had never been tried, but for a smaller rate."""
        for trained, served in zip(self._candidate.parameters(), self.served.model.parameters(), strict=True):
            trained.copy_(served)
        self._optimizer.load_state_dict(moments)
        self._trust *= SHRINK
        self._candidate.eval()
