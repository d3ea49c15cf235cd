"""Training the acceptance head on labelled pieces (paper, section 6; SpecDec++)."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import torch

from stages.blocks import Label
from stages.head import AcceptanceHead
from stages.snapshot import Json, SnapshotReader, SnapshotWriter, random_state, restored_moments, save_moments


class HeadTrainer:
    """Keeps recent labels and fits the head that is served, in place.

    Labels are those of the time of drafting: min(1, target / drafter) under the laws that the piece was really drawn
    and judged with. The buffer is short, so they are never far from the current drafter's, and no pass is spent on
    computing them again. All pieces weigh alike, because the stop rules need calibrated chances (SpecDec++ weighs
    rejections sixfold and needs a threshold that makes up for it).

    Args:
        head: served and trained.
        rate: AdamW's learning rate.
        batch: labels of a step.
        buffer: labels kept; the oldest leave.
        seed: of the choice of labels.
    """

    def __init__(self, head: AcceptanceHead, seed: int, rate: float, batch: int, buffer: int) -> None:
        self.served, self.batch, self.version = head, batch, 0
        self._first_weights = {name: weight.clone() for name, weight in head.state_dict().items()}
        self._rate, self._random = rate, Random(seed)
        self._labels: deque[Label] = deque(maxlen=buffer)
        self._optimizer = self._new_optimizer()

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.served.parameters(), lr=self._rate)

    def observe(self, labels: Sequence[Label]) -> None:
        """Keep labels of a finished prompt."""
        device = next(self.served.parameters()).device  # those of a row that was restored come from the CPU
        self._labels.extend(replace(label, features_F=label.features_F.to(device)) for label in labels)

    def update(self) -> float | None:
        """One step. Returns the loss in nats, or None when there is too little to learn from or it is not finite."""
        if len(self._labels) < min(self.batch, 32):
            return None
        chosen = self._random.sample(self._labels, min(self.batch, len(self._labels)))
        features_BF = torch.stack([label.features_F for label in chosen]).clone()
        labels_B = torch.tensor([label.acceptance for label in chosen], device=features_BF.device)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.served(features_BF), labels_B)
        if not math.isfinite(float(loss.detach())):
            return None
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        self.version += 1
        return float(loss.detach())

    def reset(self) -> None:
        """First weights, no labels, no momentum."""
        self.served.load_state_dict(self._first_weights)
        self._labels.clear()
        self._optimizer = self._new_optimizer()
        self.version += 1

    def save(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`. The first weights are those of the configuration."""
        features = [label.features_F for label in self._labels]
        return {
            "version": self.version,
            "weights": {name: keep.tensor(weight) for name, weight in self.served.state_dict().items()},
            "moments": save_moments(self._optimizer.state_dict(), keep),
            "features": keep.tensor(torch.stack(features)) if features else None,
            "acceptances": [label.acceptance for label in self._labels],
            "random": self._random.getstate(),
        }

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        self.version = saved["version"]
        self.served.load_state_dict({name: kept.tensor(weight) for name, weight in saved["weights"].items()})
        self._optimizer.load_state_dict(restored_moments(saved["moments"], self._optimizer, kept))
        self._random.setstate(random_state(saved["random"]))
        self._labels.clear()
        if saved["features"] is not None:
            self.observe(list(map(Label, kept.tensor(saved["features"]), saved["acceptances"])))
