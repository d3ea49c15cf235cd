"""Training the acceptance head on labelled pieces (paper, section 6; SpecDec++)."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import torch

from stages.contract.blocks import AcceptanceLabel
from stages.contract.snapshot import State, moments_of, random_state, with_moments
from stages.drafting.head import AcceptanceHead

NEW_LABELS = 32  # of a step: a step takes as long as half a pass of a fast target, and is worth more labels than one
# The same of a head that came trained, which gains less by a step (benchmarks/notes/choosing.md), but for the first
# step after a reset.
NEW_LABELS_TRAINED = 128
# Steps when an update of the drafter has shown its acceptance at all tokens of some texts, and their learning rate. The
# other rate of a head that came trained is low: labels of drafts are few, and of places where it wanted to draft.
LESSON_STEPS, LESSON_RATE = 4, 1e-3


class HeadTrainer:
    """Keeps recent labels and trains the served head in place.

    Labels are computed at drafting time: min(1, target / drafter) under the distributions that the piece was drawn and
    judged with. The buffer is short, so they stay close to those of the current drafter and are not computed again. All
    pieces have the same weight, because the stop rules need calibrated probabilities (SpecDec++ weighs rejections
    sixfold and compensates with its threshold).
    """

    def __init__(self, head: AcceptanceHead, seed: int, rate: float, batch: int, buffer: int) -> None:
        self.served, self.batch, self.version = head, batch, 0
        self._first_weights = {name: weight.clone() for name, weight in head.state_dict().items()}
        self._rate, self._random = rate, Random(seed)
        self._labels: deque[AcceptanceLabel] = deque(maxlen=buffer)
        self._new_labels = 0  # since the last step
        self._labels_per_step = min(batch, NEW_LABELS_TRAINED if head.came_trained else NEW_LABELS)
        self._optimizer = self._new_optimizer()

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.served.parameters(), lr=self._rate)

    def observe(self, labels: Sequence[AcceptanceLabel]) -> None:
        self._new_labels += len(labels)
        device = next(self.served.parameters()).device  # labels of a restored sequence are on the CPU
        self._labels.extend(replace(label, features_F=label.features_F.to(device)) for label in labels)

    def study(self, lessons: Sequence[AcceptanceLabel]) -> float | None:
        """Add labels of an update of the drafter, and make some gradient steps. Returns as `update`."""
        self.observe(lessons)
        loss = None
        for _ in range(LESSON_STEPS):
            loss = self._step(max(self._rate, LESSON_RATE))
        return loss

    def update(self) -> float | None:
        """Make one gradient step. Returns the loss in nats; None with few new labels, or if it is not finite."""
        first = min(self.batch, NEW_LABELS)
        due = self._labels_per_step if self._optimizer.state else min(self._labels_per_step, first)
        if self._new_labels < due or len(self._labels) < first:
            return None
        return self._step(self._rate)

    def _step(self, rate: float) -> float | None:
        self._new_labels = 0
        chosen = self._random.sample(self._labels, min(self.batch, len(self._labels)))
        features_BF = torch.stack([label.features_F for label in chosen]).clone()
        labels_B = torch.tensor([label.acceptance for label in chosen], device=features_BF.device)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.served(features_BF), labels_B)
        if not math.isfinite(float(loss.detach())):
            return None
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        self.version += 1
        return float(loss.detach())

    def reset(self) -> None:
        """Reset to the first weights; drop all labels and the optimiser's state."""
        self.served.load_state_dict(self._first_weights)
        self._labels.clear()
        self._new_labels = 0
        self._optimizer = self._new_optimizer()
        self.version += 1

    def state_dict(self) -> State:
        """Return the weights, the optimiser's moments and the labels. The first weights are the configuration's."""
        features = [label.features_F for label in self._labels]
        return {
            "version": self.version,
            "weights": self.served.state_dict(),
            "moments": moments_of(self._optimizer),
            "features": torch.stack(features) if features else (),
            "acceptances": [label.acceptance for label in self._labels],
            "random": self._random.getstate(),
            "new_labels": self._new_labels,
            "labels_per_step": self._labels_per_step,
        }

    def load_state_dict(self, state: State) -> None:
        self.version = state["version"]
        self.served.load_state_dict(state["weights"])
        self._optimizer.load_state_dict(with_moments(self._optimizer, state["moments"]))
        self._random.setstate(random_state(state["random"]))
        self._labels.clear()
        self.observe(list(map(AcceptanceLabel, state["features"], state["acceptances"])))
        self._new_labels, self._labels_per_step = state["new_labels"], state["labels_per_step"]
