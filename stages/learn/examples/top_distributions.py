"""The target's distributions inside another engine: the largest logits of its last pass.

Shapes: N lines of a pass, V target tokens, K largest logits.
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.contract.blocks import Numbers
from stages.learn.examples.teacher import largest_logits

LOG = logging.getLogger("omnidraft.vllm")

TOP = 64  # logits of a line that are kept


@dataclass(frozen=True, eq=False)
class TopDistributions:
    """The target's distributions at N lines of a pass, as far as they are kept."""

    ids_NK: Numbers  # the likeliest tokens, in descending order
    logits_NK: Numbers  # their logits, in float32
    totals_N: Numbers  # the logarithm of the sum of the exponentials of all logits
    sums_N1: Numbers  # the sum of the exponentials of all logits minus the largest, at the teacher's temperature (N, 1)

    def __len__(self) -> int:
        return len(self.totals_N)

    def select(self, start: int, stop: int) -> "TopDistributions":
        """Return the lines from `start` to `stop`, that one excluded."""
        return TopDistributions(*(values[start:stop] for values in vars(self).values()))

    def find_probability(self, line: int, token: int) -> float | None:
        """Return the probability of a token at temperature 1; None if it is not among the likeliest.

        >>> logits_NV = np.log(np.array([[0.5, 0.3, 0.2]], np.float32))
        >>> top = TopDistributions(np.array([[0, 1]]), logits_NV[:, :2], np.zeros(1, np.float32), np.ones((1, 1)))
        >>> round(top.find_probability(0, 1), 3), top.find_probability(0, 2)
        (0.3, None)
        """
        places = np.flatnonzero(self.ids_NK[line] == token)
        return float(np.exp(self.logits_NK[line, places[0]] - self.totals_N[line])) if len(places) else None

    def to_probs(self, size: int) -> torch.Tensor:
        """Return distributions over `size` tokens (N, V) with probability 0 for all but the likeliest."""
        probs_NV = torch.zeros(len(self), size)
        values_NK = np.exp(self.logits_NK - self.totals_N[:, None])
        return probs_NV.scatter_(1, torch.from_numpy(self.ids_NK.astype(np.int64)), torch.from_numpy(values_NK))


class LogitsReader:
    """Keeps the largest logits of each pass, chosen on the device, until the pass is over.

    Args:
        size: ids of the target's tokenizer; further outputs are ignored.

    >>> class Target:
    ...     def compute_logits(self, hidden_states):
    ...         return hidden_states
    >>> target, reader = Target(), LogitsReader(size=100)
    >>> reader.attach(target)
    >>> _ = target.compute_logits(torch.eye(2, 100).mul(10))
    >>> reader.take().ids_NK[:, 0].tolist(), reader.take()
    ([0, 1], None)
    """

    def __init__(self, size: int, temperature: float = 1.0) -> None:
        self._size, self._temperature = size, temperature
        self._last: tuple[Tensor, ...] | None = None
        self._failed = self._begins = False

    def attach(self, target: Any) -> None:
        """Let the target's `compute_logits` show its results here. What it returns is unchanged."""
        compute = target.compute_logits

        def compute_logits(*arguments: Any, **named: Any) -> Tensor | None:
            logits_NV: Tensor | None = compute(*arguments, **named)
            self._keep(logits_NV)
            return logits_NV

        target.compute_logits = compute_logits

    def begin_pass(self) -> None:
        """Keep the first logits from now on until they are taken; without this call, the last."""
        self._last, self._begins = None, True

    def take(self) -> TopDistributions | None:
        """Return the distributions of the last pass, in the order of its lines; None if they were taken or there are
        none."""
        last, self._last = self._last, None
        return TopDistributions(*(values.cpu().numpy() for values in last)) if last else None

    @torch.inference_mode()
    def _keep(self, logits_NV: Tensor | None) -> None:
        if self._begins and self._last is not None:
            return
        self._last = None
        if logits_NV is None or self._failed:  # of a rank that computes none
            return
        try:
            logits_NV = logits_NV[:, : self._size].float()
            logits_NK, ids_NK = largest_logits(logits_NV, min(TOP, logits_NV.shape[1]))
            sums_N1 = (logits_NV - logits_NK[:, :1]).mul_(1 / self._temperature).exp_().sum(-1, keepdim=True)
            self._last = ids_NK.int(), logits_NK, logits_NV.logsumexp(-1), sums_N1
        except Exception:
            LOG.exception("omnidraft cannot read the target's logits; its log has no probabilities, nothing is learned")
            self._failed = True
