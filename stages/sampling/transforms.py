"""Transforms of the target's logits that a request sets, each a function of the tokens emitted before.

They are applied before temperature, top-k and top-p. Emitted tokens have exactly the transformed distribution, because
the logits at every drafted place are transformed with the draft up to there as part of the history.

Definitions and order are those of vLLM: bias, then the penalties for repetition, frequency and presence. The penalties
for frequency and presence are those of OpenAI's interface.

Shapes: V target tokens.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

if TYPE_CHECKING:
    from concurrent.futures import Future


class LogitTransform(Protocol):
    """A change of the target's logits at one place of one row, as a function of what the row emitted before it."""

    def apply(self, logits_V: Tensor, emitted: Sequence[int]) -> None:
        """Change the logits in place. At least one of them must remain finite. Ids that are never emitted are at -inf.
        `emitted` are the tokens after the prompt and before this place. At a drafted place these end with a draft that
        may be rejected, so calls come in any order.
        """
        ...

    @property
    def is_slow(self) -> bool:
        """Whether a place takes so long that nothing is drafted, and the row waits while others are decoded."""
        return False

    def prepare(self, emitted: Sequence[int]) -> "Future[Any] | None":
        """Begin to compute what the place after the emitted tokens needs. Returns what is still to be awaited."""
        return None


class LogitBias(LogitTransform):
    """Adds a constant to the logits of some tokens.

    >>> logits_V = torch.tensor([1.0, 2.0, 3.0])
    >>> LogitBias([(0, 4.0), (2, -100.0)]).apply(logits_V, [])
    >>> logits_V
    tensor([  5.,   2., -97.])
    """

    def __init__(self, biases: Sequence[tuple[int, float]]) -> None:
        self._tokens = torch.tensor([token for token, _ in biases], dtype=torch.long)
        self._biases = torch.tensor([bias for _, bias in biases], dtype=torch.float64)

    @override
    def apply(self, logits_V: Tensor, emitted: Sequence[int]) -> None:
        logits_V[self._tokens.to(logits_V.device)] += self._biases.to(logits_V)


class Penalties(LogitTransform):
    """Penalties for tokens that occurred before.

    The logits of tokens in the prompt or the emitted text are divided by `repetition` if positive, else multiplied by
    it. Then `frequency` times a token's count in the emitted text is subtracted, and `presence` if it occurs there.

    >>> logits_V = torch.tensor([2.0, -2.0, 3.0, 1.0])
    >>> Penalties([0, 1], presence=0.5, frequency=0.25, repetition=2.0).apply(logits_V, [1, 2, 2])
    >>> logits_V
    tensor([ 1.0000, -4.7500,  0.5000,  1.0000])
    """

    def __init__(self, prompt: Sequence[int], presence: float, frequency: float, repetition: float) -> None:
        self._presence, self._frequency, self._repetition = presence, frequency, repetition
        self._prompt = frozenset(prompt if repetition != 1 else ())
        self._prompt_ids = torch.tensor(sorted(self._prompt), dtype=torch.long)

    @override
    def apply(self, logits_V: Tensor, emitted: Sequence[int]) -> None:
        counts = Counter(emitted)
        if self._repetition != 1:
            self._divide(logits_V, self._prompt_ids)
            self._divide(logits_V, torch.tensor([token for token in counts if token not in self._prompt]).long())
        tokens = torch.tensor(list(counts), dtype=torch.long, device=logits_V.device)
        frequencies = torch.tensor(list(counts.values()), dtype=logits_V.dtype, device=logits_V.device)
        logits_V[tokens] -= self._frequency * frequencies + self._presence

    def _divide(self, logits_V: Tensor, tokens: Tensor) -> None:
        tokens = tokens.to(logits_V.device)
        values = logits_V[tokens]
        logits_V[tokens] = torch.where(values > 0, values / self._repetition, values * self._repetition)
